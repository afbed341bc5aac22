"""Device times against what is known by construction: gathers, reductions and blocks are made to spin on their streams for a
set time, so that the time for which compute must wait follows by arithmetic."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from device_common import DEVICE, WORLD, Table
from models import fake_group
from torch.distributed.fsdp import FSDPModule, fully_shard

import fsdptrace
from fsdptrace.files import TraceFile, read_file

spin: Any = torch.cuda._sleep
"""Keeps the current stream busy for so many cycles."""


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
    """An all-gather that takes a set time on its stream (``FSDPModule.set_custom_all_gather``).

    ``gate``: an event that the next gather's copy-in waits for on the device.
    """

    def __init__(self, cycles: int) -> None:
        self.cycles = cycles
        self.gate: Any = None

    def hold(self, *_: Any) -> None:
        """A forward pre-hook: nothing of the unit's gather runs before compute is where it is now."""
        self.gate = torch.cuda.current_stream().record_event()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.gate is not None:  # called on the copy-in stream
            torch.cuda.current_stream().wait_event(self.gate)
            self.gate = None
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


def spinning(mesh: Any, count: int, compute: float, gather: float, reduce: float) -> tuple[nn.Sequential, list[SpinGather]]:
    """``count`` units, and the gathers of each; all times in ms."""
    torch.manual_seed(0)
    per_ms = cycles_of(1.0)
    model = nn.Sequential(*(SpinBlock(int(per_ms * compute)) for _ in range(count))).to(DEVICE)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    gathers = [SpinGather(int(per_ms * gather)) for _ in range(count)]
    for block, comm in zip(model, gathers, strict=True):
        unit: Any = block
        unit.set_custom_all_gather(comm)
        unit.set_custom_reduce_scatter(SpinReduce(int(per_ms * reduce)))
    return model, gathers


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
    for compute, gather, reduce in ((6.0, 8.0, 1.0), (8.0, 6.0, 12.0), (6.0, 6.0, 1.0)):
        for way in ("implicit", "explicit", "none"):
            model, gathers = spinning(mesh, 6, compute, gather, reduce)
            prepare(model, gathers, way)
            name = f"compute {compute}, gather {gather}, reduce {reduce}, {way}"
            one_truth(table, name, model, compute, gather, reduce, ahead=way != "none")


def prepare(model: nn.Sequential, gathers: list[SpinGather], way: str) -> None:
    """Prefetches ``way``. With ``"none"`` no gather of a forward begins before compute has come to its unit, however far ahead
    the host is: compute then waits for the whole of it, whatever the host's own delays."""
    blocks: list[Any] = list(model)
    if way == "explicit":
        for before, after in itertools.pairwise(blocks):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
    elif way == "none":
        for block, comm in zip(blocks, gathers, strict=True):
            block.register_forward_pre_hook(comm.hold, prepend=True)


def one_truth(table: Table, name: str, model: nn.Module, compute: float, gather: float, reduce: float, ahead: bool) -> None:
    """The rows of one model; ``ahead``: whether gathers of the forward overlap with compute."""
    x = torch.randn(4, 64, device=DEVICE)

    def step() -> None:
        model(x).sum().backward()

    events = [event for event in traced(model, step, device_timing="always").events if event.step == 1]
    left = max(0.0, gather - compute)
    ran = statistics.median(
        (event["device_t1"] - event["device_t0"]) / 1e6
        for event in events
        if event.kind == "unshard" and "device_t0" in event.data and event.group in range(1, 5)
    )
    for what, found, expected in (
        ("forward gather", exposed(events, "unshard", "forward", range(1, 6)), left if ahead else gather),
        ("backward gather", exposed(events, "unshard", "backward", range(5)), left),
        # Between two post-backwards: one backward and what its own gather was exposed.
        ("reduce-scatter", exposed(events, "reduce_scatter", "backward", range(1, 5)), max(0.0, reduce - compute - left)),
        ("all-gather on its stream", ran, gather),
    ):
        table.row(f"{name}: {what}", f"{found:.3f} (must be {expected:.3f})", close(found, expected))


def exposed(events: list[Any], kind: str, pass_: str, groups: Any) -> float:
    """Median exposed ms of the events of ``kind`` in ``pass_``."""
    values = [
        event["exposed"] / 1e6
        for event in events
        if event.kind == kind and event.pass_ == pass_ and event.group in groups and "exposed" in event.data
    ]
    return statistics.median(values) if values else float("nan")
