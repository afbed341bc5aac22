"""``opentelemetry-instrument torchrun …``: a program that knows nothing of us, traced."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.servers import receiver, stop_exporter, until, values

pytest.importorskip("opentelemetry.instrumentation", reason="opentelemetry-instrumentation is not installed")

BIN = Path(sys.executable).parent

TRAINING = """
import torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def names(spans: list[tuple[Any, Any]]) -> Counter[str]:
    return Counter(span.name for _, span in spans)


@pytest.mark.multiprocess
def test_no_change_to_the_code(tmp_path: Path) -> None:
    """Two ranks under torchrun, two steps, three units and a root without parameters; the exporter is not instrumented."""
    (tmp_path / "train.py").write_text(TRAINING)
    with receiver() as sink:
        environment = {
            **os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "FSDPTRACE_OUT": str(tmp_path / "out"),
            "FSDPTRACE_RUN_ID": "run", "OTEL_EXPORTER_OTLP_ENDPOINT": sink.url, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_SERVICE_NAME": "my-training", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        done = subprocess.run(
            [str(BIN / "opentelemetry-instrument"), "torchrun", "--standalone", "--local-addr=127.0.0.1",
             "--nproc-per-node=2", "train.py"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        # Of rank 0 two steps, three units, two passes.
        until(lambda: (n := names(sink.spans()))["fsdp.unshard"] >= 12 and n["fsdp.rank"] >= 4, "spans arrive")
        stop_exporter(tmp_path / "out" / "run")
        spans = sink.spans()
    steps = {(about["dl.rank"], values(span.attributes)["fsdp.step"]) for about, span in spans if span.name == "fsdp.rank"}
    assert steps == {(rank, step) for rank in (0, 1) for step in (0, 1)}
    assert {about["service.name"] for about, _ in spans} == {"my-training"}
    assert names(spans)["fsdp.unshard"] == 12
    assert len({span.trace_id for _, span in spans if span.name == "fsdp.step"}) == 2


@pytest.mark.parametrize(("given", "after"), [(None, ("1", "otlp")), ("0", ("0", None)), ("1", ("1", None))])
def test_it_only_switches_on(given: str | None, after: tuple[str, str | None]) -> None:
    program = (
        "from opentelemetry.instrumentation.auto_instrumentation import initialize; import os, sys; initialize();"
        "print(os.environ.get('FSDPTRACE'), os.environ.get('FSDPTRACE_EXPORT'), 'torch' in sys.modules)"
    )
    environment = {**os.environ, **({} if given is None else {"FSDPTRACE": given})}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [str(word) for word in (*after, False)]
