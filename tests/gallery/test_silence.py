"""Legal training of every kind: no rule says more than `info`, and nothing stops the run under ``on_violation="raise"``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gallery.models import DIM, data, linear, sgd, shard, steps
from gallery.verdict import verdict
from support.models import Block, Calls, Checkpointed
from support.programs import PROGRAMS
from support.programs import Program as Foreign
from support.torches import HSDP, RECOMPUTE, RESET, since

GROUPED = since(2, 13, "a grouped unit of which only some modules run fails in older ones")
TWICE = since(2, 11, "older ones compute with freed parameters (pytorch PR #171779)")
FLAG = since(2, 8, "set_reshard_after_forward is new in it")


@dataclass(frozen=True)
class Program:
    """``build(mesh)`` gives the models and what is run three times over."""

    build: Callable[[Any], tuple[list[nn.Module], Callable[[], None]]]
    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    marks: tuple[Any, ...]


LEGAL: list[Program] = []


def legal(*marks: Any, shape: tuple[int, ...] = (4,), names: tuple[str, ...] | None = None) -> Any:
    def add(build: Any) -> Any:
        LEGAL.append(Program(build, shape, names, marks))
        return build

    return add


def trained(model: nn.Module, loss: Callable[[], None], *more: nn.Module) -> tuple[list[nn.Module], Callable[[], None]]:
    """``model`` with a run of forward and backward (``loss``), optimizer and zeroed gradients."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def run() -> None:
        loss()
        optimizer.step()
        optimizer.zero_grad()

    return [model, *more], run


def blocks(mesh: Any, count: int = 3, **options: Any) -> nn.Sequential:
    model = nn.Sequential(*[Block(DIM) for _ in range(count)])
    return shard(model, list(model), mesh, **options)


