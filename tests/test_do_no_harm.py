"""Training with and without recording, from the same seed, is bit-identical: values, gradients, random numbers, errors."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fsdptrace
from support.models import Block, Calls, Checkpointed
from support.programs import PROGRAMS, Program, data, every_program
from support.ranks import run_ranks
from support.torches import VALUES, since

STEPS = 3


def train(program: Program, mesh: Any, record: Any) -> dict[str, Any]:
    """Everything that a run leaves, step by step; under ``record(models)`` where one is given."""
    torch.manual_seed(1)
    torch._dynamo.utils.counters.clear()
    running = program.build(mesh)
    tensors: list[torch.Tensor] = []
    grads: list[torch.Tensor] = []
    for model in running.models:
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(lambda p: grads.append(p.grad.to_local().clone()))

    def steps() -> None:
        for _ in range(STEPS):
            tensors.extend(running.step())
            tensors.append(torch.get_rng_state())
            tensors.append(torch.tensor(len(grads)))

    if record is None:
        steps()
    else:
        with record(running.models, checks=None, on_violation="record", detail="full") as rec:
            steps()
        assert rec.faults == 0
        assert rec.enabled
        assert len(rec.steps) > 0
    params = [param.to_local().detach().clone() for model in running.models for param in model.parameters()]
    counters = torch._dynamo.utils.counters
    graphs = {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}
    return {"tensors": tensors, "grads": grads, "params": params, "graphs": graphs}


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("tensors", "grads", "params"):
        assert len(one[name]) == len(other[name]) > 0, name
        for i, (a, b) in enumerate(zip(one[name], other[name], strict=True)):
            assert torch.equal(a, b), f"{name}[{i}]"
    assert one["graphs"] == other["graphs"]


@VALUES
@every_program()
def test_bit_identical(fake_pg: Any, record: Any, program: Program) -> None:
    mesh = fake_pg(*program.shape, names=program.names)
    same(train(program, mesh, None), train(program, mesh, record))


def test_compiled_programs_have_graphs(fake_pg: Any) -> None:
    # That the comparison of graphs compares something.
    mesh = fake_pg(4)
    for program in PROGRAMS:
        if program.name.startswith("compiled"):
            assert train(program, mesh, None)["graphs"]["graphs"] > 0


def on_two_ranks(rank: int, out: str) -> list[tuple[str, int]]:
    """All programs for a mesh of two, and what their files hold. Raises where recording makes a difference."""
    done = []
    for program in PROGRAMS:
        if program.marks and any(mark.args and mark.args[0] for mark in program.marks):
            continue
        if program.name in (
            "smaller_mesh_after_forward",
            "several_groups_per_module",
            "world_of_one",
            "uneven",
            "compiled_root",
        ):
            continue  # they need more ranks, or are the same again
        shape = (1, 2) if program.names else (2,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=program.names)
        recordings: list[fsdptrace.Recording] = []

        def record(models: Any, recordings: Any = recordings, name: str = program.name, **options: Any) -> Any:
            recordings.append(fsdptrace.record(models, out=f"{out}/{name}", **options))
            return recordings[-1]

        same(train(program, mesh, None), train(program, mesh, record))
        recordings[0].close()
        done.append((program.name, recordings[0].faults))
    return done


@VALUES
@pytest.mark.multiprocess
def test_bit_identical_on_gloo(tmp_path: Path) -> None:
    first, second = run_ranks(on_two_ranks, 2, str(tmp_path), timeout=120)
    assert first == second
    assert len(first) > 25
    assert {faults for _, faults in first} == {0}


# -- errors ------------------------------------------------------------------------------------------------------------
def error_of(run: Any, record: Any, model: nn.Module) -> BaseException:
    if record is None:
        with pytest.raises(Exception) as caught:
            run()
    else:
        with record(model, checks=None) as rec, pytest.raises(Exception) as caught:
            run()
        assert rec.faults == 0
    return caught.value


def same_error(make: Any, record: Any) -> BaseException:
    """``make()`` gives a model and a function that fails; it fails alike with and without recording."""
    errors = []
    for recorder in (None, record):
        torch.manual_seed(1)
        model, run = make()
        errors.append(error_of(run, recorder, model))
    one, other = errors
    assert type(one) is type(other)
    assert str(one) == str(other)
    assert [type(e) for e in (one.__cause__, one.__context__)] == [type(e) for e in (other.__cause__, other.__context__)]
    return other


def test_same_error_in_forward(fake_pg: Any, record: Any) -> None:
    mesh = fake_pg(4)

    def make() -> Any:
        model = nn.Sequential(Block(), nn.Linear(7, 7))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, lambda: model(data())

    assert "shapes cannot be multiplied" in str(same_error(make, record))


def test_same_checkpoint_error(fake_pg: Any, record: Any) -> None:
    mesh = fake_pg(4)

    def make() -> Any:
        calls: list[int] = []

        def run(self: Any, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return self.lin(x).relu() if len(calls) == 1 else self.lin(x)

        model = Checkpointed([Calls(run, lin=nn.Linear(8, 8))], use_reentrant=False)
        fully_shard(model.blocks[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, lambda: model(data()).sum().backward()

    error = same_error(make, record)
    assert isinstance(error, CheckpointError)


@since(2, 13, "selective checkpointing counts every operator")
def test_same_error_of_selective_checkpointing(fake_pg: Any, record: Any) -> None:
    # A unit inside the region is open when the forward gets to it and is gathered in the recomputation: PyTorch finds more
    # operators there than it counted, with or without us.
    mesh = fake_pg(4)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return CheckpointPolicy.PREFER_RECOMPUTE

    def make() -> Any:
        model = Calls(
            lambda self, x: checkpoint(
                self.block, x, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, policy)
            ),
            block=Block(),
        )
        fully_shard(model.block.up, mesh=mesh)
        fully_shard(model, mesh=mesh)

        def run() -> None:
            model.block.up.unshard()
            model(data()).sum().backward()

        return model, run

    assert "encountered during backward but not found in storage" in str(same_error(make, record))
