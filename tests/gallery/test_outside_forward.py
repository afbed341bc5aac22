"""Work past the forwards: what ``outside-forward`` says, on what it is silent, and that each of its hints helps.

Also what ``unpaired-unshard`` says when state-dict code fails while a unit is open.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as state_dicts
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint

from gallery.models import DIM, data, layers, linear, sgd, shard, steps
from gallery.verdict import verdict

MIXED = "got mixed torch.Tensor and DTensor"
IDS = torch.zeros(2, 3, dtype=torch.long)
NOTES = sys.version_info >= (3, 11)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).relu()


class Net(nn.Module):
    """``emb`` and ``head`` are 20 x 8 floats, 640 bytes, ``block`` and ``enc`` 256."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.block, self.enc = nn.Embedding(20, DIM), Encoder(), Encoder()
        self.head = nn.Linear(DIM, 20, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.enc(self.block(self.emb(ids))))

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return self.block(self.emb(ids))


class FeaturesInside(Net):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.block.features(self.emb(ids))


class Tied(nn.Module):
    """Reads the weight of a unit of its own from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.block = nn.Embedding(20, DIM), Encoder()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.block(self.emb(ids)), self.emb.weight)


def net(mesh: Any, kind: type[nn.Module] = Net) -> Any:
    model = kind()
    return shard(model, [model.block], mesh)


def fails(call: Callable[[], Any], match: str = MIXED) -> list[str]:
    """The notes on the error that ``call()`` must end with."""
    with pytest.raises(RuntimeError, match=match) as caught:
        call()
    return getattr(caught.value, "__notes__", [])


ROOT = 640 + 640 + 256
"""Bytes of the root's own: ``emb``, ``head`` and ``enc``."""


@pytest.mark.parametrize("trained", [False, True])
def test_a_method_of_the_root(fake_pg: Any, watch: Any, trained: bool) -> None:
    model = net(fake_pg(2))
    with watch(model, on_violation="raise") as rec:  # the error stays the program's own
        if trained:
            model(IDS).sum().backward()
        notes = fails(lambda: model.hidden(IDS))
    found = verdict(rec)
    found.reads("0 error outside-forward (root) 0")
    v = found.only()
    freed = f" (freed at event {v.evidence[0]})" if trained else ""
    assert len(v.evidence) == 1 + trained
    assert v.message == (
        f"hidden() of (root), which is no forward of it, used its parameters (event {v.seq}) while they were not gathered"
        f"{freed}; gathered they are {ROOT:,} B."
    )
    assert v.hint.startswith(
        'Once after fully_shard: register_fsdp_forward_method(model, "hidden"), from torch.distributed.fsdp'
    )
    if NOTES:
        assert notes == [
            f"fsdptrace: {v}",
            "fsdptrace: Net: no parameters are gathered (step 0). Found so far: outside-forward 1 time.",
        ]


def test_registered_it_is_a_forward(fake_pg: Any, watch: Any) -> None:
    model = net(fake_pg(2))
    register_fsdp_forward_method(model, "hidden")
    with watch(model, on_violation="raise") as rec:
        steps(model, 2, lambda: model.hidden(IDS).sum())
    verdict(rec).reads("")


def test_a_method_of_an_inner_unit_in_the_forward_of_the_root(fake_pg: Any, watch: Any) -> None:
    mesh = fake_pg(2)
    model = net(mesh, FeaturesInside)
    with watch(model) as rec:
        fails(lambda: model(IDS))
    found = verdict(rec)
    found.reads("0 error outside-forward block 0")
    assert 'register_fsdp_forward_method(block, "features")' in found.only().hint

    model = net(mesh, FeaturesInside)
    register_fsdp_forward_method(model.block, "features")
    with watch(model, on_violation="raise") as rec:
        steps(model, 1, lambda: model(IDS).sum())
    verdict(rec).reads("")


def test_forward_called_by_name(fake_pg: Any, watch: Any) -> None:
    model = net(fake_pg(2))
    with watch(model) as rec:
        fails(lambda: model.forward(IDS))
    found = verdict(rec)
    found.reads("0 error outside-forward (root) 0")
    assert found.only().hint == "Call model(...) and not model.forward(...): only the call gathers."


