"""All checks that need an accelerator, in one call: ``python benchmarks/device_check.py``. Prints a table and, at the end,
whether everything holds; docs/device.txt keeps the output of the last run. One GPU is enough (fake process group).

The truth of the timings is known by construction: gathers, reductions and blocks are made to spin on their streams for a set
time, so that the time for which compute must wait follows by arithmetic.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from models import NestedBlock, TransformerBlock, fake_group
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fsdptrace
from fsdptrace.adapters.legacy import old_bookkeeping
from fsdptrace.files import TraceFile, read_file

DEVICE = torch.device("cuda", 0)
WORLD = 8
spin: Any = torch.cuda._sleep
"""Keeps the current stream busy for so many cycles."""


class Table:
    """Rows of the result, printed as they come."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def title(self, text: str) -> None:
        print(f"\n{text}", flush=True)

    def row(self, name: str, text: str, good: bool | None = None) -> None:
        """One row; ``good`` is ``None`` where nothing is judged."""
        mark = "" if good is None else "ok" if good else "FAILED"
        if good is False:
            self.failed.append(name)
        print(f"  {name:<66} {text:<52} {mark}", flush=True)


# -- known truth -------------------------------------------------------------------------------------------------------
def cycles_of(milliseconds: float) -> int:
    """Cycles that ``torch.cuda._sleep`` spins for that long, at the clock of this moment."""
    make: Any = torch.cuda.Event
    begin, end = make(enable_timing=True), make(enable_timing=True)
    for _ in range(3):
        spin(20_000_000)
    begin.record()
    spin(20_000_000)
    end.record()
    torch.cuda.synchronize()
    return int(20_000_000 * milliseconds / begin.elapsed_time(end))


class SpinGather:
    """An all-gather that takes a set time on its stream (``FSDPModule.set_custom_all_gather``)."""

    def __init__(self, cycles: int) -> None:
        self.cycles = cycles

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False) -> None:
        spin(self.cycles)
        output_tensor.view(-1, input_tensor.numel()).copy_(input_tensor.clone())  # the input is a part of the output


class SpinReduce(SpinGather):
    """A reduce-scatter that takes a set time."""

    def __call__(  # type: ignore[override]
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        spin(self.cycles)
        output_tensor.copy_(input_tensor[: output_tensor.numel()])


def carrying(model: nn.Module) -> None:
    """Gathers and reductions that carry values: those of the fake process group leave their outputs as they were."""
    units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in units:
        module.set_custom_all_gather(SpinGather(0))
        module.set_custom_reduce_scatter(SpinReduce(0))


class _Spin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cycles: int) -> torch.Tensor:
        ctx.cycles = cycles
        spin(cycles)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        spin(ctx.cycles)
        return grads[0], None


class SpinBlock(nn.Module):
    """A layer whose forward and backward take a set time each."""

    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.cycles = cycles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apply: Any = _Spin.apply
        out: torch.Tensor = apply(self.linear(x), self.cycles)
        return out


def spinning(mesh: Any, count: int, compute: float, gather: float, reduce: float) -> nn.Sequential:
    """``count`` units; all times in ms."""
    torch.manual_seed(0)
    per_ms = cycles_of(1.0)
    model = nn.Sequential(*(SpinBlock(int(per_ms * compute)) for _ in range(count))).to(DEVICE)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for block in model:
        unit: Any = block
        unit.set_custom_all_gather(SpinGather(int(per_ms * gather)))
        unit.set_custom_reduce_scatter(SpinReduce(int(per_ms * reduce)))
    return model


def traced(model: nn.Module, step: Callable[[], None], **options: Any) -> TraceFile:
    """The trace of one timed step after one that warms up."""
    with tempfile.TemporaryDirectory() as out:
        with fsdptrace.record(model, out=out, **options) as rec:
            step()
            rec.step()
            step()
        rec.close()
        return read_file(rec.path)


def close(measured: float, expected: float) -> bool:
    """Within 5 % or 50 us (in ms)."""
    return abs(measured - expected) <= max(0.05 * expected, 0.05)


