"""Notes on exceptions: units that are closed, half done or freed are named, with the event that brought them there and the
rule; where a unit is as it should be, nothing is said of it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from gallery.models import data, layers, linear, sgd, shard
from gallery.test_outside_forward import MIXED
from gallery.verdict import verdict
from support.models import Calls
from support.torches import since

NOTES = sys.version_info >= (3, 11)
RESET = hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state")


class Block(nn.Module):
    """256 bytes; ``then`` is called with it before it computes, ``fail`` is an error that it raises once it has, and what is
    ``behind`` is called in the backward, when its own backward is to begin."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear()
        self.fail: BaseException | None = None
        self.then: Callable[[nn.Module], None] | None = None
        self.behind: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.then is not None:
            self.then(self)
        x = self.lin(x)
        if self.fail is not None:
            raise self.fail
        return x if self.behind is None else InBackward.apply(x, self.behind)

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class InBackward(torch.autograd.Function):
    """Calls something in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.call()
        return grad, None


def blocks(mesh: Any, count: int = 3) -> Any:
    model = nn.Sequential(*[Block() for _ in range(count)])
    return shard(model, list(model), mesh)


def notes(call: Callable[[], Any], kind: type[BaseException] = RuntimeError) -> list[str]:
    """The notes on the error that ``call()`` must end with; they survive the way to another process."""
    with pytest.raises(kind) as caught:
        call()
    found: list[str] = getattr(caught.value, "__notes__", [])
    assert pickle.loads(pickle.dumps(caught.value)).__notes__ == found
    return found


def ordinary(found: list[str]) -> bool:
    """Whether nothing is said but what is gathered (and that it came out of a recomputation)."""
    return bool(found) and all("are gathered" in note or "came out of the recomputation" in note for note in found)


def test_freed_in_its_own_forward(fake_pg: Any, watch: Any) -> None:
    model = blocks(fake_pg(2))
    with watch(model, on_violation="raise") as rec:  # the error stays the program's own
        model[1].then = lambda module: module.reshard()
        first, _ = notes(lambda: model(data()))
    found = verdict(rec)
    v = found.only()
    freed, failed = v.evidence
    found.reads("0 error illegal-state 1 256")
    assert v.message == (
        f"1 was freed in the middle of its own forward: a call of reshard() freed it at event {freed} (step 0), and what used "
        f"its parameters after that failed at event {failed}; gathered they are 256 B."
    )
    assert first == f"fsdptrace: {v}"


def test_freed_in_its_backward(fake_pg: Any, watch: Any) -> None:
    """The last unit's, while the others wait for theirs: none of those lost a hook."""
    model = blocks(fake_pg(2))
    with watch(model) as rec:
        model[2].behind = model[2].reshard
        said = notes(lambda: model(data()).sum().backward())
    found = verdict(rec)
    found.reads("0 error illegal-state 2 256")
    assert said[0].startswith(
        "fsdptrace: illegal-state: 2 was freed in the middle of its backward: a call of reshard() freed it"
    )


def test_not_gathered_for_its_backward(fake_pg: Any, watch: Any) -> None:
    model = blocks(fake_pg(2))
    model[2].set_unshard_in_backward(False)
    with watch(model) as rec:
        said = notes(lambda: model(data()).sum().backward())
    found = verdict(rec)
    found.reads("0 error illegal-state 2 256")
    assert "2 was not gathered for its backward, since set_unshard_in_backward(False) was called on it" in said[0]
    assert "2.set_unshard_in_backward(True)" in said[0]


def test_freed_in_its_recomputation(fake_pg: Any, watch: Any) -> None:
    twice = Calls(lambda self, x: self.b(self.a(x)), a=Block(), b=linear())
    model = Calls(lambda self, x: checkpoint(self.b, self.a(x), use_reentrant=False), a=linear(), b=twice)
    shard(model, [model.a, model.b], fake_pg(2))
    with watch(model) as rec:
        y = model(data())
        twice.a.then = lambda module: model.b.reshard()
        said = notes(lambda: y.sum().backward())
    found = verdict(rec)
    found.reads("0 error illegal-state b 512")
    assert "b was freed in the middle of its recomputation: a call of reshard() freed it at event" in said[0]


