"""Six reasons for one CheckpointError, told apart.

A mixture of experts as transformers 4.5x writes it: a loop over the experts that were hit, 128 of them and the best 8 of each
token, under activation checkpointing and fully_shard. In each case the recomputation sends the tokens elsewhere, so that
PyTorch finds other saved tensors than in the forward. It names two numbers; the note that fsdptrace puts on the error names the
reason. Runs in one process on a CPU (the fake process group), or on two gloo processes under a launcher:

    python examples/recompute_causes.py                     # all six
    python examples/recompute_causes.py --cause kernel
    torchrun --nproc-per-node 2 examples/recompute_causes.py
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointError, checkpoint

import fsdptrace
from fsdptrace.adapters.legacy import old_input_casts

DIM, EXPERTS, TOP = 16, 128, 8
TOKENS = 256


class Expert(nn.Module):
    """Gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(DIM, 2 * DIM, bias=False)
        self.up_proj = nn.Linear(DIM, 2 * DIM, bias=False)
        self.down_proj = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Experts(nn.Module):
    """After ``Qwen3MoeSparseMoeBlock`` of transformers 4.57. ``noise`` is what the cases do to the router's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])
        self.noise: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The router in float32, as routers are; the experts in the dtype of their weights.
        logits = self.noise(F.linear(x.float(), self.gate.weight.float()))
        x = x.to(self.gate.weight.dtype)
        weights, chosen = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), TOP, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        for hit in mask.sum(dim=(-1, -2)).nonzero().flatten().tolist():
            place, row = torch.where(mask[hit])
            out = out.index_add(0, row, self.experts[hit](x[row]) * weights[row, place, None])
        return out


class Layer(nn.Module):
    """A residual block around the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(DIM))
        self.mlp = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mlp(self.norm * F.normalize(x, dim=-1))
        return out


class Model(nn.Module):
    """Layers under ``checkpoint``, with ``how`` given to it."""

    def __init__(self, layers: int, how: dict[str, Any]) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, **self.how)
        return x


def sharded(mesh: Any, layers: int = 1, how: dict[str, Any] | None = None, param_dtype: torch.dtype | None = None) -> Model:
    """A model whose layers are units."""
    torch.manual_seed(0)
    model = Model(layers, how or {})
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    fully_shard(model, mesh=mesh)
    return model


def step(model: nn.Module) -> None:
    """Forward and backward on tokens that are the same on every rank."""
    torch.manual_seed(1)
    model(torch.randn(TOKENS, DIM)).sum().backward()


# -- the cases ---------------------------------------------------------------------------------------------------------
@contextmanager
def overwritten(layer: Any) -> Iterator[None]:
    """Something writes zeros over the router's weight when the layer is gathered for its backward, as a buffer used twice, or a
    stream that nobody waited for, does: all tokens then go to the same experts. To be around forward and backward."""

    def write(module: Any, grad: Any) -> None:
        with torch.no_grad():
            # As another kernel would: into the memory, behind autograd's and FSDP2's back.
            module.gate.weight.data.zero_()

    # The experts' backward: after the layer's pre-backward, which gathers, and before the first saved tensor is asked for.
    handle = layer.mlp.register_full_backward_pre_hook(write)
    try:
        yield
    finally:
        handle.remove()


def parameters(mesh: Any, watch: Any) -> None:
    """(a) Gathered parameters were overwritten in between."""
    model = sharded(mesh)
    with watch(model), overwritten(model.layers[0]):
        step(model)


def dtype(mesh: Any, watch: Any) -> None:
    """(b) The recomputation is given its input in another dtype, as by torch before 2.13."""
    with old_input_casts():
        model = sharded(mesh, param_dtype=torch.bfloat16)
        with watch(model):
            step(model)


def state(mesh: Any, watch: Any) -> None:
    """(c) The router keeps state: a bias against experts that were hit, which its own forward updates."""
    model = sharded(mesh)
    experts = model.layers[0].mlp
    assert isinstance(experts, Experts)
    experts.register_buffer("bias", torch.zeros(EXPERTS))

    def noise(logits: torch.Tensor) -> torch.Tensor:
        bias = experts.get_buffer("bias")
        out = logits + bias
        with torch.no_grad():
            bias[:TOP].add_(100)
        return out

    experts.noise = noise
    with watch(model):
        step(model)


def random(mesh: Any, watch: Any) -> None:
    """(d) The router draws random numbers, and checkpoint was told not to bring the generator's state back."""
    model = sharded(mesh, how={"preserve_rng_state": False})
    experts = model.layers[0].mlp
    assert isinstance(experts, Experts)
    experts.noise = lambda logits: logits + 100 * torch.randn(EXPERTS)
    with watch(model):
        step(model)
        torch.randn(1)


def context(mesh: Any, watch: Any) -> None:
    """(e) The backward runs under another global setting than the forward."""
    model = sharded(mesh)
    experts = model.layers[0].mlp
    assert isinstance(experts, Experts)
    experts.noise = lambda logits: logits if torch.are_deterministic_algorithms_enabled() else logits * 0
    with watch(model):
        torch.use_deterministic_algorithms(True)
        try:
            torch.manual_seed(1)
            loss = model(torch.randn(TOKENS, DIM)).sum()
        finally:
            torch.use_deterministic_algorithms(False)
        loss.backward()


def kernel(mesh: Any, watch: Any) -> None:
    """(f) A kernel that is not deterministic: what it returns depends on nothing that a program could look at."""
    model = sharded(mesh)
    experts = model.layers[0].mlp
    assert isinstance(experts, Experts)
    experts.noise = torch.ops.recompute_causes.race
    with watch(model):
        step(model)


_runs = 0


@torch.library.custom_op("recompute_causes::race", mutates_args=())
def race(logits: torch.Tensor) -> torch.Tensor:
    """Stands for atomics whose order decides: every other run gives another result."""
    global _runs
    _runs += 1
    return logits.clone() if _runs % 2 else torch.zeros_like(logits)


race.register_autograd(lambda ctx, grad: grad)

CAUSES: dict[str, Callable[[Any, Any], None]] = {
    "parameters": parameters, "dtype": dtype, "state": state, "random": random, "context": context, "kernel": kernel,
}  # fmt: skip


def note_of(case: Callable[[Any, Any], None], mesh: Any, record: Any = fsdptrace.record, **options: Any) -> str:
    """What fsdptrace says of the CheckpointError of ``case``; empty when there was none."""
    options = {"fingerprint": "all", "on_violation": "record", "checks": None, **options}
    try:
        case(mesh, lambda model: record(model, **options))
    except CheckpointError as error:
        notes = getattr(error, "__notes__", ["(Python 3.10 has no notes on exceptions: see the log)"])
        return "\n".join(note for note in notes if "recomputation" in note or "3.10" in note)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cause", choices=[*CAUSES, "all"], default="all")
    parser.add_argument("--out", default=None, help="folder for the files")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small are faster on one
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, case in CAUSES.items():
        if arguments.cause in (name, "all"):
            note = note_of(case, mesh, **({"out": arguments.out} if arguments.out else {}))
            if dist.get_rank() == 0:
                print(f"== {name}: {(case.__doc__ or '').strip()}\n{note or 'no CheckpointError'}\n", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