def check_truth(table: Table) -> None:
    """Exposed time of gathers and reductions against what follows from the spins."""
    table.title("known truth: 6 units, times in ms; inner units (the first has nothing to overlap with)")
    mesh = fake_group(WORLD)
    x = torch.randn(4, 64, device=DEVICE)
    for compute, gather, reduce in ((6.0, 8.0, 1.0), (8.0, 6.0, 12.0), (8.0, 8.0, 1.0)):
        for way in ("implicit", "explicit", "none"):
            model = spinning(mesh, 6, compute, gather, reduce)
            blocks: list[Any] = list(model)
            handles = []
            if way == "explicit":
                for before, after in itertools.pairwise(blocks):
                    before.set_modules_to_forward_prefetch([after])
                    after.set_modules_to_backward_prefetch([before])
            if way == "none":  # the host waits for the device before each unit: nothing is issued ahead
                for block in blocks:
                    handles.append(block.register_forward_pre_hook(lambda *_: torch.cuda.synchronize(), prepend=True))

            def step(model: nn.Module = model) -> None:
                model(x).sum().backward()

            trace = traced(model, step, device_timing="always")
            events = [event for event in trace.events if event.step == 1]
            forward = exposed(events, "unshard", "forward", range(1, 6))
            backward = exposed(events, "unshard", "backward", range(5))
            expected = gather if way == "none" else max(0.0, gather - compute)
            name = f"compute {compute}, gather {gather}, reduce {reduce}, {way}"
            table.row(f"{name}: forward gather", f"{forward:.3f} (must be {expected:.3f})", close(forward, expected))
            expected = max(0.0, gather - compute)
            table.row(f"{name}: backward gather", f"{backward:.3f} (must be {expected:.3f})", close(backward, expected))
            # Between two post-backwards: one backward and what its own gather was exposed.
            left = max(0.0, reduce - compute - expected)
            found = exposed(events, "reduce_scatter", "backward", range(1, 5))
            table.row(f"{name}: reduce-scatter", f"{found:.3f} (must be {left:.3f})", close(found, left))
            ran = statistics.median(
                (event["device_t1"] - event["device_t0"]) / 1e6
                for event in events
                if event.kind == "unshard" and "device_t0" in event.data and event.group in range(1, 5)
            )
            table.row(f"{name}: all-gather on its stream", f"{ran:.3f} (must be {gather:.3f})", close(ran, gather))


def exposed(events: list[Any], kind: str, pass_: str, groups: Any) -> float:
    """Median exposed ms of the events of ``kind`` in ``pass_``."""
    values = [
        event["exposed"] / 1e6
        for event in events
        if event.kind == kind and event.pass_ == pass_ and event.group in groups and "exposed" in event.data
    ]
    return statistics.median(values) if values else float("nan")


# -- no harm -----------------------------------------------------------------------------------------------------------
def layers(mesh: Any, count: int, width: int, dtype: torch.dtype | None) -> nn.Module:
    """A stack of transformer blocks on the device."""
    torch.manual_seed(0)
    model = nn.Sequential(*(TransformerBlock(width, 16 if width > 64 else 4) for _ in range(count))).to(DEVICE)
    policy = MixedPrecisionPolicy(param_dtype=dtype) if dtype else MixedPrecisionPolicy()
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


@contextmanager
def snapshots() -> Any:
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def check_cost(table: Table, rounds: int, out: str) -> None:
    """Step time and memory with and without, interleaved; results bit for bit."""
    mesh = fake_group(WORLD)
    for title, count, width, dtype, batch, limit in (
        ("24 layers of width 2048, bf16", 24, 2048, torch.bfloat16, (4, 1024), 1.01),
        ("96 tiny layers (host-bound)", 96, 32, None, (2, 8), 1.05),
    ):
        table.title(f"{title}: step time against untraced, medians of {rounds} rounds")
        model = layers(mesh, count, width, dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        x = torch.randn(*batch, width, device=DEVICE)

        def step(model: nn.Module = model, optimizer: Any = optimizer, x: torch.Tensor = x) -> float:
            loss = model(x).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(loss)

        variants: dict[str, Callable[[], AbstractContextManager[Any]]] = {
            "untraced": nullcontext,
            "untraced, against itself": nullcontext,
            "recording, no device timing": recorded(model, out, device_timing="off"),
            "recording, default: steps between those written in detail": later(model, out),
            "recording, every step timed": recorded(model, out, device_timing="always", detail="summary"),
            "recording, timed with memory at unit boundaries": recorded(model, out, device_timing="always", detail="full"),
            "torch.profiler, CPU and CUDA": profiler,
            "memory snapshots": snapshots,
        }
        times, host, peaks = interleave(step, variants, rounds)
        base, low, busy = statistics.median(times["untraced"]), lower(times["untraced"]), lower(host["untraced"])
        table.row("untraced", f"{base:.2f} ms, {busy:.2f} ms of CPU on the training thread")
        for name, values in times.items():
            if name == "untraced":
                continue
            ratio, quiet, cpu = statistics.median(values) / base, lower(values) / low, lower(host[name]) / busy
            judged = min(quiet, cpu) <= limit if name.startswith("recording, default") else None
            table.row(name, f"{ratio:.3f}; lower quartiles {quiet:.3f}, of CPU {cpu:.3f}", judged)
            if name == "untraced, against itself":
                table.row("    peak of allocated memory", f"{peaks[name]:,} B, untraced {peaks['untraced']:,} B")
            if name.startswith("recording"):
                same = peaks[name] == peaks["untraced"]
                table.row("    peak of allocated memory", f"{peaks[name]:,} B, untraced {peaks['untraced']:,} B", same)
        del model, optimizer
        gc.collect()
        plain, again, seen = (results(mesh, count, width, dtype, batch, way, out) for way in (False, False, True))
        if equal(plain, again):
            table.row("losses and parameters of 4 steps, with and without", "bit for bit", equal(plain, seen))
        else:
            table.row("losses and parameters of 4 steps", "not the same in two untraced runs: not judged")


def recorded(model: nn.Module, out: str, **options: Any) -> Callable[[], AbstractContextManager[Any]]:
    """A recording with these options, made anew for each round."""
    return lambda: fsdptrace.record(model, out=out, **options)


def later(model: nn.Module, out: str) -> Callable[[], AbstractContextManager[Any]]:
    """A recording with the default options, of steps after the first ten."""

    def make() -> AbstractContextManager[Any]:
        return fsdptrace.record(model, out=out, schedule=nothing)

    def nothing(step: int) -> Any:
        from torch.profiler import ProfilerAction

        return ProfilerAction.NONE

    return make


def profiler() -> AbstractContextManager[Any]:
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])


