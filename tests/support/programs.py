"""Training programs, small and of every kind that FSDP2 knows, for tests that hold for all of them.

A program's ``build(mesh)`` gives a :class:`Running`: models and a function that runs one iteration and returns tensors to
compare. Its iterations use dropout, so that a random number more or less would show.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from support.models import Block, Calls, Checkpointed
from support.torches import HSDP, RECOMPUTE, RESET, since

DIM = 8


@dataclass
class Running:
    """A program that was built: ``step()`` runs one iteration and returns what can be compared."""

    models: list[nn.Module]
    step: Callable[[], list[torch.Tensor]]


@dataclass(frozen=True)
class Program:
    name: str
    build: Callable[[Any], Running]
    shape: tuple[int, ...] = (4,)
    names: tuple[str, ...] | None = None
    marks: tuple[Any, ...] = field(default=())


PROGRAMS: list[Program] = []


def program(*marks: Any, shape: tuple[int, ...] = (4,), names: tuple[str, ...] | None = None) -> Any:
    def add(build: Callable[[Any], Running]) -> Callable[[Any], Running]:
        PROGRAMS.append(Program(build.__name__, build, shape, names, marks))
        return build

    return add


def every_program() -> pytest.MarkDecorator:
    """Parametrises a test over all programs."""
    return pytest.mark.parametrize("program", [pytest.param(p, id=p.name, marks=p.marks) for p in PROGRAMS])


# -- building blocks ---------------------------------------------------------------------------------------------------
class Noisy(Block):
    """A block with dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(torch.relu(self.up(x))), 0.1, self.training)


def blocks(mesh: Any, count: int = 3, root: bool = True, **options: Any) -> nn.Sequential:
    model = nn.Sequential(*[Noisy(DIM) for _ in range(count)])
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    if root:
        fully_shard(model, mesh=mesh, **options)
    return model


def checkpointed(mesh: Any, nested: bool = False, root: bool = True, **options: Any) -> Checkpointed:
    model = Checkpointed([Noisy(DIM) for _ in range(3)], **options)
    for block in model.blocks:
        if nested:
            fully_shard(block.up, mesh=mesh)
        fully_shard(block, mesh=mesh)
    if root:
        fully_shard(model, mesh=mesh)
    return model


def data(grad: bool = False) -> torch.Tensor:
    return torch.randn(4, DIM, requires_grad=grad)


