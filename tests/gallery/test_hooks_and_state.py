"""Cases on hooks and state: what goes wrong, what must be found, and the healthy variant beside it."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from gallery.models import DIM, data, linear, shard, steps
from gallery.verdict import verdict
from support.models import Block, Calls, Checkpointed
from support.torches import RELEASE, since

TWICE = since(2, 11, "older ones compute with freed parameters (pytorch PR #171779)")


# -- two_forwards_nested_ac --------------------------------------------------------------------------------------------
def nested(mesh: Any, both: bool = True, count: int = 2) -> nn.Module:
    """Checkpointed blocks with a unit ``up`` inside; ``both`` makes the block a unit as well."""
    model = Checkpointed([Block() for _ in range(count)], use_reentrant=False)
    for block in model.blocks:
        fully_shard(block.up, mesh=mesh)
        if both:
            fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@TWICE
@pytest.mark.parametrize("both", [False, True])
def test_two_forwards_nested(fake_pg: Any, watch: Any, both: bool) -> None:
    model = nested(fake_pg(2), both)
    with watch(model, on_violation="raise") as rec:
        steps(model, 2, lambda: (model(data()) * model(data())).sum())
    verdict(rec).reads("")


def test_two_forwards_nested_with_the_old_pre_forward(fake_pg: Any, watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Up to torch 2.10 a unit in PRE_BACKWARD did not look whether it was open when a recomputation ran it.
    repaired = FSDPState._pre_forward

    def old(self: Any, module: Any, args: Any, kwargs: Any) -> Any:
        if self._training_state == TrainingState.PRE_BACKWARD:
            return args, kwargs
        return repaired(self, module, args, kwargs)

    monkeypatch.setattr(FSDPState, "_pre_forward", old)
    model = nested(fake_pg(2))
    with watch(model) as rec, pytest.raises(RuntimeError, match=r"DTensor|storage of size 0"):
        (model(data()) * model(data())).sum().backward()
    # The second forward's backward comes first and frees blocks.1.up after its recomputation. The first forward's block 1 is
    # then recomputed with `up` still in PRE_BACKWARD, hence closed.
    found = verdict(rec)
    found.reads("0 error illegal-state blocks.1.up 0")
    v = found.only()
    assert v.message.startswith(f"the recomputation of blocks.1.up computes at event {v.evidence[1]} while its parameters")
    assert "2.11" in v.hint


# -- view_output_inplace -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clone", [False, True])
def test_view_output_inplace(fake_pg: Any, watch: Any, clone: bool) -> None:
    def inner(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.a(x).relu()).view(-1, 2, 4)
        return y.clone() if clone else y

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        y += 1.0
        return y

    model = Calls(run, inner=Calls(inner, a=linear(), b=linear()))
    shard(model, [model.inner], fake_pg(2), reshard_after_forward=True)
    with watch(model) as rec, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model(data())
        if clone:
            out.sum().backward()
        else:
            with pytest.raises(RuntimeError, match="storage of size 0"):
                out.sum().backward()
    found = verdict(rec)
    if clone:
        found.reads("")
        return
    # The unit's two weights: 512 bytes.
    found.reads("0 error lost-pre-backward inner 512")
    v = found.only()
    freed, failed = v.evidence
    assert v.message == (
        f"the backward failed at event {failed} on parameters that are not gathered: inner ran with grad, was freed at event "
        f"{freed}, and its pre-backward, which gathers it again, never ran."
    )
    assert "out.clone()" in v.hint


# -- non_forward_method ------------------------------------------------------------------------------------------------
def language_model(mesh: Any) -> Any:
    """Root with an embedding and a head, 20 x 8 floats each, around a unit ``block``."""
    model = Calls(
        lambda self, ids: self.head(self.block(self.emb(ids))),
        emb=nn.Embedding(20, DIM), block=linear(), head=nn.Linear(DIM, 20, bias=False),
    )  # fmt: skip
    type(model).hidden = lambda self, ids: self.block(self.emb(ids))  # type: ignore[attr-defined]
    return shard(model, [model.block], mesh)


@pytest.fixture
def lm(fake_pg: Any) -> Any:
    yield language_model(fake_pg(2))
    del Calls.hidden  # type: ignore[attr-defined]


IDS = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize("trained", [False, True])
def test_a_method_that_is_no_forward(lm: Any, watch: Any, trained: bool) -> None:
    # Variants A and B.
    with watch(lm) as rec:
        if trained:
            lm(IDS).sum().backward()
        with pytest.raises(RuntimeError, match="DTensor"):
            lm.hidden(IDS)
    verdict(rec).reads("0 error outside-forward (root) 0")


def test_a_method_while_the_root_is_open(lm: Any, watch: Any) -> None:
    # Variant C works by accident: the root's default policy left it open after the eval pass, which is all there is to say.
    with watch(lm, on_violation="raise") as rec:
        with torch.no_grad():
            lm(IDS)
        lm.hidden(IDS)
    verdict(rec).silent()


def test_a_weight_read_outside(lm: Any, watch: Any) -> None:
    # Variant D: caught by the program itself.
    with watch(lm) as rec, pytest.raises(RuntimeError, match="DTensor"):
        data() @ lm.head.weight.t()
    verdict(rec).reads("")


def test_a_registered_forward_method(lm: Any, watch: Any) -> None:
    register_fsdp_forward_method(lm, "hidden")
    with watch(lm, on_violation="raise") as rec:
        steps(lm, 2, lambda: lm.hidden(IDS).sum())
    verdict(rec).reads("")


def test_a_unit_runs_before_the_root(lm: Any, watch: Any) -> None:
    with watch(lm) as rec:
        lm.block(data())
        with pytest.raises(RuntimeError, match="already been lazily initialized"):
            lm(IDS)
    found = verdict(rec)
    found.reads("0 warning wrong-root block 0")
    v = found.only()
    assert v.message.startswith(f"block ran first (event {v.evidence[0]}) and is the root now")
    assert "register_fsdp_forward_method" in v.hint


# -- loss_not_from_output ----------------------------------------------------------------------------------------------
class Box:
    def __init__(self, h: torch.Tensor) -> None:
        self.h = h


@dataclasses.dataclass
class Data:
    h: torch.Tensor


HIDDEN: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], torch.Tensor]]] = {
    # kind: (how the unit returns h, how the loss gets at it)
    "tensor": (lambda h: h, lambda unit, out: out),
    "dict": (lambda h: {"h": h}, lambda unit, out: out["h"]),
    "dataclass": (Data, lambda unit, out: out.h),
    "object": (Box, lambda unit, out: out.h),
    "set": (lambda h: {h}, lambda unit, out: next(iter(out))),
    "cached": (lambda h: h.detach(), lambda unit, out: unit.cache),
}


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("kind", HIDDEN)
def test_loss_not_from_output(fake_pg: Any, watch: Any, kind: str, reshard_after_forward: bool) -> None:
    give, take = HIDDEN[kind]

    def unit(self: Any, x: torch.Tensor) -> Any:
        h = self.b(self.a(x).relu())
        self.cache = h
        return give(h)

    model = nn.Sequential(linear(), Calls(unit, a=linear(), b=linear()))
    shard(model, list(model), fake_pg(2), reshard_after_forward=reshard_after_forward)
    unseen = ("object", "set", "cached") if RELEASE >= (2, 12) else ("object", "set", "cached", "dataclass")
    fails = reshard_after_forward and kind in unseen
    with watch(model) as rec:
        out = model(data())
        loss = take(model[1], out).sum()
        if fails:
            with pytest.raises(RuntimeError, match="storage of size 0"):
                loss.backward()
        else:
            loss.backward()
    # The second unit's two weights: 512 bytes.
    verdict(rec).reads("0 error lost-pre-backward 1 512" if fails else "")


# -- selective_ac_around_units -----------------------------------------------------------------------------------------
def _save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    save = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def _save_all_but_relu(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    again = op is torch.ops.aten.relu.default
    return CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.PREFER_SAVE


def _second_dim(param: nn.Parameter) -> Shard:
    return Shard(1) if param.ndim > 1 else Shard(0)


def selective(mesh: Any, policy: Any, dim: int, where: str) -> nn.Module:
    how = functools.partial(create_selective_checkpoint_contexts, policy)
    model = Checkpointed([Block() for _ in range(2)], use_reentrant=False, context_fn=how)
    options: dict[str, Any] = {"shard_placement_fn": _second_dim} if dim else {}
    if where == "in flight":
        options["reshard_after_forward"] = False
    for block in model.blocks:
        if where == "in flight":
            fully_shard(block.up, mesh=mesh, **options)
            continue
        fully_shard(block.down, mesh=mesh, **options)
        if where == "nested":
            fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def outcome(model: Any, where: str) -> str:
    """What the run says of itself: nothing, or its error."""
    try:
        if where == "in flight":
            first, second = (model(data(grad=True)) for _ in range(2))
            model.set_is_last_backward(False)
            first.sum().backward()
            model.set_is_last_backward(True)
            second.sum().backward()
        else:
            model(data(grad=True)).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize("where", ["inside", "nested", "in flight"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("policy", [_save_products, _save_all_but_relu])
def test_selective_checkpointing_around_units(fake_pg: Any, watch: Any, policy: Any, dim: int, where: str) -> None:
    mesh = fake_pg(2)
    alone = outcome(selective(mesh, policy, dim, where), where)
    model = selective(mesh, policy, dim, where)
    with watch(model) as rec:
        traced = outcome(model, where)
    assert traced == alone
    found = verdict(rec)
    if not alone.startswith("CheckpointError"):
        found.silent()
        return
    # Two forwards in flight: the first gathers its unit, its recomputation finds it open, and selective checkpointing takes the
    # copy-out's operators, which it had counted, for those of the block (torch 2.13): a CheckpointError. We say why.
    (violation,) = (v for v in found.violations if v.severity != "info")
    assert (violation.rule, violation.fqn) == ("saved-tensor-metadata", "")
    assert "gathers inside the region differ: blocks.1.up in the forward, none in the recomputation" in violation.message
