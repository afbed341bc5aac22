"""A mixture of experts as transformers 4.5x writes it: a loop over the experts that were hit; and what makes its recomputation
take another way.

128 experts and the best 8 of each token. An expert that is hit saves ``SAVED`` tensors, whatever its number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

DIM, EXPERTS, TOP = 16, 128, 8


class Expert(nn.Module):
    """Gated MLP."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, 2 * dim, bias=False)
        self.up_proj = nn.Linear(dim, 2 * dim, bias=False)
        self.down_proj = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """After ``Qwen3MoeSparseMoeBlock`` of transformers 4.57; ``noise`` is added to the router's logits by the tests."""

    def __init__(self, dim: int = DIM, experts: int = EXPERTS, top: int = TOP) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList([Expert(dim) for _ in range(experts)])
        self.top = top
        self.noise: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # In float32, as routers are; the experts in the dtype of their weights.
        logits = self.noise(F.linear(x.float(), self.gate.weight.float()))
        x = x.to(self.gate.weight.dtype)
        weights, chosen = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), self.top, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for hit in mask.sum(dim=(-1, -2)).nonzero().flatten().tolist():
            place, row = torch.where(mask[hit])
            out = out.index_add(0, row, self.experts[hit](x[row]) * weights[row, place, None])
        return out


class Layer(nn.Module):
    """A residual block around the experts."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(options.get("dim", DIM)))
        self.mlp = Experts(**options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm * F.normalize(x, dim=-1))


class Model(nn.Module):
    """``layers`` under ``checkpoint``, with ``how`` given to it."""

    def __init__(self, layers: int = 2, how: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__()
        self.inp = nn.Linear(options.get("dim", DIM), options.get("dim", DIM))
        self.layers = nn.ModuleList([Layer(**options) for _ in range(layers)])
        self.how = {"use_reentrant": False, **(how or {})}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = checkpoint(layer, x, **self.how)
        return x


def sharded(mesh: Any, layers: int = 2, how: dict[str, Any] | None = None, policy: Any = None, **options: Any) -> Model:
    """A model whose layers are units."""
    torch.manual_seed(0)
    model = Model(layers, how, **options)
    extra = {} if policy is None else {"mp_policy": policy}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **extra)
    return fully_shard(model, mesh=mesh)


@contextmanager
def overwritten(layer: nn.Module) -> Iterator[None]:
    """Something writes zeros over the router's weight when the layer is gathered for its backward, as a buffer used twice, or a
    stream that nobody waited for, does: all tokens then go to the same ``TOP`` experts. To be around forward and backward."""

    def write(module: nn.Module, grad: Any) -> None:
        with torch.no_grad():
            # As another kernel would: into the memory, behind autograd's and FSDP2's back.
            module.gate.weight.data.zero_()

    # The experts' backward: after the layer's pre-backward, which gathers, and before the first saved tensor is asked for.
    handle = layer.mlp.register_full_backward_pre_hook(write)
    try:
        yield
    finally:
        handle.remove()
