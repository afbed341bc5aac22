"""The two public reports and selective checkpointing on the real thing: what leaks is found with its bytes, what is healthy
stays silent."""

from __future__ import annotations

import gc
import tempfile
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn as nn
from device_common import DEVICE, WORLD, Table
from device_truth import carrying
from models import NestedBlock, fake_group
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fsdptrace
from fsdptrace.adapters.legacy import old_bookkeeping


def equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


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
