"""What recording costs, as ratios of interleaved pairs in one run. ``make bench`` runs it; docs/overhead.md quotes it.

These machines are shared and noisy: figures are medians of paired ratios of process CPU time, never absolute times.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from models import blocks, fake_group, nested
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

import fsdptrace
from fsdptrace import events as ev
from fsdptrace.adapters.context import BACKWARD_SEQ, PARENT, Context
from fsdptrace.adapters.hooks import GroupHooks
from fsdptrace.checks import registry
from fsdptrace.checks.engine import Engine
from fsdptrace.model_map import GroupInfo, ModelMap, UnitInfo
from fsdptrace.ring import Ring

Make = Callable[[], AbstractContextManager[Any]]


class Bench:
    """Collects rows and prints them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, value: str, budget: str = "") -> None:
        """One line of the table."""
        self.rows.append({"what": name, "measured": value, "budget": budget})
        print(f"{name:<74} {value:>22}  {budget}", flush=True)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """One ordinary step."""
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def paired(run: Callable[[], None], variants: dict[str, Make], rounds: int) -> dict[str, tuple[float, float, float]]:
    """Ratio of CPU time against no tracer, per variant: median and 95 % interval over ``rounds`` interleaved pairs."""
    ratios: dict[str, list[float]] = {name: [] for name in variants}
    for round_number in range(rounds):
        names = list(variants)
        for name in names if round_number % 2 else reversed(names):
            with variants[name]():
                traced = _cpu(run)
            plain = _cpu(run)
            ratios[name].append(traced / plain)
    return {name: _interval(values) for name, values in ratios.items()}


def _cpu(run: Callable[[], None]) -> int:
    # The training thread's own CPU time: a background thread's is reported apart.
    start = time.thread_time_ns()
    run()
    return time.thread_time_ns() - start