def test_an_earlier_exception_left_units_half_done(fake_pg: Any, watch: Any) -> None:
    """The first error is an ordinary one. An optimizer steps, and the next step fails on what it left."""
    mesh = fake_pg(2)
    model = nn.Sequential(nn.Sequential(Block(), Block()), Block())
    shard(model, [model[0][0], model[0][1], model[0]], mesh)  # 0 has no parameters, model[1] is the root's own
    optimizer = sgd(model)
    with watch(model) as rec:
        model(data()).sum().backward()
        model[0][1].fail = ValueError("a bad batch")
        assert ordinary(notes(lambda: model(data()), ValueError))
        optimizer.step()
        model[0][1].fail = KeyError("another")
        half, _ = notes(lambda: model(data()), KeyError)
        if RESET:
            model.reset_iter_state()
            model[0][1].fail = IndexError("a third")
            assert ordinary(notes(lambda: model(data()), IndexError))
    group = next(info.id for info in rec.model_map().groups if info.fqn == "0.1")
    opened = next(e for e in reversed(rec.steps[0].events) if e.kind == "unshard" and e.group == group and e.data["bytes"])
    failed = next(e for e in rec.steps[0].events if e.kind == "exception")
    changed = next(e for e in rec.steps[0].events if e.kind == "param_change" and e.group == group)
    assert half.splitlines()[0] == (
        f"fsdptrace: this pass began on units that a ValueError (event {failed.seq}, step 0) had left half done: 0.1 in "
        f"forward, its post-forward never ran; it is open since event {opened.seq} (step 0), gathered by its own hook, 256 B, "
        f"older than its parameters (optimizer step, event {changed.seq}); likewise (root). Rule unclean-start."
    )
    assert {violation.rule for violation in verdict(rec).violations} == {"unclean-start"}


def test_a_failed_backward_left_units_half_done(fake_pg: Any, watch: Any) -> None:
    model = blocks(fake_pg(2))

    def fail() -> None:
        raise ValueError("in the backward")

    with watch(model) as rec:
        model[1].behind = fail
        assert ordinary(notes(lambda: model(data()).sum().backward(), ValueError))
        model[1].behind = None
        model[0].fail = KeyError("in the next forward")
        half = notes(lambda: model(data()), KeyError)[0]
    assert "a ValueError (event" in half
    assert "had left half done: 1 in pre_backward, its post-backward never ran" in half
    assert "unclean-start" in {violation.rule for violation in verdict(rec).violations}


def test_a_clean_pass_between_makes_it_clean(fake_pg: Any, watch: Any) -> None:
    model = blocks(fake_pg(2))
    with watch(model):
        model[1].fail = ValueError("a bad batch")
        assert ordinary(notes(lambda: model(data()), ValueError))
        model[1].fail = None
        model(data()).sum().backward()
        model[1].fail = KeyError("an ordinary one")
        assert ordinary(notes(lambda: model(data()), KeyError))


@pytest.mark.parametrize("again", [False, True])
def test_registered_methods(fake_pg: Any, watch: Any, again: bool) -> None:
    """No hook of a module runs when one fails: it is recorded all the same, and the steps go on."""
    model: Any = Block()
    shard(model, [], fake_pg(2))
    model.hidden = lambda x: model.lin(x) if model.fail is None else model.lin(x)[99]
    register_fsdp_forward_method(model, "hidden")
    before = vars(model)["hidden"]
    with watch(model) as rec:
        assert vars(model)["hidden"].__self__ is model
        model.hidden(data()).sum().backward()
        rec.step()
        model.fail = ValueError()
        assert ordinary(notes(lambda: model.hidden(data()), IndexError))
        rec.step()
        if again:
            half = notes(lambda: model.hidden(data()), IndexError)[0]
            assert "that an IndexError (event" in half
            assert "left half done: (root) in forward, its post-forward never ran" in half
        elif RESET:
            model.reset_iter_state()
            model.fail = None
            model.hidden(data()).sum().backward()
            assert [event.kind for event in rec.events].count("forward") == 1
    assert vars(model)["hidden"] == before
    counts = [[event.kind for event in step.events].count("forward") for step in rec.steps]
    assert counts[:2] == [1, 1]
    assert [v.rule for v in verdict(rec).violations] == (["unclean-start"] if again else [])