def test_a_part_by_itself(fake_pg: Any, watch: Any) -> None:
    mesh = fake_pg(2)
    model = net(mesh)
    with watch(model) as rec:
        fails(lambda: model.emb(IDS))
        fails(lambda: model.enc.features(data()))
    found = verdict(rec)
    found.reads("""
        0 error outside-forward (root) 0
        0 error outside-forward (root) 0
    """)
    one, other = found.violations
    assert one.message.startswith("emb, a part of (root), ran outside a forward of (root) and used its parameters")
    assert other.message.startswith("features() of enc, a part of (root), ran outside a forward of (root)")
    assert other.hint.endswith('fully_shard(enc) and register_fsdp_forward_method(enc, "features").')

    model = Net()
    shard(model, [model.block, model.enc], mesh)
    register_fsdp_forward_method(model.enc, "features")
    model(IDS).sum().backward()  # so that the root is the root
    with watch(model, on_violation="raise") as rec:
        model.enc.features(data()).sum().backward()
    verdict(rec).silent()


def test_a_weight_of_another_unit(fake_pg: Any, watch: Any) -> None:
    mesh = fake_pg(2)
    model: Any = Tied()
    shard(model, [model.emb, model.block], mesh)
    with watch(model) as rec:
        fails(lambda: model(IDS))
    found = verdict(rec)
    found.reads("0 error outside-forward emb 0")
    v = found.only()
    assert v.message == (
        f"forward() of (root) used parameters of emb (event {v.seq}), outside a forward of emb, while they were not gathered "
        f"(freed at event {v.evidence[0]}); gathered they are 640 B."
    )
    assert "emb.unshard() before and emb.reshard() after" in v.hint

    model = Tied()
    shard(model, [model.block], mesh)  # both in one unit, the root
    with watch(model, on_violation="raise") as rec:
        steps(model, 2, lambda: model(IDS).sum())
    verdict(rec).reads("")


def test_silent_on_what_is_about_something_else(fake_pg: Any, watch: Any) -> None:
    mesh = fake_pg(2)
    model = net(mesh)

    class Adafactor(torch.optim.Optimizer):
        def step(self) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                param.data.add_(torch.zeros(param.shape))

    def outer(self: Any) -> None:
        Adafactor(self.parameters(), {}).step()

    with watch(model) as rec:
        with torch.no_grad():  # in code of no module
            fails(lambda: model.head.weight.copy_(torch.zeros(20, DIM)))
            model.head.weight.copy_(
                distribute_tensor(torch.zeros(20, DIM), model.head.weight.device_mesh, [torch.distributed.tensor.Shard(0)])
            )
        fails(lambda: data() @ model.head.weight.t())
        fails(lambda: outer(model))
        fails(lambda: model.load_state_dict({name: torch.zeros(p.shape) for name, p in model.named_parameters()}))
        with pytest.raises((TypeError, AttributeError)):
            model.hidden(None)
    verdict(rec).silent()


def test_silent_where_the_unit_is_open(fake_pg: Any, watch: Any) -> None:
    model = net(fake_pg(2))
    with watch(model, on_violation="raise") as rec:
        with torch.no_grad():
            model(IDS)
        model.hidden(IDS)  # by accident: the root's default policy left it open
        model.reshard()
        model.unshard()
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            model.head(torch.ones(1, DIM + 1))  # an error of the user's, while all is gathered
        model.reshard()
    verdict(rec).silent()


def test_the_failing_recomputation_of_a_unit_is_for_other_rules(fake_pg: Any, watch: Any) -> None:
    model = layers(fake_pg(2))

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            raise RuntimeError(f"aten.mm.default: {MIXED}")

    with watch(model) as rec:
        y = checkpoint(lambda x: Breaks.apply(model(x)), data(grad=True), use_reentrant=False)
        fails(lambda: y.sum().backward())
    assert not verdict(rec).of("outside-forward")


