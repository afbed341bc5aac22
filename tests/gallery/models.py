"""Models of the gallery. ``DIM`` is 8: a ``Linear(8, 8)`` holds 8*8 + 8 = 72 floats, 288 bytes, or 256 without a bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from support.models import Calls

DIM = 8


def linear(bias: bool = False) -> nn.Linear:
    return nn.Linear(DIM, DIM, bias=bias)


def data(rows: int = 4, grad: bool = False) -> torch.Tensor:
    return torch.randn(rows, DIM, requires_grad=grad)


def shard(model: nn.Module, units: list[Any], mesh: Any, root: bool = True, **options: Any) -> Any:
    """Wraps ``units`` in turn, then ``model``, all with ``options``; returns ``model``."""
    for unit in units:
        fully_shard(unit, mesh=mesh, **options)
    if root:
        fully_shard(model, mesh=mesh, **options)
    return model


def layers(mesh: Any, count: int = 3, root: bool = True, **options: Any) -> nn.Sequential:
    """``count`` units of 256 bytes and a root without parameters."""
    model = nn.Sequential(*[linear() for _ in range(count)])
    return shard(model, list(model), mesh, root, **options)


def checkpointed_layers(mesh: Any, count: int = 4, **how: Any) -> Calls:
    """A plain first unit, then ``count`` units of 256 bytes, each under ``checkpoint`` from outside (as models do it)."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = checkpoint(layer, x, **how) if how else layer(x)
        return x

    model = Calls(run, inp=linear(), layers=nn.ModuleList([linear() for _ in range(count)]))
    return shard(model, [model.inp, *model.layers], mesh)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def steps(
    model: nn.Module,
    count: int,
    loss: Callable[[], torch.Tensor] | None = None,
    before_step: Callable[[], None] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """``count`` training steps; ``before_step`` runs between the backward and the optimizer's step."""
    optimizer = optimizer or sgd(model)
    for _ in range(count):
        (loss() if loss else model(data()).square().mean()).backward()
        if before_step:
            before_step()
        optimizer.step()
        optimizer.zero_grad()
