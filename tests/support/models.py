"""Small models; their sizes are such that the bytes of a group can be worked out in one's head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


def fake_mesh(world: int = 4) -> Any:
    """A mesh of a fake process group, for a process of its own; tests in this one have the fixture ``fake_pg``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    torch.manual_seed(0)
    return init_device_mesh("cpu", (world,))


def chain(count: int = 3, dim: int = 8) -> nn.Sequential:
    """``count`` layers of ``Linear(dim, dim)``, not wrapped."""
    return nn.Sequential(*[nn.Linear(dim, dim) for _ in range(count)])


def sharded_chain(mesh: Any, count: int = 3, dim: int = 8, **options: Any) -> nn.Sequential:
    """A chain whose layers are units; the root is a unit too, with no parameters of its own."""
    model = chain(count, dim)
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


class Block(nn.Module):
    """Two layers and an activation, so that checkpointing saves something."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(dim, dim)
        self.down = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Checkpointed(nn.Module):
    """Blocks run under ``checkpoint``; ``options`` go to it."""

    def __init__(self, blocks: list[nn.Module], **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **self.options)
        return x


class Calls(nn.Module):
    """A module whose forward is a function of itself and its input."""

    def __init__(self, forward: Callable[..., Any], **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self._run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, *args, **kwargs)


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, inputs: Any = None) -> None:
    """One training step on random inputs."""
    x = torch.randn(4, 8) if inputs is None else inputs
    model(x).sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