def test_parts_are_watched_only_while_nothing_runs(fake_pg: Any, watch: Any) -> None:
    """In forwards a part has no hook of ours, nor where a backward runs one again; a backward that runs none leaves it. Nothing
    stays behind; a copy leaves the hook behind."""
    model = net(fake_pg(2))
    seen = []

    def look(*args: Any) -> None:
        seen.append(len(model.emb._forward_hooks))

    handle = model.block.register_forward_hook(look)
    with watch(model) as rec:
        assert len(model.emb._forward_hooks) == 1
        y = model(IDS)
        assert len(model.emb._forward_hooks) == 1
        y.register_hook(look)
        y.sum().backward()
        assert len(model.emb._forward_hooks) == 1
        (kept,) = copy.copy(model.emb._forward_hooks).values()
        assert pickle.loads(pickle.dumps(kept))(model.emb, (), None) is None
        assert type(pickle.loads(pickle.dumps(kept))) is not type(kept)
        assert seen == [0, 1]  # in the forward, and in the backward
        seen.clear()
        checkpoint(model, IDS, use_reentrant=False).sum().backward()
    assert seen == [0, 0]  # in the forward, and in its recomputation
    handle.remove()
    assert not model.emb._forward_hooks
    assert not model.emb._forward_hooks_always_called
    verdict(rec).silent()


# -- checkpoint_right_after_eval ---------------------------------------------------------------------------------------
def trained(mesh: Any) -> tuple[Any, Any]:
    """Three layers of 256 bytes, the last one the root's own."""
    model = nn.Sequential(linear(), linear(), linear())
    shard(model, list(model)[:2], mesh)
    optimizer = sgd(model)
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, 1, optimizer=optimizer)
    return model, optimizer


def test_an_optimizer_state_dict_right_after_eval(fake_pg: Any, watch: Any) -> None:
    mesh = fake_pg(2)
    model, optimizer = trained(mesh)
    with watch(model) as rec:
        with torch.no_grad():
            model(data())
        with pytest.raises(KeyError) as caught:
            state_dicts.get_optimizer_state_dict(model, optimizer)
    assert caught.value.args == (2,)  # as without us: the number of the root's parameter
    found = verdict(rec)
    found.reads("0 info unpaired-unshard (root) 256")
    v = found.only()
    assert v.message == (
        f"(root) was left gathered when state-dict code failed at event {v.seq} (256 B, opened at event {v.evidence[0]}): it "
        "stayed open after a forward without grad, the root's default policy. Its modules hold gathered copies, which no "
        "optimizer knows."
    )
    assert v.hint == "Call model.reshard() before state dicts of the model or the optimizer are taken or loaded."
    if NOTES:
        notes = caught.value.__notes__
        assert notes[0] == f"fsdptrace: {v}"
        assert notes[1] == "fsdptrace: Sequential: 256 B of parameters are gathered in 1 unit, most in (root) 256 B (step 0)."

    model, optimizer = trained(mesh)
    with watch(model, on_violation="raise") as rec:
        with torch.no_grad():
            model(data())
        model.reshard()
        assert len(state_dicts.get_optimizer_state_dict(model, optimizer)["state"]) == 3
    verdict(rec).reads("")


def test_opened_by_hand_and_saved(fake_pg: Any, watch: Any) -> None:
    model, optimizer = trained(fake_pg(2))
    with watch(model) as rec:
        model[1].unshard()
        with pytest.raises(KeyError):
            state_dicts.get_optimizer_state_dict(model, optimizer)
        model[1].reshard()
        unknown = {"state": {}, "param_groups": [{"params": ["nothing like it"]}]}
        with pytest.raises((KeyError, ValueError, RuntimeError)):  # nothing is open: nothing to say
            state_dicts.set_optimizer_state_dict(model, optimizer, unknown)
    found = verdict(rec)
    found.reads("0 info unpaired-unshard 1 256")
    assert "a call of unshard() opened it and nothing has freed it since" in found.only().message


def test_the_functions_are_put_back(fake_pg: Any, watch: Any) -> None:
    before = dict(vars(state_dicts))
    model, _ = trained(fake_pg(2))
    with watch(model):
        assert vars(state_dicts) != before
    assert vars(state_dicts) == before