def loop(model: nn.Module, grad: bool = False, micro: Callable[[int], None] | None = None) -> Running:
    """Forward, backward and an optimizer's step; ``micro(i)`` is called before each of two micro-batches, if given."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> list[torch.Tensor]:
        losses = []
        for i in range(2 if micro else 1):
            if micro:
                micro(i)
            loss = model(data(grad)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return Running([model], step)


# -- wraps -------------------------------------------------------------------------------------------------------------
@program()
def plain(mesh: Any) -> Running:
    return loop(blocks(mesh))


@program()
def input_needs_grad(mesh: Any) -> Running:
    return loop(blocks(mesh), grad=True)


@program()
def no_reshard_after_forward(mesh: Any) -> Running:
    return loop(blocks(mesh, reshard_after_forward=False))


@program()
def smaller_mesh_after_forward(mesh: Any) -> Running:
    return loop(blocks(mesh, reshard_after_forward=2))


@program(HSDP, shape=(2, 2), names=("replicate", "shard"))
def hsdp(mesh: Any) -> Running:
    return loop(blocks(mesh))


@program(shape=(1,))
def world_of_one(mesh: Any) -> Running:
    return loop(blocks(mesh))


@program()
def mixed_precision(mesh: Any) -> Running:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    return loop(blocks(mesh, mp_policy=policy))


@program()
def offload(mesh: Any) -> Running:
    return loop(blocks(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)))


@program(shape=(3,))
def uneven(mesh: Any) -> Running:
    return loop(blocks(mesh))


@program()
def frozen(mesh: Any) -> Running:
    model = nn.Sequential(*[Noisy(DIM) for _ in range(3)])
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(model)


@program()
def nested(mesh: Any) -> Running:
    model = nn.Sequential(*[Noisy(DIM) for _ in range(2)])
    for block in model:
        fully_shard(block.down, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(model)


@program()
def root_not_wrapped(mesh: Any) -> Running:
    return loop(blocks(mesh, root=False))


@program(since(2, 13, "a grouped unit of which only some modules run fails in older ones"))
def grouped(mesh: Any) -> Running:
    model = Calls(lambda self, x: self.b(self.a(x)), a=Noisy(DIM), b=Noisy(DIM))
    fully_shard([model.a, model.b], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(model)


@program(since(2, 13, "a grouped unit of which only some modules run fails in older ones"))
def grouped_partly_run(mesh: Any) -> Running:
    model = Calls(lambda self, x: self.a(x), a=Noisy(DIM), b=Noisy(DIM))
    fully_shard([model.a, model.b], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> list[torch.Tensor]:
        hidden = model(data())
        leaf = hidden.detach().requires_grad_()
        total = hidden.new_zeros(())
        for chunk in leaf.chunk(2):
            loss = model.b(chunk).square().mean()
            loss.backward()
            total = total + loss.detach()
        hidden.backward(leaf.grad)
        optimizer.step()
        optimizer.zero_grad()
        return [total]

    return Running([model], step)


@program(since(2, 13, "one module can have param groups on several meshes"))
def several_groups_per_module(mesh: Any) -> Running:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    small = FSDPMeshInfo(init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"], shard_mesh_dim=0)

    def place(param: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), small) if param.ndim == 1 else None

    return loop(blocks(mesh, shard_placement_fn=place))


@program(since(2, 9, "set_custom_all_gather is new in it"))
def custom_all_gather(mesh: Any) -> Running:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

    class Mine(AllGather):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    model = blocks(mesh)
    model[1].set_custom_all_gather(Mine())
    return loop(model)


@program()
def two_models(mesh: Any) -> Running:
    one, two = blocks(mesh, 2), blocks(mesh, 1)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01), torch.optim.AdamW(two.parameters(), lr=0.01)]

    def step() -> list[torch.Tensor]:
        loss = two(one(data())).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return [loss.detach()]

    return Running([one, two], step)


# -- by hand -----------------------------------------------------------------------------------------------------------
@program()
def unshard_by_hand(mesh: Any) -> Running:
    model = blocks(mesh)
    running = loop(model)

    def step() -> list[torch.Tensor]:
        model[0].unshard()
        model[1].unshard(async_op=True)
        handle = model[2].unshard(async_op=True)
        handle.wait()
        model[2].reshard()
        model[0].unshard()
        losses = running.step()
        model[1].unshard()
        model[1].reshard()
        return losses

    return Running([model], step)


@program()
def explicit_prefetch(mesh: Any) -> Running:
    model = blocks(mesh)
    model.set_modules_to_forward_prefetch([model[0]])
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])
    return loop(model)


@program()
def prefetch_the_wrong_way_round(mesh: Any) -> Running:
    model = blocks(mesh)
    model[0].set_modules_to_backward_prefetch([model[2]])
    return loop(model)


@program()
def not_unsharded_in_backward(mesh: Any) -> Running:
    model = Calls(lambda self, x: self.b(self.a(x)), a=nn.Linear(DIM, DIM), b=Noisy(DIM))
    fully_shard(model.a, mesh=mesh)
    fully_shard(model.b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.a.set_unshard_in_backward(False)
    return loop(model)


@program()
def accumulation(mesh: Any) -> Running:
    model = blocks(mesh)

    def micro(i: int) -> None:
        model.set_requires_gradient_sync(i == 1)
        model.set_is_last_backward(i == 1)
        model.set_reshard_after_backward(i == 1)

    return loop(model, micro=micro)


@program()
def not_last_backward(mesh: Any) -> Running:
    model = blocks(mesh)
    return loop(model, micro=lambda i: model.set_is_last_backward(i == 1))


@program()
def evaluation_between(mesh: Any) -> Running:
    model = blocks(mesh)
    running = loop(model)

    def step() -> list[torch.Tensor]:
        with torch.no_grad():
            first = model(data())
        losses = running.step()
        with torch.inference_mode():
            second = model(data()).sum().item()
        return [first, *losses, torch.tensor(second)]

    return Running([model], step)


@program()
def two_forwards_one_backward(mesh: Any) -> Running:
    model = blocks(mesh, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> list[torch.Tensor]:
        loss = model(data()).square().mean() + model(data()).abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach()]

    return Running([model], step)


@program()
def used_twice(mesh: Any) -> Running:
    model = Calls(lambda self, x: self.a(torch.relu(self.a(x))), a=Noisy(DIM))
    fully_shard(model.a, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(model)


@program()
def checkpoint_saving(mesh: Any) -> Running:
    model = blocks(mesh, reshard_after_forward=False)
    running = loop(model)

    def step() -> list[torch.Tensor]:
        with torch.no_grad():
            model(data())
        saved = {name: value.to_local().clone() for name, value in model.state_dict().items()}
        losses = running.step()
        with torch.no_grad():
            model(data())
        model.load_state_dict(model.state_dict())
        return [*losses, *saved.values()]

    return Running([model], step)


@program(RESET)
def resetting(mesh: Any) -> Running:
    failing: list[int] = []

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        if failing:
            raise ValueError("as planned")
        return self.lin(x)

    model = nn.Sequential(Noisy(DIM), Calls(run, lin=nn.Linear(DIM, DIM)), Noisy(DIM))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model[1].set_modules_to_forward_prefetch([model[2]])
    running = loop(model)

    def step() -> list[torch.Tensor]:
        failing.append(1)
        with pytest.raises(ValueError, match="as planned"):
            model(data())
        failing.clear()
        model.reset_iter_state()
        return running.step()

    return Running([model], step)


@program(RESET)
def failing_in_backward(mesh: Any) -> Running:
    model = blocks(mesh)
    running = loop(model)

    def fails(grad: torch.Tensor) -> None:
        raise ValueError("as planned")

    def step() -> list[torch.Tensor]:
        hidden = model(data())
        hidden.register_hook(fails)
        with pytest.raises(ValueError, match="as planned"):
            hidden.sum().backward()
        model.reset_iter_state()
        return running.step()

    return Running([model], step)


@program()
def optimizer_in_backward(mesh: Any) -> Running:
    model = blocks(mesh)
    model(data())
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], lr=0.01)

        def hook(param: torch.Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        param.register_post_accumulate_grad_hook(hook)

    def step() -> list[torch.Tensor]:
        loss = model(data()).square().mean()
        loss.backward()
        return [loss.detach()]

    return Running([model], step)


@program()
def clipping(mesh: Any) -> Running:
    model = blocks(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)

    def step() -> list[torch.Tensor]:
        loss = model(data()).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        grads = [param.grad.to_local().clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach(), norm.to_local(), *grads]

    return Running([model], step)


# -- recomputation -----------------------------------------------------------------------------------------------------
@program()
def checkpointing(mesh: Any) -> Running:
    return loop(checkpointed(mesh, use_reentrant=False))


@program(RECOMPUTE)
def checkpointing_nested(mesh: Any) -> Running:
    return loop(checkpointed(mesh, nested=True, use_reentrant=False))


@program()
def checkpointing_inside(mesh: Any) -> Running:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(*[checkpoint_wrapper(Noisy(DIM)) for _ in range(3)])
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(model)


@program(RECOMPUTE)
def checkpointing_over_several(mesh: Any) -> Running:
    inner = blocks(mesh, root=False)
    model = Calls(lambda self, x: checkpoint(self.inner, x, use_reentrant=False), inner=inner)
    fully_shard(model, mesh=mesh)
    return loop(model)


@program(RECOMPUTE)
def checkpointing_two_forwards(mesh: Any) -> Running:
    model = checkpointed(mesh, use_reentrant=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> list[torch.Tensor]:
        loss = model(data()).square().mean() + model(data()).abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach()]

    return Running([model], step)


@program(RECOMPUTE)
def reentrant(mesh: Any) -> Running:
    return loop(checkpointed(mesh, use_reentrant=True), grad=True)


@program(RECOMPUTE)
def reentrant_nested(mesh: Any) -> Running:
    return loop(checkpointed(mesh, nested=True, use_reentrant=True), grad=True)


@program(RECOMPUTE)
def reentrant_without_a_wrapped_root(mesh: Any) -> Running:
    return loop(checkpointed(mesh, root=False, use_reentrant=True), grad=True)


@program(RECOMPUTE)
def reentrant_with_forward_prefetch(mesh: Any) -> Running:
    model = checkpointed(mesh, use_reentrant=True)
    for one, other in zip(model.blocks, model.blocks[1:], strict=False):
        one.set_modules_to_forward_prefetch([other])
    return loop(model, grad=True)


def _save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    save = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


@program()
def selective(mesh: Any) -> Running:
    contexts = functools.partial(create_selective_checkpoint_contexts, _save_products)
    return loop(checkpointed(mesh, use_reentrant=False, context_fn=contexts))


# -- compilation -------------------------------------------------------------------------------------------------------
@program()
def compiled_blocks(mesh: Any) -> Running:
    torch._dynamo.reset()
    model = nn.Sequential(*[Block(DIM) for _ in range(2)])
    for block in model:
        block.compile(backend="eager")
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(model)


@program()
def compiled_root(mesh: Any) -> Running:
    torch._dynamo.reset()
    model = nn.Sequential(*[Block(DIM) for _ in range(2)])
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> list[torch.Tensor]:
        loss = compiled(data()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach()]

    return Running([model], step)
