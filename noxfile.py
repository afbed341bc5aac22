"""Sessions: ``lint``, ``types``, ``tests``, ``tests_engines``, ``stacks`` with frameworks, ``servers`` with real back ends,
``tests_otel`` over releases of OpenTelemetry, and ``tests_torch`` over real torch releases.

``nox`` runs the first three. ``nox -s tests_torch`` runs the core of the tests once per torch release, each in an
environment of its own, one after the other; one of them is ``nox -s "tests_torch(torch='2.7.1')"``. The default
Linux wheels of torch bring the CUDA libraries along, 5 to 7 GB per release, so that each environment is removed when
its tests are done; where pip is configured to find CPU wheels, it takes those. ``docs/releases.md`` says what passed.
Where pip is configured to cap torch (a ``constraint`` in pip.conf), ``PIP_CONFIG_FILE=/dev/null PIP_CONSTRAINT=``
lifts the cap.
"""

from __future__ import annotations

import shutil

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", "tests"]

TORCH = ["2.6.0", "2.7.1", "2.9.1", "2.10.0", "2.12.1", "2.13.0", "2.14.1", "latest"]
OTEL = ["1.26.0", "latest"]
PINNED = ("-c", "constraints.txt")


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and formatting."""
    session.install(*PINNED, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict."""
    session.install(*PINNED, "-e", ".[cli,test]")
    session.run("mypy", "--strict")


@nox.session
def tests(session: nox.Session) -> None:
    """All tests, on the pinned versions."""
    session.install(*PINNED, "-e", ".[cli,test]")
    session.run("python", "-m", "pytest", *(session.posargs or ["tests"]))


@nox.session
def tests_engines(session: nox.Session) -> None:
    """Tables and Parquet read by others: pandas, polars, pyarrow and Dask, as docs/reading.md shows."""
    session.install(*PINNED, "-e", ".[cli,test]", "dask[dataframe]", "pyarrow", "pandas", "polars")
    session.run("python", "-m", "pytest", "tests/analysis/test_tables.py", *session.posargs)


CORE = [
    "tests/adapters/test_plain.py", "tests/adapters/test_by_hand.py", "tests/adapters/test_passes.py",
    "tests/adapters/test_units.py", "tests/adapters/test_steps.py", "tests/gallery/test_gathering.py",
    "tests/gallery/test_hints.py", "tests/gallery/test_hooks_and_state.py", "tests/gallery/test_outside_forward.py",
    "tests/gallery/test_on_gloo.py", "tests/recompute/test_causes.py", "tests/test_restore.py", "tests/test_zero_code.py",
]  # fmt: skip
"""What each release must pass: events and rules worked out by hand, the leak as the release has it, hints, two real
ranks, causes of a CheckpointError, removal without a trace, and zero code."""


VERL = ("tensordict", "codetiming", "hydra-core", "peft", "fastapi", "uvicorn", "pyzmq", "orjson", "torchdata", "datasets")
"""What verl's engine and worker import."""


@nox.session
def stacks(session: nox.Session) -> None:
    """The recipes of docs/integrations.md with the frameworks themselves: about a GB of packages."""
    session.install(*PINNED, "-e", ".[cli,test]", "accelerate", "transformers", "lightning", "ray")
    session.install(*PINNED, "wandb", "tensorboard", "mlflow-skinny", "sqlalchemy", "alembic")
    session.install(*PINNED, "torchtitan", "triton", *VERL)
    session.install("--no-deps", "verl")  # asks for an older transformers than the others here
    session.run("python", "-m", "pytest", "tests/integrations", *session.posargs)


@nox.session
@nox.parametrize("torch", TORCH)
def tests_torch(session: nox.Session, torch: str) -> None:
    """The core of the tests on one torch release, or what is named after ``--``; the environment is removed afterwards."""
    wanted = ["--upgrade", "torch"] if torch == "latest" else [f"torch=={torch}"]
    try:
        session.install("--no-cache-dir", *wanted, "-e", ".[cli,test]")
        if torch.startswith("2.6."):
            session.run("python", "tests/support/torch26.py")  # its FSDP2 needs an accelerator
        session.run("python", "-c", "import sys, torch; print('torch', torch.__version__, 'python', sys.version.split()[0])")
        session.run("python", "-m", "pytest", *(session.posargs or CORE))
    finally:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)


@nox.session
def servers(session: nox.Session) -> None:
    """The exporters against servers too heavy for every run: MLflow, VictoriaMetrics, and the Collector, built once."""
    session.install(*PINNED, "-e", ".[cli,test]")
    session.run("python", "-m", "pytest", "tests/servers", "-m", "servers", *session.posargs)


@nox.session
@nox.parametrize("otel", OTEL)
def tests_otel(session: nox.Session, otel: str) -> None:
    """The exporters on one release of OpenTelemetry; what needs a newer one than 1.26 is skipped there."""
    wanted = ["opentelemetry-sdk", "opentelemetry-exporter-otlp"]
    extras = "cli,prometheus"
    if otel == "latest":
        wanted += ["opentelemetry-instrumentation", "grafana-foundation-sdk==0.0.21"]
        extras += ",otlp-json"
    else:
        wanted = [f"{name}=={otel}" for name in wanted]
    tools = ["torch==2.13.0", "pytest", "pytest-timeout", "psutil", "rotel", "promql-parser", "jsonschema", "pyyaml"]
    session.install("--upgrade", *wanted, *tools, "-e", f".[{extras}]")
    session.run("python", "-c", "import opentelemetry.sdk.version as v; print('opentelemetry-sdk', v.__version__)")
    session.run("python", "-m", "pytest", "tests/exporters", "tests/dashboards", *session.posargs)


@nox.session
def tests_ray(session: nox.Session) -> None:
    """Workers of a Ray cluster that was started before, reached by ``runtime_env``; nightly: Ray is large, slow to start."""
    session.install(*PINNED, "-e", ".[cli,test]", "ray")
    session.run("python", "-m", "pytest", "tests/test_ray.py", *session.posargs)


@nox.session
def tests_transformers(session: nox.Session) -> None:
    """transformers' own models under recording."""
    session.install(*PINNED, "-e", ".[cli,test]", "transformers>=4.57")
    session.run("python", "-m", "pytest", "tests/recompute/test_transformers.py", *session.posargs)