def with_root(mesh: Any, **options: Any) -> Any:
    """Embedding and head in the root, three blocks as units between them, as language models are wrapped."""

    def run(self: Any, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    model = Calls(run, emb=nn.Embedding(20, DIM), blocks=nn.ModuleList([Block(DIM) for _ in range(3)]), head=nn.Linear(DIM, 20))
    return shard(model, list(model.blocks), mesh, **options)


def ids() -> torch.Tensor:
    return torch.randint(0, 20, (4, 3))


@contextlib.contextmanager
def evaluating(model: nn.Module, mode: Any = torch.no_grad) -> Iterator[None]:
    model.eval()
    with mode():
        yield
    model.train()


# -- plain, and by policy ----------------------------------------------------------------------------------------------
@legal()
def plain(mesh: Any) -> Any:
    model = with_root(mesh)
    return trained(model, lambda: model(ids()).square().mean().backward())


@legal(shape=(1,))
def world_of_one(mesh: Any) -> Any:
    model = with_root(mesh)
    return trained(model, lambda: model(ids()).square().mean().backward())


@legal(shape=(3,))
def uneven_shards(mesh: Any) -> Any:
    model = with_root(mesh)
    return trained(model, lambda: model(ids()).square().mean().backward())


@legal(HSDP, shape=(2, 2), names=("replicate", "shard"))
def hsdp(mesh: Any) -> Any:
    model = with_root(mesh)
    return trained(model, lambda: model(ids()).square().mean().backward())


@legal(HSDP, shape=(2, 2), names=("replicate", "shard"))
def hsdp_accumulation(mesh: Any) -> Any:
    model = with_root(mesh)

    def loss() -> None:
        for i in range(3):
            model.set_requires_all_reduce(i == 2)
            model(ids()).square().mean().backward()

    return trained(model, loss)


@legal()
def resharded_to_a_smaller_mesh(mesh: Any) -> Any:
    model = with_root(mesh, reshard_after_forward=2)
    return trained(model, lambda: model(ids()).square().mean().backward())


@legal()
def kept_open_until_the_backward(mesh: Any) -> Any:
    model = with_root(mesh, reshard_after_forward=False)
    return trained(model, lambda: model(ids()).square().mean().backward())


@legal()
def root_freed_as_well(mesh: Any) -> Any:
    model = with_root(mesh, reshard_after_forward=True)
    return trained(model, lambda: model(ids()).square().mean().backward())


@legal(FLAG)
def policy_changed_while_training(mesh: Any) -> Any:
    model = with_root(mesh)
    keep = [False]

    def loss() -> None:
        keep[0] = not keep[0]
        model.set_reshard_after_forward(not keep[0])
        model(ids()).square().mean().backward()

    return trained(model, loss)


@legal()
def bf16(mesh: Any) -> Any:
    model = with_root(mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    return trained(model, lambda: model(ids()).float().square().mean().backward())


@legal()
def offloaded(mesh: Any) -> Any:
    model = with_root(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return trained(model, lambda: model(ids()).square().mean().backward())


@legal()
def root_without_parameters(mesh: Any) -> Any:
    model = blocks(mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def root_not_wrapped(mesh: Any) -> Any:
    model = blocks(mesh, root=False)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def only_the_root(mesh: Any) -> Any:
    model = fully_shard(nn.Sequential(Block(DIM), Block(DIM)), mesh=mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def nested_units(mesh: Any) -> Any:
    model = nn.Sequential(Block(DIM), Block(DIM))
    for block in model:
        shard(block, [block.up, block.down], mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


# -- accumulation and pipelines ----------------------------------------------------------------------------------------
def _accumulation(mesh: Any, setup: Callable[[Any, bool], None], count: int = 3) -> Any:
    model = with_root(mesh)

    def loss() -> None:
        for i in range(count):
            setup(model, i == count - 1)
            model(ids()).square().mean().backward()

    return trained(model, loss)


@legal()
def accumulation_with_sync(mesh: Any) -> Any:
    return _accumulation(mesh, lambda model, last: None)


@legal()
def accumulation_without_sync(mesh: Any) -> Any:
    return _accumulation(mesh, lambda model, last: model.set_requires_gradient_sync(last))


@legal()
def accumulation_with_last_backward(mesh: Any) -> Any:
    def setup(model: Any, last: bool) -> None:
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)

    return _accumulation(mesh, setup)


@legal()
def accumulation_kept_open(mesh: Any) -> Any:
    def setup(model: Any, last: bool) -> None:
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)

    return _accumulation(mesh, setup)


@legal(FLAG)
def accumulation_kept_open_throughout(mesh: Any) -> Any:
    def setup(model: Any, last: bool) -> None:
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)
        model.set_reshard_after_forward(False)

    return _accumulation(mesh, setup)


@legal()
def kept_open_after_backward_only(mesh: Any) -> Any:
    return _accumulation(mesh, lambda model, last: model.set_reshard_after_backward(last))


SCHEDULES = {"FFBB": "F0 F1 B0 B1", "FBFB": "F0 B0 F1 B1", "1F1B": "F0 F1 B0 F2 B1 F3 B2 B3", "GPipe": "F0 F1 F2 B2 B1 B0"}


def _pipeline(schedule: str, keep: bool) -> Any:
    def pipeline(mesh: Any) -> Any:
        model = blocks(mesh, reshard_after_forward=not keep)
        moves = schedule.split()

        def loss() -> None:
            outputs: dict[str, torch.Tensor] = {}
            for i, (kind, number) in enumerate(moves):
                if kind == "F":
                    outputs[number] = model(data(grad=True))
                    continue
                last = i == len(moves) - 1
                model.set_is_last_backward(last)
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last if keep else True)
                outputs.pop(number).square().mean().backward()

        return trained(model, loss)

    return pipeline


for _name, _schedule in SCHEDULES.items():
    for _keep in (False, True):
        _built = _pipeline(_schedule, _keep)
        _built.__name__ = f"pipeline_{_name}{'_kept_open' * _keep}"
        legal()(_built)


# -- evaluation --------------------------------------------------------------------------------------------------------
@legal()
def evaluation_before_and_between(mesh: Any) -> Any:
    model = with_root(mesh)
    with torch.no_grad():
        model(ids())

    def loss() -> None:
        for _ in range(2):
            with evaluating(model):
                model(ids())
        model(ids()).square().mean().backward()

    return trained(model, loss)


@legal()
def evaluation_recorded_first(mesh: Any) -> Any:
    model = with_root(mesh)

    def loss() -> None:
        with evaluating(model):
            model(ids())
        model(ids()).square().mean().backward()

    return trained(model, loss)


@legal()
def evaluation_between_two_micro_batches(mesh: Any) -> Any:
    model = with_root(mesh)

    def loss() -> None:
        model(ids()).square().mean().backward()
        with evaluating(model):
            model(ids())
        model(ids()).square().mean().backward()

    return trained(model, loss)


@legal()
def evaluation_between_forward_and_backward(mesh: Any) -> Any:
    model = blocks(mesh)

    def loss() -> None:
        out = model(data())
        with evaluating(model):
            model(data())
        out.square().mean().backward()

    return trained(model, loss)


@legal()
def inference_mode_alone(mesh: Any) -> Any:
    model = with_root(mesh)

    def run() -> None:
        with evaluating(model, torch.inference_mode):
            for _ in range(4):
                model(ids())

    return [model], run


@legal()
def evaluation_kept_open(mesh: Any) -> Any:
    # A sampler's loop: no optimizer anywhere, parameters stay as they are and open, as the policy says.
    model = with_root(mesh, reshard_after_forward=False)

    def run() -> None:
        with evaluating(model):
            for _ in range(3):
                model(ids())

    return [model], run


@legal()
def average_of_weights_between(mesh: Any) -> Any:
    model = with_root(mesh)
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = sgd(model)

    def run() -> None:
        model(ids()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for kept, param in zip(average, model.parameters(), strict=True):
            kept.lerp_(param.detach(), 0.1)
        with evaluating(model):
            model(ids())
        model.reshard()

    return [model], run


@legal()
def evaluation_of_several_roots(mesh: Any) -> Any:
    # Each root has an order list of its own, and the eval pass leaves something in both.
    model = Calls(lambda self, x: self.right(self.left(x)), left=blocks(mesh, 2), right=blocks(mesh, 2))

    def loss() -> None:
        with evaluating(model):
            model(data())
        model(data()).square().mean().backward()

    return trained(model, loss)


# -- several forwards or backwards -------------------------------------------------------------------------------------
@legal()
def two_forwards_one_backward(mesh: Any) -> Any:
    model = with_root(mesh)
    return trained(model, lambda: (model(ids()) * model(ids())).mean().backward())


@legal()
def one_forward_two_backwards(mesh: Any) -> Any:
    model = with_root(mesh)

    def loss() -> None:
        out = model(ids())
        out.mean().backward(retain_graph=True)
        out.square().mean().backward()

    return trained(model, loss)


@legal()
def gradient_of_the_input(mesh: Any) -> Any:
    model = blocks(mesh)

    def loss() -> None:
        x = data(grad=True)
        torch.autograd.grad(model(x).sum(), x)
        model(x).square().mean().backward()

    return trained(model, loss)


@legal()
def forward_without_a_backward(mesh: Any) -> Any:
    # A skipped batch (a bad loss): a forward with grad whose backward never comes.
    model = with_root(mesh)

    def loss() -> None:
        model(ids())
        model(ids()).square().mean().backward()

    return trained(model, loss)


@legal()
def a_unit_used_twice(mesh: Any) -> Any:
    model = Calls(lambda self, x: self.b(self.a(self.b(self.a(x)))), a=Block(DIM), b=Block(DIM))
    shard(model, [model.a, model.b], mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def a_unit_used_twice_in_parallel(mesh: Any) -> Any:
    model = Calls(lambda self, x: self.out(self.a(x) + self.a(2 * x)), a=Block(DIM), out=linear())
    shard(model, [model.a, model.out], mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def several_outputs(mesh: Any) -> Any:
    def unit(self: Any, x: torch.Tensor) -> Any:
        h = self.a(x)
        return {"h": h, "more": (h.relu(), h.detach()), "n": 3}

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        out = self.unit(self.first(x))
        return self.last(out["more"][0]) + out["h"]

    model = Calls(run, first=linear(), unit=Calls(unit, a=linear()), last=linear())
    shard(model, [model.first, model.unit, model.last], mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def part_of_an_output_used(mesh: Any) -> Any:
    model = Calls(lambda self, x: self.tail(self.two(x).chunk(2, -1)[0]), two=nn.Linear(DIM, 2 * DIM), tail=linear())
    shard(model, [model.two, model.tail], mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def first_head_alone(mesh: Any) -> Any:
    # The heads after it do not run backward, and nothing prefetches them: the neighbour of the first head is the trunk.
    model = Calls(
        lambda self, x: [h(self.trunk(x)) for h in self.heads], trunk=linear(), heads=nn.ModuleList([linear(), linear()])
    )
    shard(model, [model.trunk, *model.heads], mesh)

    def run(self: Any, x: torch.Tensor) -> list[torch.Tensor]:
        h = self.trunk(x)
        return [head(h) for head in self.heads]

    model._run = run
    return trained(model, lambda: model(data())[0].square().mean().backward())


# -- by hand -----------------------------------------------------------------------------------------------------------
@legal()
def unshard_ahead(mesh: Any) -> Any:
    model = with_root(mesh)

    def loss() -> None:
        model.unshard(async_op=True)
        model(ids()).square().mean().backward()

    return trained(model, loss)


@legal()
def unshard_units_ahead(mesh: Any) -> Any:
    model = with_root(mesh)

    def loss() -> None:
        handles = [block.unshard(async_op=True) for block in model.blocks]
        handles[0].wait()
        model(ids()).square().mean().backward()

    return trained(model, loss)


@legal()
def unshard_ahead_of_the_backward(mesh: Any) -> Any:
    model = with_root(mesh)

    def loss() -> None:
        out = model(ids())
        model.blocks[2].unshard(async_op=True)
        out.square().mean().backward()

    return trained(model, loss)


@legal()
def read_by_hand(mesh: Any) -> Any:
    model = with_root(mesh)

    def loss() -> None:
        model(ids()).square().mean().backward()
        for block in model.blocks:
            block.unshard()
            block.up.weight.detach().norm()
            block.reshard()

    return trained(model, loss)


@legal()
def prefetch_lists(mesh: Any) -> Any:
    model = with_root(mesh)
    a, b, c = model.blocks
    model.set_modules_to_forward_prefetch([a, b])
    a.set_modules_to_forward_prefetch([b, c])
    b.set_modules_to_forward_prefetch([c])
    model.set_modules_to_backward_prefetch([c, b])
    c.set_modules_to_backward_prefetch([b, a])
    b.set_modules_to_backward_prefetch([a])
    return trained(model, lambda: model(ids()).square().mean().backward())


@legal()
def prefetch_lists_with_evaluation(mesh: Any) -> Any:
    model = blocks(mesh)
    model[0].set_modules_to_forward_prefetch([model[1]])
    model[1].set_modules_to_forward_prefetch([model[2]])

    def loss() -> None:
        model(data()).square().mean().backward()
        with evaluating(model):
            model(data())

    return trained(model, loss)


@legal(RECOMPUTE)
def prefetch_lists_with_checkpointing(mesh: Any) -> Any:
    model = Checkpointed([Block(DIM) for _ in range(3)], use_reentrant=False)
    shard(model, list(model.blocks), mesh)
    a, b, c = model.blocks
    a.set_modules_to_forward_prefetch([b])
    b.set_modules_to_forward_prefetch([c])
    c.set_modules_to_backward_prefetch([b])
    b.set_modules_to_backward_prefetch([a])
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def state_dicts_in_the_middle(mesh: Any) -> Any:
    model = with_root(mesh)

    def loss() -> None:
        out = model(ids())
        model.state_dict()
        out.square().mean().backward()
        state = model.state_dict()
        with evaluating(model):
            model(ids())
        model.load_state_dict(state)

    return trained(model, loss)


@legal(RESET)
def reset_after_a_caught_exception(mesh: Any) -> Any:
    model = with_root(mesh)
    failing: list[bool] = []

    def hook(module: nn.Module, args: Any) -> None:
        if failing:
            raise ValueError("as planned")

    model.blocks[1].register_forward_pre_hook(hook)

    def loss() -> None:
        failing.append(True)
        with pytest.raises(ValueError, match="as planned"):
            model(ids())
        failing.clear()
        model.reset_iter_state()
        model(ids()).square().mean().backward()

    return trained(model, loss)


@legal(RESET)
def reset_after_a_failed_backward(mesh: Any) -> Any:
    model = with_root(mesh)

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("as planned")

    def loss() -> None:
        caught: list[Any] = []
        handle = model.blocks[0].register_forward_hook(lambda m, a, out: caught.append(out.register_hook(fail)))
        with pytest.raises(ValueError, match="as planned"):
            model(ids()).square().mean().backward()
        handle.remove()
        model.reset_iter_state()
        model.zero_grad()
        model(ids()).square().mean().backward()

    return trained(model, loss)


@legal()
def registered_forward_method(mesh: Any) -> Any:
    class WithGenerate(nn.Sequential):
        def generate(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                for block in self:
                    x = block(x)
            return x

    model = WithGenerate(Block(DIM), Block(DIM))
    shard(model, list(model), mesh)
    register_fsdp_forward_method(model, "generate")

    def loss() -> None:
        with evaluating(model):
            model.generate(data())
        model(data()).square().mean().backward()

    return trained(model, loss)


# -- chunked losses ----------------------------------------------------------------------------------------------------
@legal(FLAG)
def chunked_loss_with_the_flags(mesh: Any) -> Any:
    model = Calls(lambda self, x: self.block(self.trunk(x)), trunk=Block(DIM), block=Block(DIM), head=nn.Linear(DIM, 20))
    shard(model, [model.trunk, model.block, model.head], mesh)

    def loss() -> None:
        hidden = model(data(8))
        leaf = hidden.detach().requires_grad_()
        model.head.set_requires_gradient_sync(False)
        model.head.set_reshard_after_backward(False)
        model.head.set_reshard_after_forward(False)
        chunks = leaf.chunk(4)
        for chunk in chunks[:-1]:
            model.head(chunk).square().mean().backward()
        model.head.set_requires_gradient_sync(True)
        model.head.set_reshard_after_backward(True)
        model.head(chunks[-1]).square().mean().backward()
        hidden.backward(leaf.grad)

    return trained(model, loss)


@legal(FLAG, GROUPED)
def chunked_loss_of_a_grouped_unit(mesh: Any) -> Any:
    model = Calls(lambda self, x: self.norm(self.trunk(x)), trunk=Block(DIM), norm=nn.LayerNorm(DIM), head=nn.Linear(DIM, 20))
    fully_shard(model.trunk, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)

    def loss() -> None:
        hidden = model(data(8))
        leaf = hidden.detach().requires_grad_()
        model.head.set_requires_gradient_sync(False)
        model.head.set_reshard_after_backward(False)
        for chunk in leaf.chunk(4):
            model.head(chunk).square().mean().backward()
        model.head.set_requires_gradient_sync(True)
        model.head.set_reshard_after_backward(True)
        hidden.backward(leaf.grad)

    return trained(model, loss)


@legal()
def two_chunks(mesh: Any) -> Any:
    # The head inside the forward, chunk by chunk with one backward: a unit used several times.
    model = Calls(lambda self, x: torch.cat([self.head(c) for c in self.trunk(x).chunk(2)]), trunk=linear(), head=linear())
    shard(model, [model.trunk, model.head], mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


# -- recomputation -----------------------------------------------------------------------------------------------------
def _checkpointed(mesh: Any, nested: bool = False, **how: Any) -> Any:
    model = Checkpointed([Block(DIM) for _ in range(3)], **how)
    for block in model.blocks:
        if nested:
            fully_shard(block.up, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, lambda: model(data(grad=True)).square().mean().backward())


@legal(RECOMPUTE)
def checkpointing(mesh: Any) -> Any:
    return _checkpointed(mesh, use_reentrant=False)


@legal(RECOMPUTE)
def checkpointing_nested(mesh: Any) -> Any:
    return _checkpointed(mesh, nested=True, use_reentrant=False)


@legal(RECOMPUTE)
def checkpointing_reentrant(mesh: Any) -> Any:
    return _checkpointed(mesh, use_reentrant=True)


@legal(RECOMPUTE)
def checkpointing_reentrant_nested(mesh: Any) -> Any:
    return _checkpointed(mesh, nested=True, use_reentrant=True)


@legal()
def checkpointing_inside_the_unit(mesh: Any) -> Any:
    model = nn.Sequential(*[checkpoint_wrapper(Block(DIM)) for _ in range(3)])
    shard(model, list(model), mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal(RECOMPUTE)
def checkpointing_over_several_units(mesh: Any) -> Any:
    for_several = blocks(mesh, root=False)
    model = Calls(lambda self, x: checkpoint(self.inner, self.first(x), use_reentrant=False), first=linear(), inner=for_several)
    shard(model, [model.first], mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal(RECOMPUTE)
def checkpointing_over_several_units_reentrant(mesh: Any) -> Any:
    for_several = blocks(mesh, root=False)
    model = Calls(lambda self, x: checkpoint(self.inner, self.first(x), use_reentrant=True), first=linear(), inner=for_several)
    shard(model, [model.first], mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal(RECOMPUTE)
def checkpointing_one_region_over_all(mesh: Any) -> Any:
    for_several = blocks(mesh, root=False)
    model = Calls(lambda self, x: checkpoint(self.inner, x, use_reentrant=False), inner=for_several)
    fully_shard(model, mesh=mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal(TWICE)
def checkpointing_two_forwards(mesh: Any) -> Any:
    model = Checkpointed([Block(DIM) for _ in range(3)], use_reentrant=False)
    for block in model.blocks:
        shard(block, [block.up], mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, lambda: (model(data()) * model(data())).mean().backward())


@legal(RECOMPUTE)
def checkpointing_of_micro_batches(mesh: Any) -> Any:
    model = Checkpointed([Block(DIM) for _ in range(3)], use_reentrant=False)
    shard(model, list(model.blocks), mesh)

    def loss() -> None:
        for i in range(3):
            model.set_requires_gradient_sync(i == 2)
            model.set_is_last_backward(i == 2)
            model(data()).square().mean().backward()

    return trained(model, loss)


@legal(RECOMPUTE)
def checkpointing_in_evaluation_too(mesh: Any) -> Any:
    model = Checkpointed([Block(DIM) for _ in range(3)], use_reentrant=False)
    shard(model, list(model.blocks), mesh)

    def loss() -> None:
        with evaluating(model):
            model(data())
        model(data()).square().mean().backward()

    return trained(model, loss)


def _save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    save = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


@legal(RECOMPUTE)
def checkpointing_selective(mesh: Any) -> Any:
    contexts = functools.partial(create_selective_checkpoint_contexts, _save_products)
    return _checkpointed(mesh, use_reentrant=False, context_fn=contexts)


@legal(RECOMPUTE)
def checkpointing_kept_open(mesh: Any) -> Any:
    model = Checkpointed([Block(DIM) for _ in range(3)], use_reentrant=False)
    shard(model, list(model.blocks), mesh, reshard_after_forward=False)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def compiled(mesh: Any) -> Any:
    torch._dynamo.reset()
    model = nn.Sequential(*[Block(DIM) for _ in range(2)])
    for block in model:
        block.compile(backend="eager")
    shard(model, list(model), mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal(RECOMPUTE)
def compiled_under_checkpoint(mesh: Any) -> Any:
    torch._dynamo.reset()
    model = Checkpointed([Block(DIM) for _ in range(2)], use_reentrant=False)
    for block in model.blocks:
        block.compile(backend="eager")
    shard(model, list(model.blocks), mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


# -- frozen parts and adapters -----------------------------------------------------------------------------------------
@legal()
def frozen_embedding(mesh: Any) -> Any:
    model = Calls(lambda self, i: self.b(self.a(self.emb(i))), emb=nn.Embedding(20, DIM), a=Block(DIM), b=Block(DIM))
    model.emb.requires_grad_(False)
    shard(model, [model.emb, model.a, model.b], mesh)
    return trained(model, lambda: model(ids()).square().mean().backward())


@legal()
def frozen_prefix(mesh: Any) -> Any:
    model = nn.Sequential(*[Block(DIM) for _ in range(4)])
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    shard(model, list(model), mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def frozen_middle(mesh: Any) -> Any:
    model = nn.Sequential(*[Block(DIM) for _ in range(3)])
    model[1].requires_grad_(False)
    shard(model, list(model), mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def frozen_tower(mesh: Any) -> Any:
    # A vision tower that is frozen and runs without grad, beside a text part that trains.
    def run(self: Any, i: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            seen = self.vision(image)
        return self.text(self.emb(i) + self.bridge(seen))

    model = Calls(
        run, vision=nn.Sequential(Block(DIM), Block(DIM)), bridge=linear(), emb=nn.Embedding(20, DIM), text=Block(DIM)
    )
    model.vision.requires_grad_(False)
    shard(model, [*model.vision, model.bridge, model.text], mesh)
    return trained(model, lambda: model(torch.randint(0, 20, (4,)), data()).square().mean().backward())


@legal()
def adapters_on_a_frozen_base(mesh: Any) -> Any:
    def lora() -> nn.Module:
        unit = Calls(lambda self, x: x + self.base(x) + self.up(self.down(x)), base=linear(), down=linear(), up=linear())
        unit.base.requires_grad_(False)
        return unit

    model = nn.Sequential(*[lora() for _ in range(3)])
    shard(model, list(model), mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def teacher_and_student(mesh: Any) -> Any:
    student, teacher = blocks(mesh), blocks(mesh)
    teacher.requires_grad_(False)

    def loss() -> None:
        x = data()
        with torch.no_grad():
            wanted = teacher(x)
        (student(x) - wanted).square().mean().backward()

    return trained(student, loss, teacher)


@legal()
def frozen_teacher_kept_open(mesh: Any) -> Any:
    # Opened once by hand and left so: its parameters never change, no optimizer holds them.
    student, teacher = blocks(mesh), blocks(mesh, reshard_after_forward=False)
    teacher.requires_grad_(False)
    for block in teacher:
        block.unshard()

    def loss() -> None:
        x = data()
        with torch.no_grad():
            wanted = teacher(x)
        (student(x) - wanted).square().mean().backward()

    return trained(student, loss, teacher)


@legal()
def gradients_through_a_frozen_model(mesh: Any) -> Any:
    student, critic = blocks(mesh), blocks(mesh)
    critic.requires_grad_(False)
    return trained(student, lambda: critic(student(data())).square().mean().backward(), critic)


# -- which units run ---------------------------------------------------------------------------------------------------
@legal()
def expert_that_is_not_called(mesh: Any) -> Any:
    turn = [0]

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts[turn[0] % 3](self.first(x))

    model = Calls(run, first=linear(), experts=nn.ModuleList([linear() for _ in range(3)]))
    shard(model, [model.first, *model.experts], mesh)

    def loss() -> None:
        turn[0] += 1
        model(data()).square().mean().backward()

    return trained(model, loss)


@legal()
def unit_that_never_runs(mesh: Any) -> Any:
    model = Calls(lambda self, x: self.used(x), used=linear(), spare=linear())
    shard(model, [model.used, model.spare], mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def layers_dropped_at_random(mesh: Any) -> Any:
    turn = [0]

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        turn[0] += 1
        for i, layer in enumerate(self.layers):
            if i != turn[0] % 3:
                x = layer(x)
        return x

    model = Calls(run, layers=nn.ModuleList([Block(DIM) for _ in range(3)]))
    shard(model, list(model.layers), mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal(GROUPED)
def grouped_norm_and_head(mesh: Any) -> Any:
    model = Calls(lambda self, x: self.head(self.norm(self.trunk(x))), trunk=Block(DIM), norm=nn.LayerNorm(DIM), head=linear())
    fully_shard(model.trunk, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def several_roots_side_by_side(mesh: Any) -> Any:
    model = Calls(lambda self, x: self.right(self.left(x)), left=blocks(mesh, 2), right=blocks(mesh, 2))
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def unit_called_by_itself_later(mesh: Any) -> Any:
    model = blocks(mesh)

    def loss() -> None:
        model(data()).square().mean().backward()
        with evaluating(model):
            model[1](data())

    return trained(model, loss)


@legal()
def two_embeddings_at_the_front(mesh: Any) -> Any:
    model = Calls(
        lambda self, i: self.block(self.words(i) + self.places(i)),
        words=nn.Embedding(20, DIM), places=nn.Embedding(20, DIM), block=Block(DIM),
    )  # fmt: skip
    shard(model, [model.words, model.places, model.block], mesh)
    return trained(model, lambda: model(ids()).square().mean().backward())


# -- several models and optimizers -------------------------------------------------------------------------------------
@legal()
def adversarial(mesh: Any) -> Any:
    maker, judge = blocks(mesh, 2), blocks(mesh, 2)
    make_opt, judge_opt = torch.optim.AdamW(maker.parameters(), lr=0.01), torch.optim.AdamW(judge.parameters(), lr=0.01)

    def run() -> None:
        (judge(data()).mean() - judge(maker(data()).detach()).mean()).backward()
        judge_opt.step()
        judge_opt.zero_grad()
        judge(maker(data())).mean().backward()
        make_opt.step()
        make_opt.zero_grad()
        judge_opt.zero_grad()

    return [maker, judge], run


@legal()
def one_kept_open_while_the_other_steps(mesh: Any) -> Any:
    one, two = blocks(mesh, 2, reshard_after_forward=False), blocks(mesh, 2)
    one_opt, two_opt = sgd(one), sgd(two)

    def run() -> None:
        out = one(data())
        two(data()).square().mean().backward()
        two_opt.step()
        out.square().mean().backward()
        one_opt.step()
        one_opt.zero_grad()
        two_opt.zero_grad()

    return [one, two], run


@legal()
def two_optimizers_for_one_model(mesh: Any) -> Any:
    model = blocks(mesh)
    optimizers = [torch.optim.AdamW(model[0].parameters(), lr=0.01), sgd(nn.ModuleList([model[1], model[2]]))]

    def run() -> None:
        model(data()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return [model], run


@legal()
def gradients_clipped(mesh: Any) -> Any:
    model = with_root(mesh)

    def loss() -> None:
        model(ids()).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return trained(model, loss)


@legal()
def optimizer_in_the_backward(mesh: Any) -> Any:
    model = with_root(mesh)
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], lr=0.01)

        def step(param: torch.Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    return [model], lambda: model(ids()).square().mean().backward()


@legal()
def recorded_step_by_step_without_an_optimizer(mesh: Any) -> Any:
    model = with_root(mesh)
    return [model], lambda: model(ids()).square().mean().backward()


# -- the tests ---------------------------------------------------------------------------------------------------------
def every(programs: list[Program]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("program", [pytest.param(p, id=p.build.__name__, marks=p.marks) for p in programs])


@every(LEGAL)
def test_legal(fake_pg: Any, watch: Any, program: Program) -> None:
    models, run = program.build(fake_pg(*program.shape, names=program.names))
    with watch(models, on_violation="raise") as rec:
        for _ in range(3):
            run()
    verdict(rec).silent()


@every(LEGAL)
def test_legal_step_by_step(fake_pg: Any, watch: Any, program: Program) -> None:
    # A recording around each iteration, the second one under way: what an earlier one left is known.
    models, run = program.build(fake_pg(*program.shape, names=program.names))
    for _ in range(3):
        with watch(models, on_violation="raise") as rec:
            run()
            rec.step()
    verdict(rec).silent()


@pytest.mark.parametrize("wrapped", [True, False])
def test_evaluation_that_is_not_recorded(fake_pg: Any, watch: Any, wrapped: bool) -> None:
    # Each training step is recorded, the eval passes between them are not: what they left in the order list was never seen.
    mesh = fake_pg(2)
    model = blocks(mesh, root=wrapped)
    if not wrapped:
        model = Calls(lambda self, x: self.one(x), one=fully_shard(model, mesh=mesh))
    optimizer = sgd(model)
    for _ in range(3):
        with watch(model, on_violation="raise") as rec:
            steps(model, 1, optimizer=optimizer)
        with evaluating(model):
            model(data())
    verdict(rec).silent()
    assert len([v for v in rec.violations if v.rule == "gather-after-backward"]) == 1  # as info


# Programs that do what a rule is about: lists that point the wrong way, a prefetch that a recomputation repeats, chunks of a
# loss without the flags.
FAULTY = ("prefetch_the_wrong_way_round", "reentrant_with_forward_prefetch", "grouped_partly_run")


@pytest.mark.parametrize(
    "program", [pytest.param(p, id=p.name, marks=p.marks) for p in PROGRAMS if p.name not in FAULTY]
)  # fmt: skip
def test_legal_elsewhere(fake_pg: Any, watch: Any, program: Foreign) -> None:
    running = program.build(fake_pg(*program.shape, names=program.names))
    with watch(running.models, on_violation="raise") as rec:
        for _ in range(3):
            running.step()
    verdict(rec).silent()
