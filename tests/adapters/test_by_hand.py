"""What a user does by hand: unshard, reshard, prefetch lists, switches, state dicts, reset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from support.models import sharded_chain, train
from support.show import trace
from support.torches import RESET, since


def test_unshard_and_reshard(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 2)
    with record(model) as rec:
        model[0].unshard()
        model[0].unshard()
        model[0].reshard()
        model[0].reshard()
        handle = model[1].unshard(async_op=True)
        model[1].unshard(async_op=True)
        handle.wait()
        model[1].reshard()
    # The second unshard finds it open, or pending; the second reshard has nothing to free and is no event.
    trace(rec.steps[0]).reads("""
        unshard 0 288 manual
        wait 0 288
        unshard 0 0 manual open
        reshard 0 288 manual
        unshard 1 288 manual
        unshard 1 0 manual pending
        wait 1 288
        reshard 1 288 manual
    """)


def test_unshard_ahead_of_the_forward(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 2)
    with record(model) as rec, torch.no_grad():
        model[0].unshard(async_op=True)
        model(torch.randn(4, 8))
    trace(rec.steps[0]).reads("""
        unshard 0 288 manual
        forward (root) no_grad
            pre_forward 0 input=none grad=off
                unshard 0 0 pending
                wait 0 288
            post_forward 0
                reshard 0 288
            pre_forward 1 input=none grad=off
                unshard 1 288
                wait 1 288
            post_forward 1
                reshard 1 288
    """)


def test_explicit_forward_prefetch(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4))
    model.set_modules_to_forward_prefetch([model[0]])
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    with record(model) as rec, torch.no_grad():
        model(torch.randn(4, 8))
    # The root has no group: its prefetch has no source. Prefetches come after the unit's own groups are there.
    trace(rec.steps[0]).reads("""
        forward (root) no_grad
            prefetch (none) > 0 forward explicit
                unshard 0 288 forward explicit
            pre_forward 0 input=none grad=off
                unshard 0 0 pending
                wait 0 288
            prefetch 0 > 1 forward explicit
                unshard 1 288 by 0 forward explicit
            prefetch 0 > 2 forward explicit
                unshard 2 288 by 0 forward explicit
            post_forward 0
                reshard 0 288
            pre_forward 1 input=none grad=off
                unshard 1 0 pending
                wait 1 288
            post_forward 1
                reshard 1 288
            pre_forward 2 input=none grad=off
                unshard 2 0 pending
                wait 2 288
            post_forward 2
                reshard 2 288
    """)


def test_explicit_backward_prefetch(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4))
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])
    with record(model) as rec:
        train(model)
    # The list takes the implicit prefetch's place for layer 2; layers 1 and 0 keep theirs.
    backward = [event for event in rec.steps[0] if event.pass_ == "backward"]
    trace(backward, rec.model_map()).reads("""
        backward
            pre_backward 2
                unshard 2 288
                wait 2 288
            prefetch 2 > 1 backward explicit
                unshard 1 288 by 2 backward explicit
            prefetch 2 > 0 backward explicit
                unshard 0 288 by 2 backward explicit
            post_backward 2 tensors=2 autograd
                reshard 2 288
                reduce_scatter 2 288 avg tensors=2
            pre_backward 1
                unshard 1 0 pending
                wait 1 288
                prefetch 1 > 0 backward implicit
                    unshard 0 0 by 1 backward implicit pending
            post_backward 1 tensors=2 autograd
                reshard 1 288
                reduce_scatter 1 288 avg tensors=2
            pre_backward 0
                unshard 0 0 pending
                wait 0 288
            post_backward 0 tensors=2 final_callback
                reshard 0 288
                reduce_scatter 0 288 avg tensors=2
    """)
    assert rec.steps[0].events[-1]["unsharded_peak"] == 3 * 288


def test_prefetch_of_what_is_over_is_discarded(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4))
    model[0].set_modules_to_backward_prefetch([model[2]])  # the wrong way round
    with record(model, checks="gather-after-backward", on_violation="record") as rec:
        train(model)
    backward = [event for event in rec.steps[0] if event.pass_ == "backward"]
    at = next(i for i, event in enumerate(backward) if event.kind == "pre_backward" and event.group == 0)
    trace([backward[0], *backward[at:]], rec.model_map(), drop=("violation",)).reads("""
        backward
            pre_backward 0
                unshard 0 0 pending
                wait 0 288
            prefetch 0 > 2 backward explicit
                unshard 2 288 by 0 backward explicit
            post_backward 0 tensors=2 final_callback
                reshard 0 288
                reduce_scatter 0 288 avg tensors=2
            discard 2 288
    """)
    (violation,) = rec.violations
    assert (violation.rule, violation.severity, violation.fqn, violation.bytes) == ("gather-after-backward", "error", "2", 288)
    # The evidence: the post-backward after which it was over, and the gather.
    by_seq = {event.seq: event for event in rec.steps[0]}
    assert [(by_seq[seq].kind, by_seq[seq].group) for seq in violation.evidence] == [("post_backward", 2), ("unshard", 2)]


def test_unshard_in_backward_switched_off(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 2)
    model[0].set_unshard_in_backward(False)
    with record(model) as rec:
        train(model)
    # A first layer's weight is not needed to compute its own gradient. Asked for twice, gathered never.
    backward = [event for event in rec.steps[0] if event.pass_ == "backward"]
    trace(backward, rec.model_map()).reads("""
        backward
            pre_backward 1
                unshard 1 288
                wait 1 288
                prefetch 1 > 0 backward implicit
                    unshard 0 0 by 1 backward implicit disabled
            post_backward 1 tensors=2 autograd
                reshard 1 288
                reduce_scatter 1 288 avg tensors=2
            pre_backward 0
                unshard 0 0 disabled
            post_backward 0 tensors=2 final_callback
                reduce_scatter 0 288 avg tensors=2
    """)


def test_accumulation_without_sync(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 1)
    with record(model) as rec:
        model.set_requires_gradient_sync(False)
        train(model)
        model.set_requires_gradient_sync(True)
        train(model)
    # The first backward frees but does not reduce; the second reduces what both accumulated. A switch is an event when
    # it is used. One unit, so that nothing is prefetched.
    trace(rec.steps[0]).reads("""
        forward (root)
            pre_forward 0 input=none
                unshard 0 288
                wait 0 288
            post_forward 0
                reshard 0 288
        backward
            pre_backward 0
                unshard 0 288
                wait 0 288
            post_backward 0 tensors=2 final_callback
                reshard 0 288
                flag 0 requires_gradient_sync=False
                flag 0 requires_all_reduce=False
        forward (root)
            pre_forward 0 input=none
                unshard 0 288
                wait 0 288
            post_forward 0
                reshard 0 288
        backward
            pre_backward 0
                unshard 0 288
                wait 0 288
            post_backward 0 tensors=2 final_callback
                reshard 0 288
                flag 0 requires_gradient_sync=True
                flag 0 requires_all_reduce=True
                reduce_scatter 0 288 avg tensors=2
    """)


def test_kept_open_while_accumulating(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 1)
    with record(model) as rec:
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        train(model)
        rec.step()
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        train(model)
    first, second = rec.steps
    assert "reshard" not in [event.kind for event in first if event.pass_ == "backward"]
    assert first.events[-1]["unsharded_bytes"] == first.events[-1]["past_backward_bytes"] == 288
    # The next forward finds it open.
    assert next(event.get("noop") for event in second if event.kind == "unshard") == "open"
    assert second.events[-1]["unsharded_bytes"] == 0


def test_not_the_last_backward(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 2)
    with record(model, checks="gather-after-backward") as rec:
        model.set_is_last_backward(False)
        train(model)
        model.set_is_last_backward(True)
        train(model)
    events = rec.steps[0].events
    assert [event["last"] for event in events if event.kind == "backward"] == [False, True]
    # The order list lives on: [0, 1, 0, 1]. In the second backward layer 0's neighbour there is the first pass's layer
    # 1, which is gathered and, at the end, thrown away.
    found = [(event.kind, event.group, event.get("target")) for event in events if event.kind in ("prefetch", "discard")]
    assert found == [("prefetch", 1, 0), ("prefetch", 1, 0), ("prefetch", 0, 1), ("discard", 1, None)]
    assert [violation.severity for violation in rec.violations] == ["info"]


def test_a_backward_without_a_final_callback_ends_when_it_returns(fake_pg: Any, record: Any) -> None:
    """A head that is one unit with the norm before it and is called by itself (torchtitan's chunked loss): of a grouped unit
    that runs in part PyTorch runs no pre-backward, and so queues no final callback."""
    mesh = fake_pg(4)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    fully_shard(model[0], mesh=mesh)
    fully_shard([model[1], model[2]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.randn(4, 8)).sum().backward()
    with record(model) as rec:
        hidden = torch.randn(4, 8, requires_grad=True)
        for chunk in hidden.chunk(2):
            model[2](chunk).sum().backward()
    events = rec.steps[0].events
    backwards = [event for event in events if event.kind == "backward"]
    assert [backward["finished"] for backward in backwards] == [False, False]
    for backward in backwards:
        inside = [event for event in events if event.parent == backward.seq]
        assert inside
        assert all(backward.t0 <= event.t0 <= event.t1 <= backward.t1 for event in inside)


@pytest.mark.parametrize("what", ["save", "load"])
def test_state_dict_while_open(fake_pg: Any, record: Any, what: str) -> None:
    model = sharded_chain(fake_pg(4), 2, reshard_after_forward=False)
    with torch.no_grad():
        model(torch.randn(4, 8))  # the first forward registers the hooks
    saved = model.state_dict()
    with record(model) as rec:
        with torch.no_grad():
            model(torch.randn(4, 8))
        model.state_dict() if what == "save" else model.load_state_dict(saved)
    trace(rec.steps[0]).reads(
        """
        forward (root) no_grad
            pre_forward 0 input=none grad=off
                unshard 0 288
                wait 0 288
            post_forward 0
            pre_forward 1 input=none grad=off
                unshard 1 288
                wait 1 288
            post_forward 1
        reshard 0 288 state_dict
        # load: param_change 0 load tensors=2
        reshard 1 288 state_dict
        # load: param_change 1 load tensors=2
    """.replace("# load: ", "" if what == "load" else "  # ")
    )


@RESET
def test_reset_iter_state(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4))
    model[1].set_modules_to_forward_prefetch([model[2]])

    def broken(module: Any, args: Any) -> None:
        raise ValueError("no")

    with record(model) as rec:
        handle = model[1].register_forward_pre_hook(broken)
        with pytest.raises(ValueError, match="no"):
            model(torch.randn(4, 8))
        handle.remove()
        model.reset_iter_state()
        rec.step()
        train(model)
    # When it raises, layer 1 is open and layer 2 pending. The reset frees the one and throws the other away.
    trace([event for event in rec.steps[0] if event.seq > 3], rec.model_map(), drop=("step",)).reads("""
        forward (root)
            pre_forward 0 input=none
                unshard 0 288
                wait 0 288
            post_forward 0
                reshard 0 288
            pre_forward 1 input=hooked
                unshard 1 288
                wait 1 288
            prefetch 1 > 2 forward explicit
                unshard 2 288 by 1 forward explicit
            exception 1 ValueError leaves 1
        state 0 sharded idle order=0 bytes=0
        reshard 1 288 reset
        state 1 sharded idle order=0 bytes=0
        discard 2 288
        state 2 sharded idle order=0 bytes=0
    """)
    assert rec.steps[1].counts["reduce_scatter"] == 3
    assert rec.steps[1].events[-1]["unsharded_bytes"] == 0


@since(2, 8, "set_reshard_after_forward is new in it")
def test_switches_are_polled_at_a_step(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 1)
    with record(model) as rec, torch.no_grad():
        model(torch.randn(4, 8))
        model[0].set_reshard_after_forward(False)
        model[0].set_reshard_after_backward(False)
        rec.step()
    flags = [(event["flag"], event["value"]) for event in rec.steps[0] if event.kind == "flag"]
    assert flags == [("reshard_after_backward", False), ("reshard_after_forward", False)]


def test_registered_forward_method(fake_pg: Any, record: Any) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x)

    model = Encoder()
    fully_shard(model, mesh=fake_pg(4))
    register_fsdp_forward_method(model, "encode")
    with record(model) as rec:
        model.encode(torch.randn(4, 8)).sum().backward()
    # No module is called: the method's own hooks are a forward all the same. The root stays open after it.
    trace(rec.steps[0], drop=("state", "step", "flag")).reads("""
        forward (root)
            pre_forward (root) input=none
                unshard (root) 288
                wait (root) 288
            post_forward (root)
        backward
            pre_backward (root)
                unshard (root) 0 open
            post_backward (root) tensors=2 final_callback
                reshard (root) 288
                reduce_scatter (root) 288 avg tensors=2
    """)
