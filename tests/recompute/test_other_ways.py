"""Further ways for a recomputation to go another way, and what the note says of each; and units whose shards lie on the CPU."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_do_no_harm import same, train
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from support.experts import causes
from support.models import Block, Calls, Checkpointed
from support.programs import Program, loop
from support.torches import VALUES

NONE = (
    "none of what was recorded (gathered parameters, inputs, random number state, global state, state kept in modules and "
    "units used are the same): an operator that is not deterministic, or state that lies outside of the modules (a global "
    "variable, the environment, a generator of its own)."
)
IN_THE = " in the forward, {} in the recomputation."


@dataclasses.dataclass
class Way:
    """``forward`` of a block with ``parts``; what is done ``before`` and ``between`` forward and backward; the ``cause``."""

    forward: Callable[..., Any]
    cause: str
    parts: dict[str, Callable[[], nn.Module]] = dataclasses.field(default_factory=lambda: {"lin": lambda: nn.Linear(8, 8)})
    before: Callable[[Any], Any] = lambda block: None
    between: Callable[[Any], Any] = lambda block: None
    after: Callable[[], Any] = lambda: None


def tanh_if(condition: Callable[[Any], Any]) -> Callable[..., Any]:
    """A forward that saves one tensor more where ``condition(block)``."""
    return lambda self, x: self.lin(x).tanh() if condition(self) else self.lin(x)


class OfTheClass(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        OfTheClass.calls += 1
        return self.lin(x).tanh() if OfTheClass.calls % 2 else self.lin(x)


@dataclasses.dataclass(slots=True)
class Slots:
    count: int = 0


def count_in_slots(self: Any) -> bool:
    self.kept.count += 1
    return bool(self.kept.count == 1)


def lazily_cached(self: Any) -> bool:
    fresh = not hasattr(self, "mask")
    if fresh:
        self.mask = torch.ones(4)
    return fresh


def cached_by_key(self: Any) -> bool:
    fresh = "rope" not in self.cache
    self.cache["rope"] = torch.ones(4)
    return fresh


def in_layers(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = layer(x)
    return x


generator = torch.Generator()
THREADS = torch.get_num_threads
LONG = "a" * 300

WAYS = {
    "a layer fewer": Way(
        in_layers,
        "state kept in modules differs: modules of block.layers: 0: Linear, 1: Linear" + IN_THE.format("0: Linear"),
        {"layers": lambda: nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])},
        between=lambda block: block.layers.__delitem__(1),
    ),
    "another module": Way(
        lambda self, x: self.act(self.lin(x)),
        "state kept in modules differs: modules of block: lin: Linear, act: Tanh" + IN_THE.format("lin: Linear, act: Identity"),
        {"lin": lambda: nn.Linear(8, 8), "act": nn.Tanh},
        between=lambda block: setattr(block, "act", nn.Identity()),
    ),
    "another function": Way(
        lambda self, x: self.act(self.lin(x)),
        "state kept in modules differs: block.act: torch.nn.functional.softsign" + IN_THE.format("torch.nn.functional.tanh"),
        before=lambda block: setattr(block, "act", F.softsign),
        between=lambda block: setattr(block, "act", F.tanh),
    ),
    "a hook fewer": Way(
        lambda self, x: self.lin(x),
        "state kept in modules differs: forward hooks of block.lin: ",
        before=lambda block: setattr(block, "handle", block.lin.register_forward_hook(lambda module, args, out: out.tanh())),
        between=lambda block: block.handle.remove(),
    ),
    "dropout switched off": Way(
        lambda self, x: self.drop(self.lin(x)),
        "state kept in modules differs: block.drop.training: True" + IN_THE.format("False"),
        {"lin": lambda: nn.Linear(8, 8), "drop": lambda: nn.Dropout(0.5)},
        between=lambda block: block.drop.eval(),
    ),
    "frozen": Way(
        lambda self, x: self.lin(x),
        "state kept in modules differs: trainable parameters of block.lin: weight, bias" + IN_THE.format("none"),
        between=lambda block: block.lin.requires_grad_(False),
    ),
    "an attribute made in the forward": Way(
        tanh_if(lazily_cached), "state kept in modules differs: block.mask: not there" + IN_THE.format("float32 (4,)")
    ),
    "a cache by key": Way(
        tanh_if(cached_by_key),
        "state kept in modules differs: block.cache['rope']: not there" + IN_THE.format("float32 (4,)"),
        before=lambda block: setattr(block, "cache", {}),
    ),
    "a counter of the class": Way(
        lambda self, x: self.of(x),
        "state kept in modules differs: block.of.calls, of its class: 0" + IN_THE.format("1"),
        {"of": OfTheClass},
        before=lambda block: setattr(OfTheClass, "calls", 0),
    ),
    "a counter in slots": Way(
        tanh_if(count_in_slots),
        "state kept in modules differs: block.kept.count: 0" + IN_THE.format("1"),
        before=lambda block: setattr(block, "kept", Slots()),
    ),
    "the end of a long text": Way(
        tanh_if(lambda self: self.text == LONG),
        "state kept in modules differs: block.text: 'aaa",
        before=lambda block: setattr(block, "text", LONG),
        between=lambda block: setattr(block, "text", LONG + "b"),
    ),
    "statistics of a norm": Way(
        lambda self, x: self.norm(self.lin(x)).tanh() if self.norm.num_batches_tracked == 0 else self.norm(self.lin(x)),
        "state kept in modules differs: buffer block.norm.running_mean, float32 (8,): one value"
        + IN_THE.format("another")[:-1]
        + ";",
        {"lin": lambda: nn.Linear(8, 8), "norm": lambda: nn.BatchNorm1d(8)},
    ),
    "the default dtype": Way(
        tanh_if(lambda self: torch.get_default_dtype() == torch.float32),
        "global state differs: torch.get_default_dtype(): torch.float32" + IN_THE.format("torch.float64"),
        between=lambda block: torch.set_default_dtype(torch.float64),
        after=lambda: torch.set_default_dtype(torch.float32),
    ),
    "the number of threads": Way(
        tanh_if(lambda self: torch.get_num_threads() == 1),
        "global state differs: torch.get_num_threads(): 1" + IN_THE.format("2"),
        between=lambda block: torch.set_num_threads(2),
        after=lambda: torch.set_num_threads(1),
    ),
    "the environment": Way(
        tanh_if(lambda self: "SOME_SWITCH" not in os.environ),
        NONE,
        between=lambda block: os.environ.update(SOME_SWITCH="1"),
        after=lambda: os.environ.pop("SOME_SWITCH"),
    ),
    "a generator of nobody's": Way(
        tanh_if(lambda self: torch.rand((), generator=generator) < 0.6),  # 0.4963 and 0.7682 from seed 0
        NONE,
        before=lambda block: generator.manual_seed(0),
    ),
}


def note(mesh: Any, record: Any, way: Way, fingerprint: str) -> str:
    block = Calls(way.forward, **{name: make() for name, make in way.parts.items()})
    model = Calls(lambda self, x: checkpoint(self.block, x, use_reentrant=False), block=block)
    way.before(block)
    fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def go(mesh: Any, watch: Any) -> None:
        with watch(model):
            loss = model(torch.randn(4, 8)).sum()
            way.between(block)
            loss.backward()

    try:
        return causes.note_of(go, mesh, record, fingerprint=fingerprint)
    finally:
        way.after()


@pytest.mark.parametrize("name", WAYS)
def test_the_cause_is_named(fake_pg: Any, record: Any, name: str) -> None:
    said = note(fake_pg(2), record, WAYS[name], "params,inputs")
    assert f"Cause: {WAYS[name].cause}" in said
    assert "Also" not in said


def test_without_fingerprints_nothing_is_guessed(fake_pg: Any, record: Any) -> None:
    mesh = fake_pg(2)
    known = ("the default dtype", "the number of threads", "statistics of a norm")
    for name, way in WAYS.items():
        said = note(mesh, record, way, "")
        if name in known:
            assert "Cause: " in said
        else:
            assert "Cause unknown: global state and units used are the same, gathered parameters, inputs" in said, name


def test_what_is_too_much_to_take_is_not_called_the_same(fake_pg: Any, record: Any) -> None:
    way = dataclasses.replace(
        WAYS["the environment"], before=lambda block: setattr(block, "table", {str(i): i for i in range(5000)})
    )  # fmt: skip
    said = note(fake_pg(2), record, way, "params,inputs")
    assert (
        "Cause unknown: gathered parameters, inputs, random number state, global state and units used are the same, state "
        in said
    )
    assert "kept in modules were not recorded" in said


# -- shards on the CPU -------------------------------------------------------------------------------------------------
def offloaded(mesh: Any) -> Any:
    model = Checkpointed([Block() for _ in range(3)], use_reentrant=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return loop(fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)))


@VALUES
@pytest.mark.parametrize("fingerprint", ["params", "inputs", "all"])
def test_offloaded_units_are_left_as_they_are(fake_pg: Any, record: Any, fingerprint: str) -> None:
    program = Program("offloaded", offloaded)
    mesh = fake_pg(*program.shape)
    found: list[Any] = []

    def recorded(models: Any, **options: Any) -> Any:
        found.append(record(models, fingerprint=fingerprint, **{**options, "on_violation": "raise"}))
        return found[0]

    same(train(program, mesh, None), train(program, mesh, recorded))
    assert found[0].violations == []


def test_an_overwritten_copy_of_an_offloaded_unit(fake_pg: Any, record: Any) -> None:
    """Found at the end of the step where PyTorch lets it pass, and no other unit is named."""
    model = Checkpointed([Block() for _ in range(3)], use_reentrant=False)
    mesh = fake_pg(2)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, mesh=mesh)
    block = model.blocks[1]

    # After the pre-backward, which gathers, and before the recomputation.
    def write(module: Any, grad: Any) -> None:
        block.up.weight.data.zero_()

    handle = block.down.register_full_backward_pre_hook(write)
    with record(model, checks=None, on_violation="record", fingerprint="params") as rec:
        model(torch.randn(4, 8)).sum().backward()
    handle.remove()
    assert [(v.rule, v.fqn) for v in rec.violations] == [("recompute-values", "blocks.1")]
    assert "gathered parameters differ: blocks.1.up.weight (gathered by blocks.1), float32 (8, 8)." in rec.violations[0].message
