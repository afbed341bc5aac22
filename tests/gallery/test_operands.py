"""Parameters used while they are closed, by code that is no module's: hooks, helpers, code in a backward. Whose they are is
read off the expression that failed, so that nothing else that the code names is blamed."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor

from gallery.models import data, layers, linear, shard, steps
from gallery.test_exceptions import InBackward, notes, ordinary
from gallery.test_outside_forward import MIXED
from gallery.verdict import verdict
from support.models import Calls


def multiply(module: Any, args: Any, out: Any = None) -> Any:
    """A hook that uses its module's weight."""
    return out @ module.weight if out is not None else (args[0] @ module.weight,)


def only(rec: Any) -> Any:
    """The one finding, of unit ``b`` or ``1``."""
    (v,) = verdict(rec).of("outside-forward")
    assert v.fqn in ("b", "1")
    return v


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_past_fsdps_own(fake_pg: Any, watch: Any, register: str) -> None:
    mesh = fake_pg(2)
    model = layers(mesh)
    getattr(model[1], register)(multiply, **({"prepend": True} if "pre" in register else {}))
    with watch(model, on_violation="raise") as rec:
        said = notes(lambda: model(data()))
    v = only(rec)
    assert said[0] == f"fsdptrace: {v}"
    line = multiply.__code__.co_firstlineno + 2
    assert v.message.startswith(
        f"a hook of 1 (multiply at test_operands.py, line {line}) used parameters of 1 (event {v.seq}),"
    )
    assert v.hint.startswith("Register it before fully_shard(1): ")

    model = nn.Sequential(*[linear() for _ in range(3)])  # as the hint says
    getattr(model[1], register)(multiply, **({"prepend": True} if "pre" in register else {}))
    shard(model, list(model), mesh)
    with watch(model, on_violation="raise") as rec:
        steps(model, 1)
    verdict(rec).silent()


