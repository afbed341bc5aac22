"""The end of programs that know nothing of us: out of memory, aborted from C++, told to stop. Every process's file reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.zero_code import TRAINING, command, run, traces

OUT_OF_MEMORY = """
import resource
KEEP = {
    "tensors": lambda: torch.empty(1 << 23, dtype=torch.uint8),
    "small ones": lambda: torch.empty(512, dtype=torch.uint8),
    "objects": lambda: bytes(1 << 16),
}[sys.argv[1]]

class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.kept, self.limited = nn.Linear(8, 8), [], False
    def forward(self, x):
        while self.limited:
            self.kept.append(KEEP())
        return self.lin(x)

model = nn.Sequential(nn.Linear(8, 8), Keeps(), nn.Linear(8, 8))
for layer in model:
    fully_shard(layer, mesh=mesh, reshard_after_forward=False)
fully_shard(model, mesh=mesh)
train(model, 2)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20),) * 2)
model[1].limited = True
train(model, 1)
"""


@pytest.mark.parametrize(("what", "error"), [("tensors", "can't allocate memory"), ("objects", "MemoryError")])
def test_out_of_memory(tmp_path: Path, what: str, error: str) -> None:
    """Under a limit on the address space. Two layers of 288 bytes are gathered when the second one's forward fails."""
    program = (TRAINING + OUT_OF_MEMORY).replace("sys.argv[1]", repr(what))
    done = run(tmp_path, program, "--on-violation", "record", code=1)
    assert error in done.stderr
    if sys.version_info >= (3, 11):
        assert (
            "fsdptrace: Sequential: 576 B of parameters are gathered in 2 units, most in 0 288 B, 1 288 B (step 2)."
        ) in done.stderr
    assert "turned" not in done.stderr  # no fault of ours
    assert "1 FSDP2 model in 1 of 1 process, 3 steps; no errors or warnings" in done.stderr.splitlines()[-1]
    (trace,) = traces(tmp_path)
    assert trace.complete
    (failed,) = [event for event in trace.events if event.kind == "exception"]
    assert trace.models[0].units[failed["unit"]].fqn == "1"


ABORT = """
import os, tempfile
from datetime import timedelta
import torch, torch.nn as nn, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 24)])  # 288 bytes and 864, gathered in one unit
    def forward(self, x, pick):
        return self.experts[pick](x)

def work(rank, folder):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo")
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    model = Experts()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    for step in range(2):
        model(torch.ones(2, 8), rank if step else 0).sum().backward()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        children = [context.Process(target=work, args=(rank, folder)) for rank in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        print(sorted(child.exitcode for child in children))
"""


@pytest.mark.multiprocess
def test_an_abort_in_a_collective(tmp_path: Path) -> None:
    """Two ranks use experts of unequal size in the second backward: gloo aborts the one that gets more than it waits for, from
    C++, and the other one's collective fails. With ``flush="collective"`` both files say where each stood."""
    done = run(tmp_path, ABORT, "--on-violation", "record", FSDPTRACE_FLUSH="collective", FSDPTRACE_RUN_ID="r")
    aborted = done.stdout == f"[{-signal.SIGABRT}, 1]\n"
    assert aborted or done.stdout == "[1, 1]\n", done.stdout
    files = traces(tmp_path)
    assert [trace.header["rank"] for trace in files] == [0, 1]
    assert sum(trace.complete for trace in files) == (1 if aborted else 2)
    for trace in files:
        assert not trace.damaged
        backwards = [event for event in trace.events if event.kind == "pre_backward"]
        assert len(backwards) == 2  # the last pre-backward before the end is there
        if not trace.complete:
            assert (trace.entered[-1]["what"], trace.entered[-1]["group"]) == ("post_backward", 0)
    # The launched one, two ranks, and multiprocessing's resource tracker.
    assert "2 FSDP2 models in 2 of 4 processes, 2 steps; no errors or warnings" in done.stderr.splitlines()[-1]


def test_told_to_stop(tmp_path: Path) -> None:
    """SIGTERM for the launcher, as schedulers send it, is the program's; the file reads to the last event before it."""
    program = (
        TRAINING
        + """
import time
model = build(2)
train(model, 2)
open("ready", "w").close()
time.sleep(60)
"""
    )
    child = subprocess.Popen(
        command(tmp_path, program), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    deadline = time.monotonic() + 90
    while not (tmp_path / "ready").exists():
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGTERM
    assert "1 FSDP2 model in 1 of 1 process, 2 steps; no errors or warnings" in said.splitlines()[-1]
    (trace,) = traces(tmp_path)
    assert not trace.complete
    assert not trace.damaged
    # Two layers, two steps, each with a post-backward of each.
    assert sum(event.kind == "post_backward" for event in trace.events) == 4
