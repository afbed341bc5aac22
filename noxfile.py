"""Sessions: ``lint``, ``types``, ``tests``, ``tests_engines``, and ``tests_torch`` over real torch releases.

``nox`` runs the first three. ``nox -s tests_torch`` runs the quick tests once per torch release, each in an
environment of its own; one of them is ``nox -s "tests_torch(torch='2.7.1')"``. The default Linux wheels of
torch bring the CUDA libraries along, several GB per release; where pip is configured to find CPU wheels, it
takes those.
"""

from __future__ import annotations

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", "tests"]

TORCH = ["2.6.0", "2.7.1", "2.9.1", "2.10.0", "2.12.1", "2.13.0", "2.14.1", "latest"]
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


@nox.session
@nox.parametrize("torch", TORCH)
def tests_torch(session: nox.Session, torch: str) -> None:
    """The quick tests, on one torch release."""
    wanted = ["--upgrade", "torch"] if torch == "latest" else [f"torch=={torch}"]
    session.install(*wanted, "-e", ".[cli,test]")
    session.run("python", "-c", "import torch; print('torch', torch.__version__)")
    session.run("python", "-m", "pytest", "tests", "-m", "not slow", *session.posargs)