def lower(values: list[float]) -> float:
    """Lower quartile."""
    return sorted(values)[len(values) // 4]


def interleave(
    step: Callable[[], float], variants: dict[str, Callable[[], AbstractContextManager[Any]]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, int]]:
    """Wall times of steps and CPU times of the training thread in ms, the variants taking turns; peaks of allocated bytes."""
    for _ in range(5):
        step()
    times: dict[str, list[float]] = {name: [] for name in variants}
    host: dict[str, list[float]] = {name: [] for name in variants}
    peaks: dict[str, int] = {}
    for number in range(rounds):
        names = list(variants)
        for name in names if number % 2 else reversed(names):
            with variants[name]():
                step()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                for _ in range(4):
                    begin, own = time.perf_counter_ns(), time.thread_time_ns()
                    step()
                    host[name].append((time.thread_time_ns() - own) / 1e6)
                    torch.cuda.synchronize()
                    times[name].append((time.perf_counter_ns() - begin) / 1e6)
                peaks[name] = max(peaks.get(name, 0), torch.cuda.max_memory_allocated())
    return times, host, peaks


def results(mesh: Any, count: int, width: int, dtype: Any, batch: Any, trace: bool, out: str) -> list[torch.Tensor]:
    """Losses and shards after four steps."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = layers(mesh, count, width, dtype)
    carrying(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    torch.manual_seed(1)
    found = []
    with fsdptrace.record(model, out=out, device_timing="always", detail="full") if trace else nullcontext():
        for _ in range(4):
            loss = model(torch.randn(*batch, width, device=DEVICE)).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().cpu())
    torch.use_deterministic_algorithms(False)
    local: list[Any] = list(model.parameters())
    return found + [p.to_local().detach().cpu() for p in local]


def equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


# -- the two reports and selective checkpointing -----------------------------------------------------------------------
def check_leak(table: Table) -> None:
    """The nested-MoE leak of torch 2.9 and older: bytes by the allocator beside fsdptrace's own count."""
    table.title("nested units under full activation checkpointing with the bookkeeping of torch 2.9: what stays gathered")
    mesh = fake_group(WORLD)
    for way in ("leaking", "healthy"):
        torch.manual_seed(0)
        model = nn.Sequential(*(NestedBlock(512) for _ in range(8))).to(DEVICE)
        experts: dict[str, Any] = {}
        for i in range(8):
            block: Any = model[i]
            experts[f"{i}.experts"] = fully_shard(block.experts, mesh=mesh)
            model[i] = checkpoint_wrapper(block)
            fully_shard(model[i], mesh=mesh)
        fully_shard(model, mesh=mesh)
        x: Any = torch.randn(2, 16, 512, device=DEVICE, requires_grad=True)
        found: list[tuple[int, int]] = []
        with old_bookkeeping() if way == "leaking" else nullcontext(), tempfile.TemporaryDirectory() as out:
            model(x).sum().backward()
            with fsdptrace.record(model, out=out, on_violation="record") as rec:
                tracker = rec._recorded[0].engine.tracker

                def free(_: Any, tracker: Any = tracker, experts: Any = experts, found: Any = found) -> None:
                    # The gradient of the input comes last: every unit's backward is over, and the root's final callback
                    # has freed nothing yet. What is freed by hand here is what was held for nothing.
                    past = tracker.past_backward()
                    own, before = sum(group.bytes for group in past), torch.cuda.memory_allocated()
                    for group in past:
                        experts[group.fqn].unshard()  # a gather that nobody waited for is waited for,
                        experts[group.fqn].reshard()  # and freed
                    found.append((before - torch.cuda.memory_allocated(), own))

                x.register_hook(free)
                model(x).sum().backward()
            count = sum(v.rule == "gather-after-backward" for v in rec.violations)
            rec.close()
        table.row(f"{way}: violations of gather-after-backward", str(count), count > 0 if way == "leaking" else count == 0)
        real, own = found[-1]
        # The caching allocator hands out multiples of 512 B per tensor.
        table.row(
            f"{way}: bytes held past their backward: allocator; fsdptrace",
            f"{real:,}; {own:,}",
            abs(real - own) <= 8 * 2 * 512 and (own > 0) == (way == "leaking"),
        )
        del model, rec, tracker
        gc.collect()


def check_offload(table: Table) -> None:
    """CPU offload with pinned memory under checkpointing, healthy: silent."""
    table.title("CPU offload with pinned memory under activation checkpointing")
    mesh = fake_group(WORLD)
    torch.manual_seed(0)
    model = nn.Sequential(*(NestedBlock(256) for _ in range(4)))
    for i in range(4):
        block: Any = model[i]
        fully_shard(block.experts, mesh=mesh, offload_policy=CPUOffloadPolicy())
        model[i] = checkpoint_wrapper(block)
        fully_shard(model[i], mesh=mesh, offload_policy=CPUOffloadPolicy())
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as out, fsdptrace.record(model, out=out, on_violation="record") as rec:
        for _ in range(3):
            model(torch.randn(2, 16, 256, device=DEVICE)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    loud = [v.rule for v in rec.violations if v.severity != "info"]
    table.row("errors and warnings in 3 healthy steps", str(loud or "none"), not loud)
    rec.close()


class Selective(nn.Module):
    """Blocks, each called under selective checkpointing."""

    def __init__(self, blocks: list[nn.Module], context_fn: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.context_fn = context_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=self.context_fn)
        return x


def check_selective(table: Table) -> None:
    """Timing events inside selective-checkpoint regions: no dispatched operator, the same gradients."""
    table.title("selective checkpointing around and inside units, every step timed")
    mesh = fake_group(WORLD)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Any = create_selective_checkpoint_contexts

    def run(trace: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Selective([NestedBlock(128) for _ in range(3)], lambda: contexts(policy)).to(DEVICE)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        carrying(model)
        x = torch.randn(2, 16, 128, device=DEVICE, requires_grad=True)
        with (
            tempfile.TemporaryDirectory() as out,
            fsdptrace.record(model, out=out, device_timing="always") if trace else nullcontext(),
        ):
            loss: Any = model(x).sum()
            loss.backward()
        local: list[Any] = list(model.parameters())
        return [p.grad.to_local().cpu() for p in local if p.grad is not None]

    try:
        table.row("gradients, with and without", "bit for bit", equal(run(False), run(True)))
    except RuntimeError as error:
        table.row("gradients, with and without", f"{type(error).__name__}: {str(error)[:80]}", False)


def costs(table: Table) -> None:
    """What the pieces cost on the training thread."""
    table.title("host time of the pieces, ns")
    event = torch.Event("cuda", enable_timing=True)
    stream = torch.cuda.current_stream()
    event.record(stream)
    begin = torch.Event("cuda", enable_timing=True)
    begin.record(stream)
    torch.cuda.synchronize()
    for name, call in (
        ("record a timing event", lambda: event.record(stream)),
        ("query it", event.query),
        ("elapsed time of two", lambda: begin.elapsed_time(event)),
        ("torch._C._cuda_memoryStats (chosen, in timed steps with detail)", lambda: torch._C._cuda_memoryStats(0)),
        ("torch.cuda.memory_stats (too slow)", torch.cuda.memory_stats),
    ):
        runs: list[float] = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for _ in range(200):
                call()
            runs.append((time.perf_counter_ns() - start) / 200)
        table.row(name, f"{min(runs):,.0f}")


def main() -> int:
    """Runs everything; the exit status says whether all holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to check", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore")
    torch.cuda.set_device(0)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
    ).stdout.strip()
    print(
        f"{datetime.date.today()}, {torch.cuda.get_device_name()}, driver {driver}, torch {torch.__version__}, "
        f"python {sys.version.split()[0]}, fsdptrace {fsdptrace.__version__}"
    )
    table = Table()
    out = str(Path(tempfile.mkdtemp(prefix="fsdptrace-device-")))
    for check in (costs, check_truth, check_selective, check_offload, check_leak):
        try:
            check(table)
        except Exception as error:
            traceback.print_exc()
            table.row(check.__name__, f"{type(error).__name__}: {str(error)[:60]}", False)
    check_cost(table, args.rounds, out)
    print(f"\n{len(table.failed)} failed" + "".join(f"\n  {name}" for name in table.failed))
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
