"""``fsdptrace.testing.expect``: what it counts, what it says when something differs, and that it leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from fsdptrace.files import find_files
from fsdptrace.testing import expect
from support.models import Block, Calls, Checkpointed, sharded_chain, train

MakeMesh = Callable[..., Any]


def test_a_chain_does_what_is_expected(fake_pg: MakeMesh) -> None:
    """Three units: a gather in the forward and one in the backward each, one reduction each. The root has no parameters,
    and so is no unit that collectives speak of."""
    model = sharded_chain(fake_pg(2))
    with expect(model, gathers={"*": 2}, reductions={"*": 1}):
        train(model)
    with expect(model, gathers=6, reductions=3) as rec:
        train(model)
    assert rec.counts()["forward"] == 1
    with expect(model, gathers=3, reductions=0), torch.no_grad():
        model(torch.ones(2, 8))


def test_what_differs_is_named(fake_pg: MakeMesh) -> None:
    """Two micro-batches, of which the first reduces nothing in layer 1: it has 4 gathers as the others, and 1 reduction."""
    model = sharded_chain(fake_pg(2))

    def two_micro_batches() -> None:
        model[1].set_requires_gradient_sync(False)
        train(model)
        model[1].set_requires_gradient_sync(True)
        train(model)

    with pytest.raises(AssertionError) as caught, expect(model, gathers={"**": 2}, reductions={"1": 2, "*": 1}):
        two_micro_batches()
    assert str(caught.value).splitlines() == [
        "Sequential does not do what is expected of it:",
        "  gathers of 0: 4, not 2 (2 forward, 2 backward)",
        "  gathers of 1: 4, not 2 (2 forward, 2 backward)",
        "  gathers of 2: 4, not 2 (2 forward, 2 backward)",
        "  reductions of 1: 1, not 2 (1 reduce_scatter)",
        "  reductions of 0: 2, not 1 (2 reduce_scatter)",
        "  reductions of 2: 2, not 1 (2 reduce_scatter)",
    ]


def test_violations_fail_it(fake_pg: MakeMesh) -> None:
    """A unit that is left gathered while the optimizer steps: one gather and one error. Where that is expected it is fine."""
    model = sharded_chain(fake_pg(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        train(model)
        model[2].unshard()
        optimizer.step()
        model[2].reshard()

    with pytest.raises(AssertionError) as caught, expect(model, gathers=6):
        step()
    first, second, third, *_ = str(caught.value).splitlines()[1:]
    assert first == "  gathers: 7, not 6: 0 2, 1 2, 2 3"
    assert second == "  violations: 1, not 0"
    assert third.startswith("    unpaired-unshard: 2 was still open when the optimizer stepped")
    with expect(model, gathers=7, violations=1):
        step()
    with expect(model, gathers=7, violations=None):
        step()


def test_patterns(fake_pg: MakeMesh) -> None:
    """``*`` is one part of a name, ``**`` any number, the first that fits counts. Blocks are checkpointed: each is gathered in
    the forward and for its backward (where the recomputation finds it open); the parts inside likewise; the root, whose
    parameters stay after its forward, once."""
    mesh = fake_pg(2)
    model = Calls(
        lambda self, x: self.head(self.body(x)),
        body=Checkpointed([Block(), Block()], use_reentrant=False),
        head=nn.Linear(8, 8),
    )
    for block in model.body.blocks:
        fully_shard(block.up, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.ones(2, 8, requires_grad=True)
    gathers = {"": 1, "body.blocks.*": 2, "body.blocks.*.up": 2}
    with expect(model, gathers=gathers, reductions={"(root)": 1, "body.**": 1}):
        train(model, inputs=x)
    with (
        pytest.raises(
            ValueError, match=r"expect\(gathers=\{'blocks\.\*': …\}\): no unit with parameters of Calls has such a name; "
        ),
        expect(model, gathers={"blocks.*": 2}),
    ):
        pass
    says = r"gathers of body\.blocks\.1: 2, not 3"
    with pytest.raises(AssertionError, match=says), expect(model, gathers={"body.blocks.1": 3, "body.**": 2}):
        train(model, inputs=x)


def test_replicas_reduce_twice(fake_pg: MakeMesh) -> None:
    """HSDP: a reduce-scatter over the shards and an all-reduce over the replicas of each of the three units."""
    model = sharded_chain(fake_pg(2, 2, names=("replicate", "shard")))
    with expect(model, gathers=6, reductions={"*": 2}):
        train(model)


def test_it_leaves_nothing_behind(fake_pg: MakeMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file where nobody asked for one, no thread, no hook, and an exception of the block goes its way; with ``out`` the
    trace stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = sharded_chain(fake_pg(2))
    train(model)
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(KeyError, match="mine"), expect(model, gathers=1):
        raise KeyError("mine")
    with expect(model, gathers=0):
        pass
    assert [dict(vars(module)) for module in model.modules()] == before
    assert list(tmp_path.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fsdptrace")]
    with expect(model, gathers=6, out="kept"):
        train(model)
    assert len(find_files("kept")) == 1


def test_what_cannot_be_judged_is_refused(fake_pg: MakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharded_chain(fake_pg(2))
    says = r"record\(Linear\): no module of it was wrapped by fully_shard"
    with pytest.raises(ValueError, match=says), expect(nn.Linear(2, 2), gathers=0):
        pass
    monkeypatch.setenv("FSDPTRACE", "0")
    with pytest.raises(RuntimeError, match="FSDPTRACE=0 turns recording off"), expect(model, gathers=0):
        pass
