"""Without ``out``: the files lie in a spool folder on the node, and are gone once they are delivered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.servers import receiver, values, wait_for_exporter

TRAINING = """
import torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
import fsdptrace

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,))
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with fsdptrace.record(model, exporters=["otlp"]) as rec:
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
rec.flush()
print(rec.path)
"""


def test_spooled_delivered_and_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with receiver() as sink:
        environment = {
            **os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": sink.url, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", TRAINING],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
            cwd=tmp_path,
        )
        path = Path(done.stdout.strip())
        assert path.parent.parent == tmp_path / f"fsdptrace-spool-{os.getuid()}"
        assert path.parent.parent.stat().st_mode & 0o077 == 0
        wait_for_exporter(path.parent)
        steps = {values(span.attributes)["fsdp.step"] for _, span in sink.spans() if span.name == "fsdp.units"}
    assert steps == {0, 1, 2}
    assert not path.parent.exists()
    assert not (tmp_path / "fsdptrace-out").exists()