def _interval(values: list[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    half = 1.96 * (len(ordered) ** 0.5) / 2
    middle = len(ordered) / 2
    low = ordered[max(0, int(middle - half))]
    high = ordered[min(len(ordered) - 1, int(middle + half))]
    return statistics.median(ordered), low, high


class _Stub:
    """Has the surface of an FSDPParamGroup that hooks touch, and does nothing: what is left is the hook's own cost."""

    def __init__(self) -> None:
        self._sharded_state = ShardedState.SHARDED
        self._training_state = TrainingState.FORWARD
        self._all_gather_result: Any = None
        self.fsdp_params: list[Any] = []
        self.reduce_grads = self.all_reduce_grads = self.reshard_after_backward = self.unshard_in_backward = True
        self.post_forward_mesh_info = object()
        self.result = SimpleNamespace(all_gather_input_split_sizes=[1], all_gather_output=torch.empty(64))

    def unshard(self, async_op: bool = False) -> None:
        self._all_gather_result = self.result

    def wait_for_unshard(self) -> None:
        self._all_gather_result = None

    def reshard(self) -> None: ...
    def _to_sharded(self) -> None: ...
    def _to_sharded_post_forward(self) -> None: ...
    def use_training_state(self, training_state: Any) -> Any: ...
    def _backward_prefetch(self) -> None: ...
    def pre_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs

    def post_forward(self, module: Any, input: Any, output: Any) -> Any: ...
    def pre_backward(self, default_prefetch: bool, *unused: Any) -> None: ...
    def post_backward(self, *unused: Any) -> None: ...
    def finalize_backward(self) -> None: ...


def tight_loop(with_checks: bool) -> dict[str, float]:
    """Nanoseconds per event by kind, hook minus bare call, in a loop with warm caches."""
    info = GroupInfo(
        0, "a", 0, ("a",), (), 1, 256, 64, "float32", "float32", 4, 4, 1, {"0": 4}, True, True, 1, False
    )  # fmt: skip
    model_map = ModelMap(0, "M", (UnitInfo(0, "a", ("a",), (0,), True),), (info,))
    rules = registry.select(None) if with_checks else ()
    engine = Engine(model_map, rules, lambda violation: None)
    ring = Ring()
    owner = SimpleNamespace(before_collective=None, stop_run=lambda e: True, fault=lambda e: None)
    if not with_checks:
        engine.handler = lambda kind: _nothing  # type: ignore[method-assign]
    context = Context(0, ring.append, iter(range(1 << 40)), engine, owner, {})  # type: ignore[arg-type]
    stub = _Stub()
    hooks = GroupHooks(context, stub, info)
    context.shared[BACKWARD_SEQ] = context.shared[PARENT] = 1  # inside a hook of a backward
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
    for name, args in (
        ("unshard", ()),
        ("wait_for_unshard", ()),
        ("_to_sharded", ()),
        ("pre_forward", (None, (), {})),
        ("post_forward", (None, None, None)),
        ("pre_backward", (True,)),
        ("post_backward", ()),
    ):
        calls[name] = (_call(hooks.wrappers[name], args), _call(getattr(stub, name), args))
    out = {}
    for name, (hooked, bare) in calls.items():

        def prepare(name: str = name) -> None:
            stub._sharded_state = ShardedState.UNSHARDED if name == "_to_sharded" else ShardedState.SHARDED
            stub._all_gather_result = stub.result if name == "wait_for_unshard" else None

        out[name] = _loop(hooked, prepare, ring) - _loop(bare, prepare, ring)
    return out


def _nothing(seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
    pass


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: function(*args)


def _loop(call: Callable[[], Any], prepare: Callable[[], None], ring: Ring) -> float:
    best = float("inf")
    for _ in range(25):
        start = time.perf_counter_ns()
        for _ in range(400):
            prepare()
            call()
        used = time.perf_counter_ns() - start
        start = time.perf_counter_ns()
        for _ in range(400):
            prepare()
        best = min(best, (used - (time.perf_counter_ns() - start)) / 400)
        ring.clear()
    return best


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


def bench_step(bench: Bench, rounds: int, checkpoint: bool, peers: bool, out: str) -> None:
    """A step of 24 tiny blocks on the fake process group, against the same step without a tracer."""
    mesh = fake_group(16)
    model = blocks(mesh, 24, 32, checkpoint)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(2, 8, 32)

    def run() -> None:
        for _ in range(2):
            train_step(model, optimizer, x)

    for _ in range(3):
        run()
    with fsdptrace.record(model, out=out) as rec:
        train_step(model, optimizer, x)
    events = len(rec.steps[-1])
    variants: dict[str, Make] = {
        "untraced against itself": nullcontext,
        "fsdptrace, recording without checks": lambda: fsdptrace.record(model, out=out, checks=False),
        "fsdptrace, recording with all default checks and files": lambda: fsdptrace.record(model, out=out),
    }
    title = "24 blocks, checkpointed" if checkpoint else "24 blocks"
    base = statistics.median(_cpu(run) / 2 for _ in range(10))
    bench.add(f"{title}: events per step", str(events))
    for name, (median, low, high) in paired(run, variants, rounds).items():
        budget = "<= 1.03" if name.startswith("fsdptrace") else ""
        bench.add(f"{title}: {name}", f"{median:.3f} ({low:.3f}-{high:.3f})", budget)
        if name.startswith("fsdptrace"):
            limit = "<= 1.3 us" if "without" in name else "<= 2.2 us"
            bench.add("    the same per event, inside the step", f"{(median - 1) * base / events / 1000:.2f} us", limit)
    if peers:
        for name, (median, low, high) in paired(run, _peers(model, optimizer), max(6, rounds // 6)).items():
            bench.add(f"{title}: {name}", f"{median:.2f} ({low:.2f}-{high:.2f})")


def _peers(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Make]:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.profiler import ProfilerActivity, profile

    return {
        "torch.profiler (CPU)": lambda: profile(activities=[ProfilerActivity.CPU]),
        "torch.profiler (CPU, shapes and stacks)": lambda: profile(
            activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True
        ),
        "CommDebugMode": CommDebugMode,
        "FSDPMemTracker": lambda: FSDPMemTracker(model, optimizer),
    }


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
        for _ in range(6):
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
    per_step = events / 6
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
        gc.collect()
        before = sum(entry["collections"] for entry in gc.get_stats())
        with make():
            for _ in range(300):
                train_step(model, optimizer, x)
        return sum(entry["collections"] for entry in gc.get_stats()) - before

    plain = collections(nullcontext)
    traced = collections(lambda: fsdptrace.record(model, out=out, detail="summary"))
    bench.add("garbage collections in 300 steps, untraced and recording", f"{plain} and {traced}", "the same")


def main() -> None:
    """Runs all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="interleaved pairs per variant")
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
        bench_install(bench, out)
        bench_drain(bench, out)
        bench_collections(bench, out)
    finally:
        shutil.rmtree(out, ignore_errors=True)
    if args.json:
        Path(args.json).write_text(json.dumps(bench.rows, indent=1))


if __name__ == "__main__":
    main()