@since(2, 13, "reset_iter_state is new in it")
@pytest.mark.parametrize("unit", [0, 1])
def test_steps_go_on_after_an_interrupt(fake_pg: Any, watch: Any, unit: int) -> None:
    """No hook of a module runs on a KeyboardInterrupt, which a program may catch (a notebook does): in the second of four
    batches."""
    model = blocks(fake_pg(2))
    optimizer = sgd(model)
    with watch(model) as rec:
        for number in range(4):
            model[unit].fail = KeyboardInterrupt() if number == 1 else None
            try:
                model(data()).sum().backward()
                optimizer.step()
            except KeyboardInterrupt:
                model.reset_iter_state()
            optimizer.zero_grad()
    kinds = [[event.kind for event in step.events] for step in rec.steps]
    assert [(step.count("forward"), step.count("backward")) for step in kinds] == [(1, 1)] * 3
    verdict(rec).silent()


def test_early_stop_in_a_registered_method(fake_pg: Any, watch: Any) -> None:
    """PyTorch ends a recomputation by an exception, which is none of the program's."""
    model = Calls(lambda self, x: checkpoint(self.b.other, self.a(x), use_reentrant=False).relu(), a=linear(), b=Block())
    register_fsdp_forward_method(shard(model.b, [], mesh := fake_pg(2)), "other")
    shard(model, [model.a], mesh)
    with watch(model, on_violation="raise") as rec:
        for _ in range(2):
            model(data()).sum().backward()
            rec.step()
    verdict(rec).silent()
    assert not any(event.kind == "exception" for step in rec.steps for event in step.events)


def test_a_gather_that_nobody_waited_for(fake_pg: Any, watch: Any) -> None:
    model = blocks(fake_pg(2))
    with watch(model) as rec:
        model(data()).sum().backward()
        handle = model[0].unshard(async_op=True)
        said = notes(lambda: Block.forward(model[0], data()))[0]
        handle.wait()
        Block.forward(model[0], data())
        model[0].reshard()
    (v,) = verdict(rec).of("outside-forward")
    assert said == f"fsdptrace: {v}"
    issued = v.evidence[0]
    assert f"(a gather is pending: a call of unshard(async_op=True) issued it at event {issued}, and nobody has" in v.message
    assert v.hint.startswith("Call wait() on what unshard(async_op=True) returns")


@since(2, 7, "older releases say nothing of freed storage on the CPU")
def test_a_copy_that_was_kept(fake_pg: Any, watch: Any) -> None:
    """Not named in the code that uses it: known by its storage."""
    kept: list[torch.Tensor] = []

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        (weight,) = kept
        return x @ weight

    model = Calls(run, a=linear())
    shard(model, [model.a], fake_pg(2))
    model.a.register_forward_pre_hook(lambda module, args: kept.append(module.weight))
    with watch(model) as rec:
        said = notes(lambda: model(data()))[0]
    v = verdict(rec).only()
    assert (v.rule, v.fqn) == ("outside-forward", "a")
    assert said == f"fsdptrace: {v}"
    assert f"used parameters of a (event {v.seq}), outside a forward of a, while they were not gathered (freed at" in v.message


def test_ordinary_errors_are_not_explained(fake_pg: Any, watch: Any) -> None:
    """Errors of the user's where all units are as they should be: in a forward, a recomputation, a backward, and that of a
    unit which legally is not gathered; and one about freed storage that is not the model's."""
    mesh = fake_pg(2)
    last = Calls(lambda self, x: self.b(self.a(x)), a=Block(), b=linear())
    nested = Calls(lambda self, x: checkpoint(self.b, self.a(x), use_reentrant=False), a=linear(), b=last)
    shard(nested, [nested.a, nested.b], mesh)
    flat = layers(mesh)
    with watch([nested, flat]) as rec:
        y = nested(data())
        last.a.fail = ValueError("in the recomputation")
        assert ordinary(notes(lambda: y.sum().backward(), ValueError))
        flat(data()).sum().backward()
        with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
            flat(torch.ones(1, 9))
        assert ordinary(caught.value.__notes__)
        if RESET:
            flat.reset_iter_state()
        foreign = torch.ones(4, 4)
        foreign.untyped_storage().resize_(0)
        flat[1].register_forward_hook(lambda module, args, out: foreign @ foreign)
        assert ordinary(notes(lambda: flat(data())))
    verdict(rec).silent()


def test_mixed_inside_an_open_unit(fake_pg: Any, watch: Any) -> None:
    """A DTensor of the user's among plain tensors: the text is that of a closed unit, the unit is open."""
    model = blocks(fake_pg(2))

    def fail(module: nn.Module) -> None:
        raise RuntimeError(f"aten.mm.default: {MIXED}")

    model[1].then = fail
    with watch(model) as rec:
        assert ordinary(notes(lambda: model(data())))
    verdict(rec).silent()