def helper(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


def by_helper(self: Any, x: torch.Tensor) -> torch.Tensor:
    return helper(self.a(x), self.b.weight)


def by_closure(self: Any, x: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return y @ self.b.weight.t()

    return inner(self.a(x))


def by_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    weights = list(self.b.parameters())
    return self.a(x) @ weights[0].data


def by_another_name(self: Any, x: torch.Tensor) -> torch.Tensor:
    from_elsewhere = self.b.weight
    return F.linear(self.a(x), from_elsewhere)


def raised_from(self: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        return helper(self.a(x), self.b.weight)
    except RuntimeError as error:
        raise ValueError("the last layer failed") from error


@pytest.mark.parametrize("run", [by_helper, by_closure, by_list, by_another_name, raised_from])
def test_what_a_forward_reads_by_other_hands(fake_pg: Any, watch: Any, run: Callable[..., Any]) -> None:
    model = Calls(run, a=linear(), b=linear())
    shard(model, [model.a, model.b], fake_pg(2))
    with watch(model) as rec:
        said = notes(lambda: model(data()), ValueError if run is raised_from else RuntimeError)
    v = only(rec)
    assert said[0] == f"fsdptrace: {v}"
    assert (
        f"() of (root) used parameters of b (event {v.seq}), outside a forward of b, while they were not gathered;" in v.message
    )
    assert v.hint.startswith("Let b compute with them itself; or call b.unshard() before")


class OwnBackward(torch.autograd.Function):
    """Reads the weight of ``module`` in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Any) -> torch.Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ ctx.module.weight, None


@pytest.mark.parametrize("early", [True, False])
def test_code_in_a_backward(fake_pg: Any, watch: Any, early: bool) -> None:
    """Before the unit's own backward, or after it. No other unit is said to have lost its hook."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if early:
            return self.d(OwnBackward.apply(self.c(self.b(x)), self.b))
        x.register_hook(lambda grad: grad @ self.b.weight)
        return self.d(self.c(self.b(x)))

    model = Calls(run, a=linear(), b=linear(), c=linear(), d=linear())
    shard(model, [model.a, model.b, model.c, model.d], fake_pg(2))
    with watch(model) as rec:
        said = notes(lambda: model(data(grad=True)).sum().backward())
    v = verdict(rec).only()
    assert (v.rule, v.fqn) == ("outside-forward", "b")
    assert said[0] == f"fsdptrace: {v}"
    of = "OwnBackward." if sys.version_info >= (3, 11) else ""  # code objects know it since
    what = (
        of + "backward at test_operands.py, line {}, run in the backward before the pre-backward of b, which gathers it,"
        if early
        else "<lambda> at test_operands.py, line {}, run in the backward,"
    )
    line = OwnBackward.backward.__code__.co_firstlineno + 2 if early else run.__code__.co_firstlineno + 4
    assert v.message.startswith(f"{what.format(line)} used parameters of b (event {v.seq}), outside a forward of b,")


def test_freed_in_its_backward_and_read_by_a_hook(fake_pg: Any, watch: Any) -> None:
    """Freed too early is the cause; the read is how it shows."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        x.register_hook(lambda grad: grad @ self.lin.weight)
        return InBackward.apply(x, self.reshard)

    model = nn.Sequential(linear(), Calls(run, lin=linear()))
    shard(model, list(model), fake_pg(2))
    with watch(model) as rec:
        said = notes(lambda: model(data()).sum().backward())
    v = verdict(rec).only()
    assert (v.rule, v.fqn) == ("illegal-state", "1")
    assert "1 was freed in the middle of its backward: a call of reshard() freed it" in said[0]


def test_what_fails_by_itself_is_not_blamed_on_what_is_named_beside(fake_pg: Any, watch: Any) -> None:
    """Tensors of nobody's are mixed, while closed weights are named: of another model, for a shape, in another operand."""
    mesh = fake_pg(2)
    own = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    other = layers(mesh)
    runs = [
        lambda self, x: F.linear(self.b(self.a(x)), other[0].weight),
        lambda self, x: torch.mm(self.b(self.a(x)).view(-1, self.a.weight.shape[1]), own),
        lambda self, x: (self.a(x), self.a.weight, self.b(x) @ own),
    ]
    for run in runs:
        model = Calls(run, a=linear(), b=linear())
        shard(model, [model.a, model.b], mesh)
        with watch(model) as rec:
            assert ordinary(notes(lambda model=model: model(data())))  # type: ignore[misc]
        verdict(rec).silent()

    def mixed() -> None:
        own @ torch.ones(8, 8)

    model = Calls(lambda self, x: self.b(InBackward.apply(self.a(x), mixed)), a=linear(), b=linear())
    shard(model, [model.a, model.b], mesh)
    with watch(model) as rec, pytest.raises(RuntimeError, match=MIXED):
        model(data()).sum().backward()
    verdict(rec).silent()


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Odd(Exception):
    __notes__ = "a text"


def test_exceptions_that_take_no_note(fake_pg: Any, watch: Any) -> None:
    """They come out as they are, and recording goes on; one object may be raised again and again."""
    model = layers(fake_pg(2))
    again = ValueError("the same object")
    raising: list[BaseException] = [Frozen(3), Odd(), *[again] * 20]

    def fail(module: nn.Module, args: Any) -> None:
        if raising:
            raise raising.pop(0)

    handle = model[1].register_forward_pre_hook(fail)
    counts = []
    with watch(model) as rec:
        for error in list(raising):
            with pytest.raises(type(error)) as caught:
                model(data())
            assert caught.value is error
            if hasattr(model, "reset_iter_state"):
                model.reset_iter_state()
            rec.step()
            counts.append(sum(event.kind == "exception" for event in rec.steps[-1].events))
        handle.remove()
        steps(model, 1)
    assert counts == [1] * 22
    assert len(again.__notes__) == 12
    if hasattr(model, "reset_iter_state"):
        verdict(rec).silent()
