"""A nested mixture of experts under FSDP2, watched by fsdptrace: the first wrong prefetch stops the run.

Run it by itself (one process) or under a launcher (`torchrun --nproc-per-node 2 examples/nested_moe.py`), on the CPU.
Blocks and their experts are units of their own and the blocks are checkpointed, which is what torch 2.9 and older get
wrong: there the run ends with an InvariantViolation that names the prefetch, and `--explicit` mends it.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import fsdptrace

DIM = 64
EXPERTS = 4


class Experts(nn.Module):
    """The weights that are worth sharding by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, 2 * DIM) * 0.02)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * DIM, DIM) * 0.02)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(torch.einsum("btd,edh->beth", x, self.up))
        out = torch.einsum("beth,ehd->betd", hidden, self.down)
        return (out * weights.movedim(-1, 1).unsqueeze(-1)).sum(1)


class Block(nn.Module):
    """A residual block; a real one would have attention as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.router = nn.Linear(DIM, EXPERTS)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x)
        mixed: torch.Tensor = self.experts(normed, self.router(normed).softmax(-1))
        return x + mixed


class Model(nn.Module):
    """Blocks between an input and an output projection."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def shard(model: Model, mesh: DeviceMesh, explicit: bool) -> None:
    """Wraps inside out: experts, then the checkpointed block, then the model."""
    blocks: list[FSDPModule] = []
    experts: list[FSDPModule] = []
    for number, block in enumerate(model.layers):
        assert isinstance(block, Block)
        experts.append(fully_shard(block.experts, mesh=mesh))
        wrapped = checkpoint_wrapper(block)
        model.layers[number] = wrapped
        blocks.append(fully_shard(wrapped, mesh=mesh))
    fully_shard(model, mesh=mesh)
    if explicit:  # the mend for torch 2.9 and older: say what comes next in the backward
        for number, unit in enumerate(experts):
            unit.set_modules_to_backward_prefetch([blocks[max(0, number - 1)]])


def main() -> None:
    """Trains a few steps under the recorder and prints what the last one did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", default=None, help="folder for the traces; default ./fsdptrace-out")
    parser.add_argument("--explicit", action="store_true", help="explicit prefetch lists")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        store = os.path.join(tempfile.mkdtemp(), "store")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    torch.manual_seed(0)
    model = Model(options.layers)
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)), options.explicit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fsdptrace.record(model, out=options.out, on_violation="raise") as recording:
        for _ in range(options.steps):
            loss = model(torch.randn(4, 16, 8)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    recording.close()
    if dist.get_rank() == 0:
        for name, value in recording.scalars().items():
            print(f"{name:<28} {value:g}")
        print(f"look at it: fsdptrace report {os.path.dirname(recording.path)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
