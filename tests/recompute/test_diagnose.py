"""diagnose: the first operator that differs, with its line; no collective; it says where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointError

import fsdptrace
from support.experts import causes
from support.models import Calls, Checkpointed


def failing(mesh: Any, record: Any, run: Any, **children: nn.Module) -> tuple[Any, CheckpointError]:
    model = Checkpointed([Calls(run, **children)], use_reentrant=False)
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    with record(model, checks=None, on_violation="record"), pytest.raises(CheckpointError) as caught:
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    return model, caught.value


def test_the_operator_that_differs(fake_pg: Any, record: Any) -> None:
    calls: list[int] = []

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        x = self.lin(x)
        return x.tanh().exp() if len(calls) % 2 else x.sin()

    model, error = failing(fake_pg(2), record, run, lin=nn.Linear(8, 8))
    before = [param.detach().clone() for param in model.blocks[0].parameters()]
    said: list[str] = []
    found = fsdptrace.diagnose(error, said.append)
    # t, addmm; then tanh in one and sin in the other.
    assert found.position == 2
    assert found.first is not None
    assert found.second is not None
    assert (found.first.name, found.second.name) == ("aten.tanh.default", "aten.sin.default")
    assert found.first.line == found.second.line
    assert "test_diagnose.py:" in found.first.line
    assert said == [str(found)]
    assert "2 operators are the same, then they part." in found.text
    for one, other in zip(before, model.blocks[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_operator_that_gives_other_values(fake_pg: Any, record: Any) -> None:
    model = causes.sharded(fake_pg(2))
    model.layers[0].mlp.noise = torch.ops.recompute_causes.race
    with record(model), pytest.raises(CheckpointError) as caught:
        causes.step(model)
    found = fsdptrace.diagnose(caught.value, lambda text: None)
    assert found.first is not None
    assert found.first.name == "recompute_causes.race.default"
    assert "recompute_causes.py:" in found.first.line
    assert "It gave other values, from the same operators before it." in found.text


def test_both_runs_agree(fake_pg: Any, record: Any) -> None:
    model = causes.sharded(fake_pg(2))
    with record(model), causes.overwritten(model.layers[0]), pytest.raises(CheckpointError) as caught:
        causes.step(model)
    found = fsdptrace.diagnose(caught.value, lambda text: None)
    assert found.position is None
    assert "operators are the same, and so are their results" in found.text


def test_a_unit_that_is_closed(fake_pg: Any, record: Any) -> None:
    calls: list[int] = []

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return self.lin(x).tanh() if len(calls) == 1 else self.lin(x)

    model, error = failing(fake_pg(2), record, run, lin=nn.Linear(8, 8))
    model.blocks[0].reshard()
    found = fsdptrace.diagnose(error, lambda text: None)
    assert "cannot be run again without a collective: blocks.0 is not gathered any more." in found.text
    assert len(calls) == 2


def test_a_collective_in_the_region(fake_pg: Any, record: Any) -> None:
    calls: list[int] = []

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        torch.distributed.all_reduce(torch.zeros(1))
        return self.lin(x).tanh() if len(calls) == 1 else self.lin(x)

    _, error = failing(fake_pg(2), record, run, lin=nn.Linear(8, 8))
    assert "stopped before a collective of the region's own (c10d.allreduce_" in fsdptrace.diagnose(error, len).text


def test_another_error(fake_pg: Any) -> None:
    with pytest.raises(ValueError, match="not about a region that was recorded"):
        fsdptrace.diagnose(KeyError())
