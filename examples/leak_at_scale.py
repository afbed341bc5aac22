"""The first public report at its own scale, on one CPU in a few seconds: 94 checkpointed blocks with experts of their own.

One process plays rank 0 of 16 (the fake process group: collectives return at once). The bookkeeping of torch 2.9 and older
is brought back, so that the implicit backward prefetch gathers experts whose backward is over; `raise` stops the run at the
first such prefetch of the first backward, with a message fit to be the last line of a log.

    python examples/leak_at_scale.py            # stops at the first wrong prefetch
    python examples/leak_at_scale.py --warn     # goes on, and says how much is held
"""

from __future__ import annotations

import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdptrace
from fsdptrace.adapters.legacy import old_bookkeeping

DIM = 16


class Experts(nn.Module):
    """All experts of a block, one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4 * DIM, DIM) * 0.02)
        self.w2 = nn.Parameter(torch.randn(DIM, 4 * DIM) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.w1.T) @ self.w2.T


class Block(nn.Module):
    """Attention in name only, a router, experts."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(DIM, DIM)
        self.router = nn.Linear(DIM, 1)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        out: torch.Tensor = x + self.experts(x) * self.router(x).sigmoid()
        return out


class Model(nn.Module):
    """Blocks one after the other."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(layers: int) -> Model:
    """The model, wrapped as in the report: experts, checkpointed block, root."""
    mesh = init_device_mesh("cpu", (16,))
    model = Model(layers)
    for i in range(layers):
        block = model.layers[i]
        assert isinstance(block, Block)
        fully_shard(block.experts, mesh=mesh)
        model.layers[i] = checkpoint_wrapper(block)
        fully_shard(model.layers[i], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    """Trains one step under the recorder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=94)
    parser.add_argument("--warn", action="store_true", help="go on instead of raising")
    parser.add_argument("--healthy", action="store_true", help="the bookkeeping of the installed torch")
    parser.add_argument("--out", default=None, help="folder for the trace")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("fake", rank=0, world_size=16, store=FakeStore())
    model = build(args.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    bookkeeping = contextlib.nullcontext() if args.healthy else old_bookkeeping()
    policy = "warn" if args.warn else "raise"
    with bookkeeping, fsdptrace.record(model, out=args.out, on_violation=policy) as rec:
        model(torch.randn(1, 4, DIM)).sum().backward()
        optimizer.step()
    found = [v for v in rec.violations if v.rule == "gather-after-backward"]
    print(f"{args.layers} blocks, {len(found)} units gathered after their backward, {sum(v.bytes for v in found):,} bytes")


if __name__ == "__main__":
    main()
