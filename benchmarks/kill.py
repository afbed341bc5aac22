"""SIGKILL at random moments: every file must be readable, and what is missing from it is measured.

A child trains four units on the fake process group, most of its steps written with one line each, and keeps its newest event
and the time in shared memory. It is killed; then its files are read.

python benchmarks/kill.py --times 100
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NEWEST, AT, FLUSHED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one kill left: whether all lines but the last could be read, seconds of events that are missing, and whether the
    newest event is missing that ``flush="collective"`` had put there."""

    readable: bool
    lost_seconds: float
    broken_promise: bool
    steps: int


def train_until_killed(out: str, flush: str, shared: Any) -> None:
    """The child: endless steps."""
    import torch
    import torch.distributed as dist
    import torch.nn as nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import fsdptrace
    from fsdptrace import events as ev
    from fsdptrace.standing import newest

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(2, 8)
    with fsdptrace.record(model, out=out, run_id="r", flush=flush, max_bytes=1 << 20) as rec:
        session = rec._session
        assert session is not None
        flush_now = session.drain.flush_now

        def promised(model: int = 0, entered: int = 0, which: int = 0) -> None:
            flush_now(model, entered, which)
            records = session.ring.running[0].records if 0 in session.ring.running else []
            if records:
                shared[FLUSHED] = records[-ev.WIDTH + ev.SEQ]

        session.drain.flush_now = promised  # type: ignore[method-assign]
        while True:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            shared[AT] = time.perf_counter_ns()
            shared[NEWEST] = newest(session)


def one(folder: Path, flush: str, delay: float) -> Outcome:
    """Starts a child, kills it ``delay`` seconds after its first step, reads what it left."""
    from fsdptrace.analysis import find_runs
    from fsdptrace.analysis.lines import read_process
    from fsdptrace.files import find_files, read_file

    context = multiprocessing.get_context("forkserver")
    shared = context.RawArray("q", 3)
    child = context.Process(target=train_until_killed, args=(str(folder), flush, shared))
    child.start()
    deadline = time.monotonic() + 120
    while not shared[NEWEST] and child.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(delay)
    child.kill()
    child.join()
    (path,) = find_files(folder)
    torn = sum(not part.read_bytes().endswith(b"\n") for part in folder.glob("r/*"))
    trace = read_file(path)
    (run,), _ = find_runs(folder)
    process = read_process(run.sources[0])
    seqs = {event.seq for event in trace.events}
    last = max(event.t1 for event in trace.events)
    return Outcome(
        readable=len(trace.damaged) <= torn and not trace.complete, lost_seconds=max(0.0, (shared[AT] - last) / 1e9),
        broken_promise=shared[FLUSHED] > 0 and shared[FLUSHED] not in seqs, steps=len(process.steps),
    )  # fmt: skip


def main() -> None:
    """Kills many children and prints what they left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "torch.distributed.fsdp", "fsdptrace.recording"])
    for flush in ("none", "collective"):
        outcomes = []
        for _ in range(args.times):
            folder = Path(tempfile.mkdtemp(prefix="fsdptrace-kill-"))
            outcomes.append(one(folder, flush, rng.uniform(0, 3)))
            shutil.rmtree(folder)
        lost = sorted(outcome.lost_seconds for outcome in outcomes)
        print(
            f"flush={flush}: {args.times} kills; read: {sum(outcome.readable for outcome in outcomes)}; "
            f"steps in the files {sum(outcome.steps for outcome in outcomes):,}; "
            f"missing at the end: median {lost[len(lost) // 2]:.2f} s, most {lost[-1]:.2f} s; "
            f"newest event before the last collective missing: {sum(outcome.broken_promise for outcome in outcomes)}"
        )


if __name__ == "__main__":
    main()
