"""Programs that know nothing of us, run under ``fsdptrace run``, and what they left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fsdptrace.files import TraceFile, find_files, read_file

COMMAND = str(Path(sys.executable).with_name("fsdptrace"))

TRAINING = """
import gc, sys, weakref
import torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.set_num_threads(1)
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,))

def build(layers):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss
"""
"""A process group of two of which one process plays one, ``build(layers)`` and ``train(model, steps)``."""


def command(tmp_path: Path, program: str, *options: str, arguments: tuple[str, ...] = ()) -> list[str]:
    """The command line that runs ``program``, with its files under ``tmp_path / "out"``."""
    path = tmp_path / "program.py"
    path.write_text(program)
    return [COMMAND, "run", "--out", str(tmp_path / "out"), *options, "--", sys.executable, str(path), *arguments]


def run(tmp_path: Path, program: str, *options: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """``fsdptrace run`` with ``options`` on ``program``, which must end with ``code``."""
    done = subprocess.run(
        command(tmp_path, program, *options), capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done


def traces(tmp_path: Path) -> list[TraceFile]:
    """The files of all processes."""
    return [read_file(path) for path in find_files(tmp_path / "out")]
