"""What recording costs, as ratios of interleaved pairs in one run. ``make bench`` runs it; docs/overhead.md quotes it.

These machines are shared and noisy: steps are compared by the CPU time of the training thread, variants have their turns in
random order, and what is printed is the median of the rounds' ratios with their quartiles, and the ratio of the lower quartiles
of all steps (the quieter half).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from models import Block, TransformerBlock, blocks, fake_group, nested
from tight import tight_loop
from torch.distributed.fsdp import FSDPModule
from turns import Make, interleaved, train_step

import fsdptrace
from fsdptrace import events as ev
from fsdptrace.adapters.compat import GROUP_METHODS, groups_of


class Bench:
    """Collects rows and prints them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, value: str, budget: str = "") -> None:
        """One line of the table."""
        self.rows.append({"what": name, "measured": value, "budget": budget})
        print(f"{name:<74} {value:>28}  {budget}", flush=True)


def bench_tight(bench: Bench) -> None:
    """Per event, tight loop."""
    mix = {"unshard": 4, "wait_for_unshard": 2, "_to_sharded": 2, "pre_forward": 2, "post_forward": 2,
           "pre_backward": 1, "post_backward": 1}  # fmt: skip
    for checks, budget in ((False, "<= 350 ns"), (True, "<= 800 ns")):
        cost = tight_loop(checks)
        mean = sum(cost[name] * weight for name, weight in mix.items()) / sum(mix.values())
        detail = ", ".join(f"{name} {value:.0f}" for name, value in cost.items())
        title = "per event, tight loop, " + ("with all default checks" if checks else "recording")
        bench.add(title, f"{mean:.0f} ns", budget)
        print(f"    {detail}")


def bench_step(
    bench: Bench, rounds: int, checkpoint: bool, peers: bool, out: str, block: type[Block | TransformerBlock] = TransformerBlock
) -> None:
    """A step of 24 tiny blocks on the fake process group, against the same step without a tracer."""
    mesh = fake_group(16)
    model = blocks(mesh, 24, 32, checkpoint, block)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(2, 8, 32)

    def step() -> None:
        train_step(model, optimizer, x)

    for _ in range(5):
        step()
    with fsdptrace.record(model, out=out) as rec:
        step()
    events = len(rec.steps[-1])
    variants: dict[str, Make] = {
        "untraced": nullcontext,
        "untraced, against itself": nullcontext,
        "bare wrappers": lambda: _bare(model),
        # As after the first ten steps, which are written with all their events.
        "recording": lambda: fsdptrace.record(model, out=out, checks=False, detail="summary"),
        "recording and checking": lambda: fsdptrace.record(model, out=out, detail="summary"),
    }
    title = "24 transformer blocks" if block is TransformerBlock else "24 blocks of 4 layers"
    if checkpoint:
        title += ", checkpointed"
    bench.add(f"{title}: events per step", str(events))
    for name, ratio in interleaved(step, variants, rounds, 6).items():
        if name == "untraced":
            continue
        bench.add(f"{title}: {name}", str(ratio), "<= 1.03" if name.startswith("rec") else "1")
        if name.startswith("rec"):
            limit = "<= 2.2 us" if "checking" in name else "<= 1.3 us"
            bench.add("    the difference per event", f"{ratio.extra / events / 1000:.2f} us", limit)
    if peers:
        # CommDebugMode and FSDPMemTracker do not survive a second step (torch 2.13): a fresh one for each, as for the others.
        others = {"untraced": nullcontext, **_peers(model, optimizer)}
        for name, ratio in interleaved(step, others, rounds // 4, 1, warm=0).items():
            if name != "untraced":
                bench.add(f"{title}: {name}", f"{ratio.median:.2f}; {ratio.quiet:.2f}")


@contextmanager
def _bare(model: torch.nn.Module) -> Iterator[None]:
    """Around the same methods, wrappers that read the clock twice and append twelve integers: the least that an event written
    in Python can cost, for comparison."""
    sink: list[int] = []
    ids = itertools.count(1 << 40)

    def around(function: Callable[..., Any], group: Any) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            t0, seq = time.perf_counter_ns(), next(ids)
            result = function(group, *args)
            sink.extend((1, seq, t0, time.perf_counter_ns(), 0, 0, 0, 0, 0, 0, 0, 0))
            if len(sink) > 100_000:
                sink.clear()
            return result

        return wrapper

    units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in groups_of(unit._get_fsdp_state())]
    names = [name for name in GROUP_METHODS if name not in ("reshard", "_prefetch_unshard")]
    for group in groups:
        group.__dict__.update({name: around(getattr(type(group), name), group) for name in names})
    yield
    for group in groups:
        for name in names:
            del group.__dict__[name]


