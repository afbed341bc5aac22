"""What exceptions say when closed parameters were used: PyTorch's further texts, exceptions raised while others are handled, in
groups, generators and tasks, and exceptions that cannot be asked; and that looking at one leaves nothing behind."""

from __future__ import annotations

import asyncio
import builtins
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor

from fsdptrace.adapters import reads
from gallery.models import data, layers, linear, shard
from gallery.test_exceptions import InBackward, notes, ordinary
from gallery.test_outside_forward import MIXED
from gallery.verdict import verdict
from support.models import Calls
from support.torches import since

Run = Callable[..., Any]


def two(mesh: Any, run: Run) -> Any:
    model = Calls(run, a=linear(), b=linear())
    return shard(model, [model.a, model.b], mesh)


@pytest.fixture(params=["columns", "lines"])
def known(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an instruction stands: its columns, or its line alone, as on Python 3.10."""
    if request.param == "lines":
        positions = reads._position
        monkeypatch.setattr(reads, "_position", lambda code, lasti: (positions(code, lasti)[0], None, None, None))


ON_SHARDS: dict[str, Run] = {
    "mixed, several lines": lambda self, x: torch.einsum(
        "bi,oi->bo",
        x,
        self.b.weight,
    ),
    "no strategy": lambda self, x: torch.cdist(self.b.weight, self.b.weight),
    "numpy": lambda self, x: self.b.weight.detach().numpy(),
    "numbers": lambda self, x: self.b.weight.detach().tolist(),
    "strides": lambda self, x: self.b.weight.as_strided((2, 2), (1, 1)),
    "values": lambda self, x: torch.allclose(self.b.weight, self.b.weight),
    "which": lambda self, x: self.b.weight[self.b.weight > 0],
    "the local part, added": lambda self, x: x + self.b.weight.to_local(),
    "the local part, multiplied": lambda self, x: x @ self.b.weight.to_local(),
    "the local part, in place": lambda self, x: torch.zeros(8, 8).copy_(self.b.weight._local_tensor),
}


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("name", ON_SHARDS)
def test_other_texts(fake_pg: Any, watch: Any, name: str) -> None:
    if name == "values":
        since(2, 9, "older ones compare shards")
    model = two(fake_pg(4), lambda self, x: ON_SHARDS[name](self, self.a(x)[:3]))
    with watch(model) as rec:
        said = notes(lambda: model(data()))
    (v,) = verdict(rec).of("outside-forward")
    assert v.fqn == "b"
    assert said[0] == f"fsdptrace: {v}"
    assert f"<lambda>() of (root) used parameters of b (event {v.seq}), outside a forward of b," in v.message


@pytest.mark.usefixtures("known")
def test_assigned_in_place(fake_pg: Any, watch: Any) -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x[0:4] = self.b.weight
        return x

    model = two(fake_pg(2), run)
    with watch(model) as rec:
        notes(lambda: model(data(8)))
    (v,) = verdict(rec).of("outside-forward")
    assert v.fqn == "b"


def smaller(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(5)


@pytest.mark.usefixtures("known")
def test_the_same_texts_of_something_else(fake_pg: Any, watch: Any) -> None:
    """Operators that fail on a DTensor of nobody's or on plain shapes, where closed weights stand beside."""
    mesh = fake_pg(2)
    own = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    runs: list[Run] = [
        lambda self, x: (self.a.weight, torch.cdist(own, own)),
        lambda self, x: own.tolist() if self.a.weight is not None else None,
        lambda self, x: (self.b.weight.to_local().shape, self.a(x) + torch.ones(5)),
        lambda self, x: smaller(self.a(x), self.b.weight.to_local()),
        lambda self, x: torch.ones(self.b.weight.shape[1], 3) @ self.a(x)[:1],
        lambda self, x: (self.b.weight.norm(), torch.cat([self.a(x), torch.ones(1, 3)])),
    ]
    for run in runs:
        model = two(mesh, run)
        with watch(model) as rec:
            assert ordinary(notes(lambda model=model: model(data())))  # type: ignore[misc]
        verdict(rec).silent()


# -- raised otherwise --------------------------------------------------------------------------------------------------
def while_handled(self: Any, x: torch.Tensor) -> Any:
    try:
        return F.linear(self.a(x), self.b.weight)
    except RuntimeError:
        raise ValueError("the last layer failed")  # noqa: B904


def in_a_group(self: Any, x: torch.Tensor) -> Any:
    try:
        return F.linear(self.a(x), self.b.weight)
    except RuntimeError as error:
        raise builtins.ExceptionGroup("some layers failed", [KeyError("another"), error])  # type: ignore[attr-defined,unused-ignore]  # noqa: B904


def parts(self: Any, x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield self.a(x)
    yield F.linear(x, self.b.weight)


def in_a_generator(self: Any, x: torch.Tensor) -> Any:
    return sum(parts(self, x))


async def both(self: Any, x: torch.Tensor) -> torch.Tensor:
    async def later() -> torch.Tensor:
        await asyncio.sleep(0)
        return F.linear(x, self.b.weight)

    return torch.stack(await asyncio.gather(later(), later()))


def in_a_task(self: Any, x: torch.Tensor) -> Any:
    return asyncio.run(both(self, self.a(x)))


def past_a_proxy(self: Any, x: torch.Tensor) -> Any:
    other = Proxy()
    return F.linear(self.a(x), self.b.weight) if other is not None else None


def past_a_subclass(self: Any, x: torch.Tensor) -> Any:
    odd = torch.ones(2).as_subclass(Refuses)
    return (odd, F.linear)[1](self.a(x), self.b.weight)


class Proxy:
    """As of a library that makes objects when they are first used."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("not bound")


class Refuses(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("not in here")


@pytest.mark.parametrize("run", [while_handled, in_a_group, in_a_generator, in_a_task, past_a_proxy, past_a_subclass])
def test_raised_otherwise(fake_pg: Any, watch: Any, run: Run) -> None:
    if run is in_a_group and not hasattr(builtins, "ExceptionGroup"):
        pytest.skip("Python 3.11")
    model = two(fake_pg(2), run)
    with watch(model) as rec:
        said = notes(lambda: model(data()), Exception)
    (v,) = verdict(rec).of("outside-forward")
    assert v.fqn == "b"
    assert said[0] == f"fsdptrace: {v}"


def test_from_none_is_an_error_of_its_own(fake_pg: Any, watch: Any) -> None:
    def run(self: Any, x: torch.Tensor) -> Any:
        try:
            return F.linear(self.a(x), self.b.weight)
        except RuntimeError:
            raise ValueError("not supported") from None

    model = two(fake_pg(2), run)
    with watch(model) as rec:
        assert ordinary(notes(lambda: model(data()), ValueError)) or not rec.violations
    verdict(rec).silent()


def test_read_by_the_program_itself(fake_pg: Any, watch: Any) -> None:
    """A loss in code of no module reads a closed weight, before any backward: no unit has lost its pre-backward."""
    model = layers(fake_pg(2))
    kept: list[Any] = []

    def train() -> None:
        with watch(model) as rec:
            kept.append(rec)
            hidden = model(data())
            F.linear(hidden, model[2].weight).sum().backward()

    assert ordinary(notes(train)) or len(kept[0].violations) == 0
    verdict(kept[0]).silent()


class Mute(Exception):
    def __str__(self) -> str:
        raise TypeError("has no text")


class NoNotes(Exception):
    @property
    def __notes__(self) -> Any:
        raise RuntimeError("has no notes")


@pytest.mark.parametrize("error", [Mute(), NoNotes()])
def test_exceptions_that_cannot_be_asked(fake_pg: Any, watch: Any, error: Exception) -> None:
    def run(self: Any, x: torch.Tensor) -> Any:
        raise error

    model = two(fake_pg(2), run)
    with watch(model) as rec, pytest.raises(type(error)):
        model(data())
    assert sum(event.kind == "exception" for event in rec.steps[-1].events) == 1
    verdict(rec).silent()


class Policy(nn.Module):
    """A model that calls another one, which is none of its parts."""

    def __init__(self, critic: nn.Module) -> None:
        super().__init__()
        self.lin = linear()
        self.__dict__["critic"] = critic

    def loss(self, x: torch.Tensor) -> Any:
        return self.critic(x)


def test_two_models(fake_pg: Any, watch: Any) -> None:
    """A method of a closed one calls the other, whose error that is."""
    mesh = fake_pg(2)
    critic = two(mesh, lambda self, x: F.linear(self.a(x), self.b.weight))
    policy = Policy(critic)
    shard(policy, [], mesh)

    def train() -> None:
        with watch([policy, critic]) as rec:
            kept.append(rec)
            policy.loss(data())

    kept: list[Any] = []
    said = notes(train)
    v = verdict(kept[0]).only()
    assert (v.rule, v.model, v.fqn) == ("outside-forward", 1, "b")
    assert sum("outside-forward: " in note for note in said) == 1


def test_nothing_is_kept_by_looking(fake_pg: Any, watch: Any) -> None:
    """Variables of the functions that still run live as long as without us: a batch, a loss with its graph."""
    mesh = fake_pg(2)
    own = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])

    def mixed() -> None:
        own @ torch.ones(8, 8)

    model = two(mesh, lambda self, x: self.b(InBackward.apply(self.a(x), mixed)))

    def loop() -> bool:
        batch = torch.ones(8)
        gone = weakref.ref(batch)
        with watch(model), pytest.raises(RuntimeError, match=MIXED):
            model(data(grad=True)).sum().backward()
        del batch
        gc.collect()
        return gone() is None

    def with_a_dictionary_of_them() -> bool:
        batch = torch.ones(8)
        kept = locals()
        with watch(model), pytest.raises(RuntimeError, match=MIXED):
            model(data(grad=True)).sum().backward()
        return kept["batch"] is batch

    assert loop()
    assert with_a_dictionary_of_them()
