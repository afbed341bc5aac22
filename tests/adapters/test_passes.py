"""Passes that are not one forward and one backward: eval, several forwards, recomputation, exceptions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import set_checkpoint_early_stop

from support.models import Block, Calls, Checkpointed, sharded_chain, train
from support.show import trace
from support.torches import RECOMPUTE, since


def backward_of(rec: Any) -> Any:
    step = rec.steps[0]
    return trace([event for event in step if event.pass_ in ("backward", "recompute")], step.map)


def checkpointed(mesh: Any, count: int = 2, **options: Any) -> nn.Module:
    """Checkpoint around units: 576 bytes a block over 4 ranks. The root is a unit without a group."""
    model = Checkpointed([Block() for _ in range(count)], **options)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_eval(fake_pg: Any, record: Any, mode: str) -> None:
    model = sharded_chain(fake_pg(4), 2)
    with record(model) as rec, torch.no_grad() if mode == "no_grad" else torch.inference_mode():
        model(torch.randn(4, 8))
    trace(rec.steps[0]).reads(f"""
        forward (root) no_grad {"inference" if mode == "inference" else ""}
            pre_forward 0 input=none grad=off
                unshard 0 288
                wait 0 288
            post_forward 0
                reshard 0 288
            pre_forward 1 input=none grad=off
                unshard 1 288
                wait 1 288
            post_forward 1
                reshard 1 288
    """)


def test_eval_between_steps_belongs_to_the_step_before(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model) as rec:
        train(model, optimizer)
        with torch.no_grad():
            model(torch.randn(4, 8))
        train(model, optimizer)
    assert [[e["grad"] for e in step if e.kind == "forward"] for step in rec.steps] == [[True, False], [True]]


def test_input_hidden_in_an_object(fake_pg: Any, record: Any) -> None:
    class Box:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    model = Calls(lambda self, box: self.lin(box.x), lin=nn.Linear(8, 8))
    fully_shard(model, mesh=fake_pg(4))
    with record(model) as rec:
        model(Box(torch.randn(4, 8, requires_grad=True))).sum().backward()
    # FSDP2 looks into tuples, lists, dicts and dataclasses, not into other objects: nobody hooks x.
    (pre,) = [event for event in rec.steps[0] if event.kind == "pre_forward"]
    assert pre["input_grad"] == "unhooked"
    (post,) = [event for event in rec.steps[0] if event.kind == "post_backward"]
    assert post["by"] == "final_callback"


def test_two_forwards_one_backward(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 2)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    with record(model) as rec:
        (model(x).sum() + model(y).sum()).backward()
    assert rec.steps[0].counts["forward"] == 2
    # The order list is 0, 1, 0, 1 and is walked backwards: 1 gathers 0, 0 gathers 1 for its first use, rightly, and 1
    # finds 0 open still, since 0's post-backward waits for the end. 0's second pre-backward returns at once. A parameter
    # gets its gradient when both uses have given theirs: the first post-backward of 1 has nothing to reduce.
    backward_of(rec).reads("""
        backward
            pre_backward 1
                unshard 1 288
                wait 1 288
                prefetch 1 > 0 backward implicit
                    unshard 0 288 by 1 backward implicit
            post_backward 1 tensors=0 autograd
                reshard 1 288
            pre_backward 0
                unshard 0 0 pending
                wait 0 288
                prefetch 0 > 1 backward implicit
                    unshard 1 288 by 0 backward implicit
            pre_backward 1 post_backward->pre_backward
                unshard 1 0 pending
                wait 1 288
                prefetch 1 > 0 backward implicit
                    unshard 0 0 by 1 backward implicit open
            post_backward 1 tensors=2 autograd
                reshard 1 288
                reduce_scatter 1 288 avg tensors=2
            post_backward 0 tensors=2 final_callback
                reshard 0 288
                reduce_scatter 0 288 avg tensors=2
    """)


def test_unit_used_twice_in_a_forward(fake_pg: Any, record: Any) -> None:
    model = Calls(lambda self, x: self.lin(torch.relu(self.lin(x))), lin=nn.Linear(8, 8))
    mesh = fake_pg(4)
    fully_shard(model.lin, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with record(model, checks="gather-after-backward") as rec:
        train(model)
    # The second use's backward frees it, the first use's gathers it again: right, and no violation. The gradient
    # is there after both. At the second use's
    # pre-backward the neighbour in the order list is the unit itself.
    backward_of(rec).reads("""
        backward
            pre_backward lin
                unshard lin 288
                wait lin 288
                prefetch lin > lin backward implicit
                    unshard lin 0 by lin backward implicit open
            post_backward lin tensors=0 autograd
                reshard lin 288
            pre_backward lin post_backward->pre_backward
                unshard lin 288
                wait lin 288
            post_backward lin tensors=2 final_callback
                reshard lin 288
                reduce_scatter lin 288 avg tensors=2
    """)
    assert rec.violations == []


def test_two_outputs_have_one_pre_backward(fake_pg: Any, record: Any) -> None:
    model = Calls(lambda self, x: self.lin(x), lin=Calls(lambda self, x: (self.l(x), self.l(x) * 2), l=nn.Linear(8, 8)))
    mesh = fake_pg(4)
    fully_shard(model.lin, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with record(model) as rec:
        first, second = model(torch.randn(4, 8))
        (first.sum() + second.sum()).backward()
    assert rec.steps[0].counts["pre_backward"] == 1


# -- recomputation -----------------------------------------------------------------------------------------------------
def test_checkpoint_around_a_unit(fake_pg: Any, record: Any) -> None:
    model = checkpointed(fake_pg(4), use_reentrant=False)
    with record(model) as rec, set_checkpoint_early_stop(False):
        train(model)
    # The recomputation goes through the unit's forward in state PRE_BACKWARD, where FSDP2 returns early: both hooks are
    # events all the same. Nothing is gathered in it.
    backward_of(rec).reads("""
        backward
            pre_backward blocks.1
                unshard blocks.1 576
                wait blocks.1 576
                prefetch blocks.1 > blocks.0 backward implicit
                    unshard blocks.0 576 by blocks.1 backward implicit
            recompute blocks.1 blocks.1 saved=5 [recompute]
                pre_forward blocks.1 input=unknown pre_backward->pre_backward
                post_forward blocks.1 pre_backward->pre_backward
            post_backward blocks.1 tensors=4 autograd
                reshard blocks.1 576
                reduce_scatter blocks.1 576 avg tensors=4
            pre_backward blocks.0
                unshard blocks.0 0 pending
                wait blocks.0 576
            recompute blocks.0 blocks.0 saved=4 [recompute]  # its input needs no grad: up's weight is not saved
                pre_forward blocks.0 input=unknown pre_backward->pre_backward
                post_forward blocks.0 pre_backward->pre_backward
            post_backward blocks.0 tensors=4 final_callback
                reshard blocks.0 576
                reduce_scatter blocks.0 576 avg tensors=4
    """)


def test_recomputation_that_stops_early(fake_pg: Any, record: Any) -> None:
    model = checkpointed(fake_pg(4), 1, use_reentrant=False)
    with record(model) as rec:
        train(model)
        train(model)
    # `down` saves the last tensor: the recomputation is aborted inside the block, which has no post-forward then, and the
    # exception that does it is no event.
    recomputed = [(event.kind, event.step) for event in rec.steps[0] if event.pass_ == "recompute"]
    assert recomputed == [("recompute", 0), ("pre_forward", 0), ("recompute", 0), ("pre_forward", 0)]
    assert "exception" not in rec.steps[0].counts
    # The next forward is a forward again, not a recomputation.
    assert [event.pass_ for event in rec.steps[0] if event.kind == "post_forward"] == ["forward", "forward"]


@RECOMPUTE
def test_nested_units_under_checkpoint(fake_pg: Any, record: Any) -> None:
    model = Checkpointed([Block()], use_reentrant=False)
    mesh = fake_pg(4)
    fully_shard(model.blocks[0].up, mesh=mesh)
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    with record(model) as rec:
        train(model)
    # The inner unit's own pre-backward has not come when the recomputation uses it: its hooks run as in a forward, but
    # do not free it. It is gathered once for both.
    backward_of(rec).reads("""
        backward
            pre_backward blocks.0
                unshard blocks.0 288
                wait blocks.0 288
                prefetch blocks.0 > blocks.0.up backward implicit
                    unshard blocks.0.up 288 by blocks.0 backward implicit
            recompute blocks.0 blocks.0 saved=4 early_stop [recompute]
                pre_forward blocks.0 input=unknown pre_backward->pre_backward
                pre_forward blocks.0.up input=none
                    unshard blocks.0.up 0 pending
                    wait blocks.0.up 288
                post_forward blocks.0.up
            pre_backward blocks.0.up
                unshard blocks.0.up 0 open
            post_backward blocks.0 tensors=2 final_callback
                reshard blocks.0 288
                reduce_scatter blocks.0 288 avg tensors=2
            post_backward blocks.0.up tensors=2 final_callback
                reshard blocks.0.up 288
                reduce_scatter blocks.0.up 288 avg tensors=2
    """)


@RECOMPUTE
def test_reentrant_checkpoint(fake_pg: Any, record: Any) -> None:
    model = checkpointed(fake_pg(4), use_reentrant=True)
    with record(model) as rec:
        train(model, inputs=torch.randn(4, 8, requires_grad=True))
    # The forward is run with grad mode off: nobody hooks anything. The recomputation is a forward with all its hooks that
    # does not free, and its backward is a graph task within the backward.
    trace(rec.steps[0]).reads("""
        forward (root)
            region blocks.0 blocks.0 reentrant
                pre_forward blocks.0 input=none grad=paused
                    unshard blocks.0 576
                    wait blocks.0 576
                post_forward blocks.0
                    reshard blocks.0 576
            region blocks.1 blocks.1 reentrant
                pre_forward blocks.1 input=none grad=paused
                    unshard blocks.1 576
                    wait blocks.1 576
                post_forward blocks.1
                    reshard blocks.1 576
        backward
            recompute blocks.1 blocks.1 reentrant [recompute]
                pre_forward blocks.1 input=hooked
                    unshard blocks.1 576
                    wait blocks.1 576
                post_forward blocks.1
            pre_backward blocks.1
                unshard blocks.1 0 open
                prefetch blocks.1 > blocks.0 backward implicit
                    unshard blocks.0 576 by blocks.1 backward implicit
            post_backward blocks.1 tensors=4 autograd
                reshard blocks.1 576
                reduce_scatter blocks.1 576 avg tensors=4
            recompute blocks.0 blocks.0 reentrant [recompute]
                pre_forward blocks.0 input=hooked
                    unshard blocks.0 0 pending
                    wait blocks.0 576
                post_forward blocks.0
            pre_backward blocks.0
                unshard blocks.0 0 open
            post_backward blocks.0 tensors=4 autograd
                reshard blocks.0 576
                reduce_scatter blocks.0 576 avg tensors=4
    """)


@RECOMPUTE
def test_reentrant_checkpoint_without_a_wrapped_root(fake_pg: Any, record: Any) -> None:
    # Every block is a root of its own, with a final callback at the end of its own inner backward: one backward still.
    model = Checkpointed([Block(), Block()], use_reentrant=True)
    mesh = fake_pg(4)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    with record(model) as rec:
        train(model, inputs=torch.randn(4, 8, requires_grad=True))
        train(model, inputs=torch.randn(4, 8, requires_grad=True))
    counts = rec.steps[0].counts
    assert (counts["forward"], counts["backward"], counts["reduce_scatter"]) == (2, 2, 4)
    # All but the backwards themselves lie in a pass of theirs.
    outside = [event.kind for event in rec.steps[0] if event.pass_ == "none"]
    assert set(outside) <= {"state", "step"}
    assert rec.steps[0].events[-1]["unsharded_bytes"] == 0


# -- exceptions --------------------------------------------------------------------------------------------------------
class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("broken in backward")


def test_exception_in_forward(fake_pg: Any, record: Any) -> None:
    def raises(self: Any, x: torch.Tensor) -> torch.Tensor:
        raise error

    error = torch.OutOfMemoryError("no memory")
    model = nn.Sequential(nn.Linear(8, 8), Calls(raises, lin=nn.Linear(8, 8)))
    mesh = fake_pg(4)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(torch.OutOfMemoryError) as caught, record(model) as rec:
        model(torch.randn(4, 8))
    assert caught.value is error
    # One event, at the innermost unit that it leaves; the forward is complete.
    trace(rec.steps[0]).reads("""
        forward (root)
            pre_forward 0 input=none
                unshard 0 288
                wait 0 288
            post_forward 0
                reshard 0 288
            pre_forward 1 input=hooked
                unshard 1 288
                wait 1 288
            exception 1 torch.OutOfMemoryError leaves 1
    """)


def test_exception_in_backward(fake_pg: Any, record: Any) -> None:
    model = Calls(lambda self, x: self.b(Breaks.apply(self.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    mesh = fake_pg(4)
    fully_shard(model.a, mesh=mesh)
    fully_shard(model.b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(KeyError, match="broken in backward"), record(model) as rec:
        train(model)
    # No module is left by it: what it leaves is the recording. No final callback came, which would have cleared up.
    backward_of(rec).reads("""
        backward not last
            pre_backward b
                unshard b 288
                wait b 288
                prefetch b > a backward implicit
                    unshard a 288 by b backward implicit
            post_backward b tensors=2 autograd
                reshard b 288
                reduce_scatter b 288 avg tensors=2
            exception KeyError leaves the recording
    """)
    assert rec.steps[0].events[-1]["unsharded_bytes"] == 288  # a's gather is pending


@since(2, 13, "reset_iter_state, to go on after an exception, is new in it")
def test_training_goes_on_after_a_caught_exception(fake_pg: Any, record: Any) -> None:
    model = Calls(
        lambda self, x, ok: self.b(self.a(x) if ok else Breaks.apply(self.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 8)
    )
    mesh = fake_pg(4)
    fully_shard(model.a, mesh=mesh)
    fully_shard(model.b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with record(model) as rec:
        with pytest.raises(KeyError):
            model(torch.randn(4, 8), False).sum().backward()
        model.reset_iter_state()
        rec.step()
        model(torch.randn(4, 8), True).sum().backward()
    assert rec.steps[1].counts == {
        "unshard": 5, "wait": 4, "reshard": 4, "prefetch": 1, "pre_forward": 2, "post_forward": 2, "pre_backward": 2,
        "post_backward": 2, "reduce_scatter": 2, "forward": 1, "backward": 1, "step": 1,
    }  # fmt: skip
    assert rec.steps[1].events[-1]["unsharded_bytes"] == 0


def test_exception_that_a_module_handles_itself_is_no_event_of_its_parents(fake_pg: Any, record: Any) -> None:
    def careful(self: Any, x: torch.Tensor) -> Any:
        try:
            raise ValueError("handled")
        except ValueError:
            return self.lin(x)  # runs, and gives None back, while an exception is being handled

    model = Calls(careful, lin=Calls(lambda self, x: None, lin=nn.Linear(8, 8)))
    mesh = fake_pg(4)
    fully_shard(model.lin, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with record(model) as rec:
        model(torch.randn(4, 8))
    assert "exception" not in rec.steps[0].counts
