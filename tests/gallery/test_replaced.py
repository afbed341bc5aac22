"""Optimizers that hold what the model no longer has: parameters of before ``fully_shard``, shards that were replaced since."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from gallery.models import data, layers, linear, sgd, shard, steps
from gallery.verdict import verdict
from support.torches import since

MARKED = since(2, 13, "older ones leave no mark on the parameter that they replace")


def plain(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*[linear() for _ in range(count)])


def values(model: nn.Module) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@MARKED
def test_built_before_fully_shard(fake_pg: Any, watch: Any) -> None:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    shard(model, list(model), fake_pg(2))
    before = values(model).values()
    with watch(model) as rec:
        steps(model, 2, optimizer=optimizer)
    found = verdict(rec)
    found.reads("0 error optimizer-owns-temporary (model) 768")
    v = found.only()
    assert v.message == (
        "AdamW#1 was built before fully_shard: it holds 3 parameters that fully_shard replaced by shards (0.weight, 1.weight, "
        f"2.weight; event {v.seq}). It steps tensors that nothing uses, and the shards never learn."
    )
    assert v.hint == "Build the optimizer after fully_shard: torch.optim.AdamW(model.parameters(), ...)."
    assert all(torch.equal(old.to_local(), new.to_local()) for old, new in zip(before, values(model).values(), strict=True))


@MARKED
def test_one_parameter_group_of_before(fake_pg: Any, watch: Any) -> None:
    """The head's group was collected first, the others' afterwards."""
    model = plain()
    early = [{"params": list(model[2].parameters()), "lr": 0.01}]
    shard(model, list(model), fake_pg(2))
    optimizer = torch.optim.SGD([*early, {"params": list(model[:2].parameters())}], lr=0.1)
    with watch(model) as rec:
        steps(model, 1, optimizer=optimizer)
    v = verdict(rec).only()
    assert (v.rule, v.bytes) == ("optimizer-owns-temporary", 256)
    assert "it holds 1 parameter that fully_shard replaced by shards (2.weight; event" in v.message


@pytest.mark.parametrize("stepped", [False, True])
def test_shards_replaced_by_a_load(fake_pg: Any, watch: Any, stepped: bool) -> None:
    model = layers(fake_pg(2))
    optimizer = sgd(model)
    with watch(model) as rec:
        if stepped:
            steps(model, 1, optimizer=optimizer)
        model.load_state_dict(values(model), assign=True)
        steps(model, 1, optimizer=optimizer)
    found = verdict(rec)
    found.reads(f"{int(stepped)} error optimizer-owns-temporary (model) 768")
    v = found.only()
    assert v.message.startswith(
        f"SGD#1 holds 3 shards that were replaced since (0.weight, 1.weight, 2.weight; event {v.seq}), as "
    )
    assert "assign=False" in v.hint


def loaded_first(mesh: Any) -> Any:
    model = layers(mesh)
    model.load_state_dict(values(model), assign=True)
    return model, sgd(model), lambda: None


def loaded_in_place(mesh: Any) -> Any:
    model = layers(mesh)
    return model, sgd(model), lambda: set_model_state_dict(model, get_model_state_dict(model))


def cast_and_back(mesh: Any) -> Any:
    # Module.to() exchanges what the shards are; they stay the same objects.
    model = layers(mesh)
    return model, sgd(model), lambda: model.to(torch.float64).to(torch.float32)


def a_copy_of_before(mesh: Any) -> Any:
    # A copy that trains unsharded beside it.
    model = plain()
    twin = copy.deepcopy(model)
    optimizers = [sgd(twin), sgd(shard(model, list(model), mesh))]

    def between() -> None:
        twin(data()).sum().backward()
        optimizers[0].step()

    return model, optimizers[1], between


def an_optimizer_made_anew(mesh: Any) -> Any:
    # As scripts for several stages do: what was built before fully_shard is thrown away.
    model = plain()
    sgd(model)
    return shard(model, list(model), mesh), sgd(model), lambda: None


@pytest.mark.parametrize("build", [loaded_first, loaded_in_place, cast_and_back, a_copy_of_before, an_optimizer_made_anew])
def test_silent(fake_pg: Any, watch: Any, build: Callable[[Any], Any]) -> None:
    model, optimizer, between = build(fake_pg(2))
    with watch(model, on_violation="raise") as rec:
        for _ in range(2):
            steps(model, 1, optimizer=optimizer)
            between()
    verdict(rec).silent()


@MARKED
def test_silent_for_one_that_is_used_elsewhere(fake_pg: Any, watch: Any) -> None:
    """A tie that fully_shard cut: the other module keeps the parameter, and trains it with an optimizer of its own."""
    model, other = plain(), linear()
    other.weight = model[0].weight
    optimizers = [sgd(other), sgd(shard(model, list(model), fake_pg(2)))]
    with watch(model, on_violation="raise") as rec:
        for _ in range(2):
            other(data()).sum().backward()
            optimizers[0].step()
            steps(model, 1, optimizer=optimizers[1])
    verdict(rec).silent()