def _peers(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Make]:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.profiler import ProfilerActivity, profile

    def debug_log() -> AbstractContextManager[Any]:
        return _debug_log()

    return {
        "DEBUG log of fully_shard to a file": debug_log,
        "torch.profiler (CPU)": lambda: profile(activities=[ProfilerActivity.CPU]),
        "torch.profiler (CPU, shapes and stacks)": lambda: profile(
            activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True
        ),
        "CommDebugMode": CommDebugMode,
        "FSDPMemTracker": lambda: FSDPMemTracker(model, optimizer),
    }


@contextmanager
def _debug_log() -> Iterator[None]:
    log = logging.getLogger("torch.distributed.fsdp.fully_shard")
    level, disabled = log.level, logging.root.manager.disable
    with tempfile.NamedTemporaryFile("w") as stream:
        handler = logging.StreamHandler(stream)
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
        log.propagate = False
        logging.disable(logging.NOTSET)
        try:
            yield
        finally:
            logging.disable(disabled)
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = True


def bench_install(bench: Bench, out: str) -> None:
    """Entering and leaving ``record`` around a model of 200 groups that was seen before."""
    mesh = fake_group(16)
    model = nested(mesh, 100, 8)
    x = torch.randn(1, 2, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with fsdptrace.record(model, out=out, detail="summary"):
        train_step(model, optimizer, x)
    times = []
    for _ in range(60):
        start = time.perf_counter_ns()
        with fsdptrace.record(model, out=out, detail="summary"):
            pass
        times.append((time.perf_counter_ns() - start) / 1e6)
    bench.add("install and remove, 200 groups, model seen before", f"{statistics.median(times):.2f} ms", "<= 2 ms")


def bench_drain(bench: Bench, out: str) -> None:
    """CPU of the drain thread per event, bytes per event on disk, collections caused by recording."""
    mesh = fake_group(16)
    model = nested(mesh, 94, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(1, 2, 8)
    folder = Path(out) / "drain"
    with fsdptrace.record(model, out=str(folder), detail="full", run_id="drain") as rec:
        for _ in range(20):
            train_step(model, optimizer, x)
            time.sleep(0.3)
    session = rec._session
    assert session is not None
    rec.flush()
    time.sleep(0.4)
    events = session.drain.written_events
    busy = session.drain.busy_ns
    path = Path(rec.path)
    rec.close()
    size = path.stat().st_size
    per_step = events / 20
    bench.add("events per step, 94 nested blocks checkpointed", f"{per_step:.0f}")
    bench.add("drain thread, CPU per event", f"{busy / events / 1000:.2f} us", "<= 3 us")
    bench.add("JSONL on disk per event", f"{size / events:.0f} B", "<= 160 B")
    import gzip

    packed = len(gzip.compress(path.read_bytes(), 6))
    bench.add("  the same, gzip", f"{packed / events:.1f} B", "<= 20 B")
    # Default detail of a long run: the first 10 steps and every 100th in full, one line for the others.
    line = next(len(line) for line in path.read_bytes().splitlines() if b'"kind":"step"' in line[:40])
    hour = 3600  # steps, at one a second
    total = (10 + hour / 100) * per_step * size / events + hour * (line + 120)
    bench.add("JSONL per rank and hour at one step a second, default detail", f"{total / 1e9:.3f} GB")


def bench_collections(bench: Bench, out: str) -> None:
    """Garbage collections with and without recording, over the same steps."""
    mesh = fake_group(16)
    model = blocks(mesh, 8, 8, False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(1, 2, 8)

    def collections(make: Make) -> int:
        with make():
            train_step(model, optimizer, x)  # what putting the hooks on allocates is not a step's doing
            gc.collect()
            before = sum(entry["collections"] for entry in gc.get_stats())
            for _ in range(1000):
                train_step(model, optimizer, x)
            return int(sum(entry["collections"] for entry in gc.get_stats()) - before)

    plain = collections(nullcontext)
    traced = collections(lambda: fsdptrace.record(model, out=out, detail="summary"))
    bench.add("garbage collections in 1,000 steps, untraced and recording", f"{plain} and {traced}", "the same")


def main() -> None:
    """Runs all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="rounds in which the variants take turns")
    parser.add_argument("--no-peers", action="store_true", help="leave torch.profiler and the others out")
    parser.add_argument("--json", help="write the table to this file as well")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    bench = Bench()
    out = tempfile.mkdtemp(prefix="fsdptrace-bench-")
    print(f"torch {torch.__version__}, python {sys.version.split()[0]}, {os.cpu_count()} cores, {ev.WIDTH} ints per event")
    try:
        bench_tight(bench)
        bench_step(bench, args.rounds, False, not args.no_peers, out)
        bench_step(bench, args.rounds, True, not args.no_peers, out)
        bench_step(bench, args.rounds, False, False, out, Block)
        bench_install(bench, out)
        bench_drain(bench, out)
        bench_collections(bench, out)
    finally:
        shutil.rmtree(out, ignore_errors=True)
    if args.json:
        Path(args.json).write_text(json.dumps(bench.rows, indent=1))


if __name__ == "__main__":
    main()
