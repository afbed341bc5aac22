"""Legal training of every kind: no rule says more than `info`, and nothing stops the run under ``on_violation="raise"``."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
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

    def loss() -> None:
        for _ in range(2):
            with evaluating(model):
                model(ids())
        model(ids()).square().mean().backward()

    made = trained(model, loss)  # the optimizer first: after an eval pass the root's parameters are copies
    with torch.no_grad():
        model(ids())
    return made


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
def chunked_loss_of_a_grouped_unit_held_by_hand(mesh: Any) -> Any:
    # torchtitan's ChunkedLossWrapper: the head shares its unit with the norm before it, is gathered by hand for the chunks and
    # freed after them; the norm's own backward gathers the unit a third time.
    model = Calls(lambda self, x: self.norm(self.trunk(x)), trunk=Block(DIM), norm=nn.LayerNorm(DIM), head=nn.Linear(DIM, 20))
    fully_shard(model.trunk, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)

    def switch(on: bool) -> None:
        model.head.set_requires_gradient_sync(on)
        model.head.set_reshard_after_backward(on)
        model.head.set_reshard_after_forward(on)

    def loss() -> None:
        hidden = model(data(8))
        leaf = hidden.detach().requires_grad_()
        switch(False)
        model.head.unshard()
        for number, chunk in enumerate(leaf.chunk(4)):
            if number == 3:
                model.head.set_requires_gradient_sync(True)
            model.head(chunk).square().mean().backward()
        model.head.reshard()
        switch(True)
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


# -- further -----------------------------------------------------------------------------------------------------------
@legal()
def stages_of_a_pipeline(mesh: Any) -> Any:
    # Two stages of one process, each a root of its own, two micro-batches in flight.
    one, two = blocks(mesh, 2), blocks(mesh, 2)
    optimizer = sgd(nn.ModuleList([one, two]))

    def run() -> None:
        outputs = []
        for _ in range(2):
            middle = one(data())
            leaf = middle.detach().requires_grad_()
            outputs.append((middle, leaf, two(leaf)))
        for i, (middle, leaf, out) in enumerate(outputs):
            for stage in (one, two):
                stage.set_is_last_backward(i == 1)
                stage.set_requires_gradient_sync(i == 1)
            out.square().mean().backward()
            middle.backward(leaf.grad)
        optimizer.step()
        optimizer.zero_grad()

    return [one, two], run


@legal()
def generation_then_training(mesh: Any) -> Any:
    # Reinforcement learning: the units opened once for many forwards, closed again, then a training step.
    model = with_root(mesh)

    def loss() -> None:
        with evaluating(model):
            for block in model.blocks:
                block.unshard()
            for _ in range(3):
                model(ids())
            for block in model.blocks:
                block.reshard()
        model(ids()).square().mean().backward()

    return trained(model, loss)


@legal(FLAG)
def generation_kept_open(mesh: Any) -> Any:
    model = with_root(mesh)

    def loss() -> None:
        with evaluating(model):
            model.set_reshard_after_forward(False)
            for _ in range(3):
                model(ids())
            model.set_reshard_after_forward(True)
            for unit in (model, *model.blocks):
                unit.reshard()
        model(ids()).square().mean().backward()

    return trained(model, loss)


@legal()
def preferences(mesh: Any) -> Any:
    # DPO: a frozen reference runs without grad, the policy twice with one backward.
    policy, reference = blocks(mesh, 2), blocks(mesh, 2)
    reference.requires_grad_(False)

    def loss() -> None:
        good, bad = data(), data()
        with torch.no_grad():
            wanted = reference(good) - reference(bad)
        (policy(good) - policy(bad) - wanted).square().mean().backward()

    return trained(policy, loss, reference)


@legal()
def changed_in_place_where_that_is_fine(mesh: Any) -> Any:
    # The unit's output is no view: its hook stays with the value from before the change.
    model = Calls(lambda self, x: self.b(self.a(x).relu_()), a=nn.Linear(DIM, DIM), b=nn.Linear(DIM, DIM))
    shard(model, [model.a, model.b], mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def penalty_on_the_parameters(mesh: Any) -> Any:
    model = blocks(mesh)

    def loss() -> None:
        penalty = sum(p.square().sum() for p in model.parameters())
        (model(data()).square().mean() + 0.01 * penalty.full_tensor()).backward()

    return trained(model, loss)


@legal()
def loss_on_the_parameters_alone(mesh: Any) -> Any:
    model = blocks(mesh)

    def loss() -> None:
        model(data()).square().mean().backward()
        sum(p.square().sum() for p in model.parameters()).backward()

    return trained(model, loss)


@legal()
def keyword_inputs(mesh: Any) -> Any:
    unit = Calls(lambda self, *, x, mask=None, scale=2: self.a(x) * scale, a=linear())
    model = Calls(lambda self, x: self.unit(x=self.first(x), mask=x > 0), first=linear(), unit=unit)
    shard(model, [model.first, model.unit], mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def containers_as_inputs(mesh: Any) -> Any:
    unit = Calls(lambda self, batch: {"x": self.a(batch["x"][0])}, a=linear())
    model = Calls(
        lambda self, x: self.last(self.unit({"x": (self.first(x), 1)})["x"]), first=linear(), unit=unit, last=linear()
    )  # fmt: skip
    shard(model, [model.first, model.unit, model.last], mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def frozen_and_trainable_in_one_unit(mesh: Any) -> Any:
    model = nn.Sequential(*[Block(DIM) for _ in range(3)])
    for block in model:
        block.up.requires_grad_(False)
    shard(model, list(model), mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def frozen_all_but_the_head(mesh: Any) -> Any:
    model = with_root(mesh)
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith("head"))
    return trained(model, lambda: model(ids()).square().mean().backward())


@legal()
def frozen_below_with_prompts(mesh: Any) -> Any:
    # Prompt tuning: the input carries the only gradient through frozen units.
    model = Calls(lambda self, x: self.b(self.a(x + self.prompt)), a=linear(), b=linear())
    model.requires_grad_(False)
    model.prompt = nn.Parameter(torch.zeros(DIM))
    shard(model, [model.a, model.b], mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal()
def optimizer_with_a_closure(mesh: Any) -> Any:
    model = with_root(mesh)
    optimizer = sgd(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(ids()).square().mean()
        loss.backward()
        return loss

    return [model], lambda: optimizer.step(closure)


@legal()
def steps_without_a_backward(mesh: Any) -> Any:
    model = with_root(mesh)
    optimizer = sgd(model)

    def run() -> None:
        model(ids()).square().mean().backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()

    return [model], run


@legal()
def gradients_kept_over_steps(mesh: Any) -> Any:
    model = with_root(mesh)
    optimizer = sgd(model)

    def run() -> None:
        model(ids()).square().mean().backward()
        optimizer.step()

    return [model], run


@legal()
def autocast(mesh: Any) -> Any:
    model = blocks(mesh)

    def loss() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(data())
        out.float().square().mean().backward()

    return trained(model, loss)


@legal(RECOMPUTE)
def checkpointing_ends_in_a_unit(mesh: Any) -> Any:
    # Recomputation stops early inside the last unit of the block, whose post-forward then never comes.
    model = Checkpointed(
        [Calls(lambda self, x: self.b(self.a(x).relu()), a=linear(), b=linear()) for _ in range(3)], use_reentrant=False
    )
    for block in model.blocks:
        shard(block, [block.b], mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal(RECOMPUTE)
def checkpointing_without_early_stop(mesh: Any) -> Any:
    from torch.utils.checkpoint import set_checkpoint_early_stop

    model = Checkpointed([Block(DIM) for _ in range(3)], use_reentrant=False)
    for block in model.blocks:
        shard(block, [block.down], mesh)
    fully_shard(model, mesh=mesh)

    def loss() -> None:
        with set_checkpoint_early_stop(False):
            model(data()).square().mean().backward()

    return trained(model, loss)


@legal(RECOMPUTE)
def checkpointing_inside_checkpointing(mesh: Any) -> Any:
    def inner(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.a, x, use_reentrant=False).relu()

    model = Checkpointed([Calls(inner, a=Block(DIM)) for _ in range(2)], use_reentrant=False)
    for block in model.blocks:
        shard(block, [block.a], mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal(RECOMPUTE)
def checkpointing_of_frozen_units(mesh: Any) -> Any:
    model = Checkpointed([Block(DIM) for _ in range(3)], use_reentrant=False)
    model.blocks[1].requires_grad_(False)
    shard(model, list(model.blocks), mesh)
    return trained(model, lambda: model(data(grad=True)).square().mean().backward())


@legal(RECOMPUTE)
def checkpointing_reentrant_of_frozen_units(mesh: Any) -> Any:
    model = Checkpointed([Block(DIM) for _ in range(3)], use_reentrant=True)
    model.blocks[1].requires_grad_(False)
    shard(model, list(model.blocks), mesh)
    return trained(model, lambda: model(data(grad=True)).square().mean().backward())


@legal(RECOMPUTE)
def checkpointing_kept_open_nested(mesh: Any) -> Any:
    model = Checkpointed([Block(DIM) for _ in range(3)], use_reentrant=False)
    for block in model.blocks:
        shard(block, [block.up], mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal(RECOMPUTE)
def checkpointing_on_a_smaller_mesh(mesh: Any) -> Any:
    model = Checkpointed([Block(DIM) for _ in range(3)], use_reentrant=False)
    for block in model.blocks:
        shard(block, [block.up], mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal(RECOMPUTE)
def checkpointing_a_unit_used_twice(mesh: Any) -> Any:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.cell, x, use_reentrant=False)
        return self.out(x)

    model = Calls(run, cell=Block(DIM), out=linear())
    shard(model, [model.cell, model.out], mesh)
    return trained(model, lambda: model(data()).square().mean().backward())


@legal(RECOMPUTE)
def pipeline_with_checkpointing(mesh: Any) -> Any:
    model = Checkpointed([Block(DIM) for _ in range(2)], use_reentrant=False)
    shard(model, list(model.blocks), mesh)

    def loss() -> None:
        outputs = [model(data(grad=True)) for _ in range(3)]
        for i, out in enumerate(outputs):
            model.set_is_last_backward(i == 2)
            model.set_requires_gradient_sync(i == 2)
            out.square().mean().backward()

    return trained(model, loss)


@legal(RECOMPUTE)
def forward_in_the_backward_of_another(mesh: Any) -> Any:
    # Overlapped schedules: the next forward of one model runs inside the backward of the other and is backed later.
    one, two = blocks(mesh, 2), blocks(mesh, 2)
    optimizer = sgd(nn.ModuleList([one, two]))

    def run() -> None:
        kept: list[torch.Tensor] = []
        handle = one[0].register_forward_hook(
            lambda m, a, out: out.register_hook(lambda g: (kept.append(_with_grad(two, data())), None)[1]) and None
        )
        one(data()).square().mean().backward()
        handle.remove()
        kept[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return [one, two], run


def _with_grad(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return model(x)


@legal()
def a_part_of_the_model_is_recorded(mesh: Any) -> Any:
    whole = Calls(lambda self, x: self.tail(self.body(x)), body=blocks(mesh, 2, root=False), tail=linear())
    shard(whole, [whole.tail], mesh)
    whole(data())
    [body], run = trained(whole.body, lambda: whole(data()).square().mean().backward())
    return [body], run


@legal()
def a_trainer_around_the_model(mesh: Any) -> Any:
    class Trainer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = with_root(mesh)

        def training_step(self) -> torch.Tensor:
            return self.model(ids()).square().mean()

    trainer = Trainer()
    return trained(trainer, lambda: trainer.training_step().backward())


@legal()
def tied_weights_in_the_root(mesh: Any) -> Any:
    def run(self: Any, i: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.emb(i)))

    model = Calls(run, emb=nn.Embedding(20, DIM), block=Block(DIM), head=nn.Linear(DIM, 20, bias=False))
    model.head.weight = model.emb.weight
    shard(model, [model.block], mesh)
    return trained(model, lambda: model(ids()).square().mean().backward())


@legal()
def embedding_not_gathered_in_the_backward(mesh: Any) -> Any:
    model = Calls(lambda self, i: self.block(self.emb(i)), emb=nn.Embedding(20, DIM), block=Block(DIM))
    shard(model, [model.emb, model.block], mesh)
    model.emb.set_unshard_in_backward(False)
    return trained(model, lambda: model(ids()).square().mean().backward())


@legal()
def backward_for_some_inputs(mesh: Any) -> Any:
    model = blocks(mesh)

    def loss() -> None:
        x = data(grad=True)
        model(x).square().mean().backward(inputs=[x])
        model(data()).square().mean().backward()

    return trained(model, loss)


@legal(shape=(1,))
def saved_and_loaded_with_dcp(mesh: Any) -> Any:
    # torch.distributed.checkpoint between steps, after an eval pass that left the root open; on one rank, since the shards of a
    # fake group do not add up to a whole checkpoint.
    model = with_root(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = StateDictOptions()

    def run() -> None:
        model(ids()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with evaluating(model):
            model(ids())
        model.reshard()
        with tempfile.TemporaryDirectory() as folder:
            state = dict(zip(("model", "optim"), get_state_dict(model, optimizer, options=options), strict=True))
            dcp.save(state, checkpoint_id=folder, no_dist=True)
            dcp.load(state, checkpoint_id=folder, no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)

    return [model], run


@legal()
def a_trainer_by_reinforcement(mesh: Any) -> Any:
    # Actor, critic and a frozen reference in one process: rollouts and log-probabilities without grad, the reference off to the
    # CPU and back, the actor's whole weights handed out, two optimizers with several steps an iteration.
    actor, critic, reference = with_root(mesh), with_root(mesh), with_root(mesh)
    reference.requires_grad_(False)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (actor, critic)]

    def run() -> None:
        prompts = ids()
        with torch.no_grad():
            actor.eval()
            for _ in range(3):
                actor(prompts)
            actor.train()
            for model in (actor, critic, reference):
                model(prompts)
            for model in (actor, critic, reference):
                model.reshard()
        reference.to("cpu")
        for _ in range(2):
            for model, optimizer in zip((actor, critic), optimizers, strict=True):
                for last in (False, True):
                    model.set_requires_gradient_sync(last)
                    model(ids()).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        get_model_state_dict(actor, options=StateDictOptions(full_state_dict=True))
        actor.to("cpu")
        with torch.no_grad():  # the reference follows the actor slowly
            for mine, its in zip(reference.parameters(), actor.parameters(), strict=True):
                mine.lerp_(its.detach(), 0.1)

    return [actor, critic, reference], run


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


@pytest.mark.parametrize("keep", [False, True])
def test_recording_that_begins_between_forward_and_backward(fake_pg: Any, watch: Any, keep: bool) -> None:
    model = blocks(fake_pg(2), reshard_after_forward=not keep)
    optimizer = sgd(model)
    with torch.no_grad():
        model(data())
    out = model(data())
    with watch(model, on_violation="raise") as rec:
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps(model, 2, optimizer=optimizer)
    verdict(rec).silent()


def test_recording_that_ends_between_forward_and_backward(fake_pg: Any, watch: Any) -> None:
    model = with_root(fake_pg(2), reshard_after_forward=False)
    with watch(model, on_violation="raise") as rec:
        out = model(ids())
    out.square().mean().backward()
    with watch(model, on_violation="raise") as again:
        steps(model, 2, lambda: model(ids()).square().mean())
    verdict(again).silent()
    assert not rec.violations


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
