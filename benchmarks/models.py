"""Models for the benchmarks: small enough that Python is all there is, which is the worst case for a tracer."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore


def fake_group(world: int) -> DeviceMesh:
    """A mesh of ``world`` ranks of which this process is rank 0; collectives return at once."""
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (world,))


class Block(nn.Module):
    """Attention and MLP in name only."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attn = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        out: torch.Tensor = x + self.mlp(self.norm(x))
        return out


class TransformerBlock(nn.Module):
    """A pre-norm transformer block, as people wrap them: causal attention over heads and an MLP."""

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, dim))
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class Experts(nn.Module):
    """A unit of its own inside a block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(2 * dim, dim) * 0.02)
        self.w2 = nn.Parameter(torch.randn(dim, 2 * dim) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.w1.T) @ self.w2.T


class NestedBlock(nn.Module):
    """A block with experts, as in the first public report."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attn = nn.Linear(dim, dim)
        self.router = nn.Linear(dim, 1)
        self.experts = Experts(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        # The experts are not the last operation: else early stop ends the recomputation inside them.
        out: torch.Tensor = x + self.experts(x) * self.router(x).sigmoid()
        return out


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def blocks(mesh: DeviceMesh, count: int, dim: int, checkpoint: bool, block: type[Block | TransformerBlock] = Block) -> Stack:
    """``count`` blocks, each a unit, checkpointed or not, and the root."""
    torch.manual_seed(0)
    model = Stack([block(dim) for _ in range(count)])
    for i in range(count):
        if checkpoint:
            model.layers[i] = checkpoint_wrapper(model.layers[i])
        fully_shard(model.layers[i], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def nested(mesh: DeviceMesh, count: int, dim: int) -> Stack:
    """``count`` checkpointed blocks with experts, both units."""
    torch.manual_seed(0)
    model = Stack([NestedBlock(dim) for _ in range(count)])
    for i in range(count):
        block = model.layers[i]
        assert isinstance(block, NestedBlock)
        fully_shard(block.experts, mesh=mesh)
        model.layers[i] = checkpoint_wrapper(block)
        fully_shard(model.layers[i], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
