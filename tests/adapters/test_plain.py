"""The ordinary training step, event by event."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from support.models import chain, sharded_chain, train
from support.show import trace
from support.torches import HSDP, since

# Linear(8, 8) over 4 ranks: weight 8x8, 2 rows a rank; bias 8, 2 elements a rank. Nothing is padded.
# (64 + 8) elements x 4 bytes = 288; of these a rank receives the 3 parts of the others: 216.
LINEAR = 288


def test_three_layers(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model) as rec:
        train(model, optimizer)
    (step,) = rec.steps
    # The root has no parameters of its own: a unit without a group. Layer 0's input needs no grad, so that autograd
    # never gets to its post-backward and the final callback runs it. Each pre-backward prefetches the layer before.
    trace(step).reads("""
        forward (root)
            pre_forward 0 input=none
                unshard 0 288
                wait 0 288
            post_forward 0
                reshard 0 288
            pre_forward 1 input=hooked
                unshard 1 288
                wait 1 288
            post_forward 1
                reshard 1 288
            pre_forward 2 input=hooked
                unshard 2 288
                wait 2 288
            post_forward 2
                reshard 2 288
        backward
            pre_backward 2
                unshard 2 288
                wait 2 288
                prefetch 2 > 1 backward implicit
                    unshard 1 288 by 2 backward implicit
            post_backward 2 tensors=2 autograd
                reshard 2 288
                reduce_scatter 2 288 avg tensors=2
            pre_backward 1
                unshard 1 0 pending
                wait 1 288
                prefetch 1 > 0 backward implicit
                    unshard 0 288 by 1 backward implicit
            post_backward 1 tensors=2 autograd
                reshard 1 288
                reduce_scatter 1 288 avg tensors=2
            pre_backward 0
                unshard 0 0 pending
                wait 0 288
            post_backward 0 tensors=2 final_callback
                reshard 0 288
                reduce_scatter 0 288 avg tensors=2
        optimizer_step SGD#1 tensors=6 groups=3
            param_change 0 optimizer_step tensors=2
            param_change 1 optimizer_step tensors=2
            param_change 2 optimizer_step tensors=2
    """)
    for event in step:
        if event.kind in ("unshard", "reduce_scatter"):
            assert event["wire_bytes"] == (0 if event.get("noop") else LINEAR // 4 * 3)
            assert event["tensors"] == 2
            assert event["world"] == 4
        assert 0 < event.t0 <= event.t1
        assert event.thread == 0
        assert event.model == 0
        assert event.step == 0
    seqs = [event.seq for event in step]
    assert seqs == sorted(set(seqs))


def test_children_lie_within_their_parents_in_time_and_number(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4))
    with record(model) as rec:
        train(model)
    by_seq = {event.seq: event for event in rec.steps[0]}
    for event in by_seq.values():
        if event.parent is not None:
            parent = by_seq[event.parent]
            assert event.seq > parent.seq
            assert parent.t0 <= event.t0
            assert event.t1 <= parent.t1


def test_state_and_step_events(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4))
    model[1].unshard()
    with record(model, checks="gather-after-backward") as rec:
        train(model)
        rec.step()
        model(torch.randn(4, 8))
        rec.step()
        train(model)
    first, second, third = rec.steps
    trace([event for event in first if event.kind == "state"], first.map, drop=()).reads("""
        state 0 sharded idle order=0 bytes=0
        state 1 unsharded idle order=0 bytes=288
        state 2 sharded idle order=0 bytes=0
    """)
    # Peak: layer 1 was open from the start, and beside it layer 0 or 2. Two in backward as well.
    trace(first.events[-1:], first.map, drop=()).reads(
        "step unsharded_bytes=0 unsharded_peak=576 past_backward_bytes=0 dropped=0"
    )
    # A forward alone: one layer at a time.
    assert second.counts == {
        "unshard": 3, "wait": 3, "reshard": 3, "pre_forward": 3, "post_forward": 3, "forward": 1, "step": 1,
    }  # fmt: skip
    assert second.events[-1]["unsharded_peak"] == LINEAR
    # The forward that had no backward left its order behind: 2 is prefetched at 0's pre-backward, for nothing, and
    # thrown away when the backward ends.
    assert third.counts["discard"] == 1
    assert [v.rule for v in rec.violations] == ["gather-after-backward"]
    assert rec.violations[0].severity == "info"


def test_no_reshard_after_forward(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), reshard_after_forward=False)
    with record(model) as rec:
        train(model)
    # Nothing is freed after the forward: no gather in backward, and no wait either.
    trace(rec.steps[0]).reads("""
        forward (root)
            pre_forward 0 input=none
                unshard 0 288
                wait 0 288
            post_forward 0
            pre_forward 1 input=hooked
                unshard 1 288
                wait 1 288
            post_forward 1
            pre_forward 2 input=hooked
                unshard 2 288
                wait 2 288
            post_forward 2
        backward
            pre_backward 2
                unshard 2 0 open
                prefetch 2 > 1 backward implicit
                    unshard 1 0 by 2 backward implicit open
            post_backward 2 tensors=2 autograd
                reshard 2 288
                reduce_scatter 2 288 avg tensors=2
            pre_backward 1
                unshard 1 0 open
                prefetch 1 > 0 backward implicit
                    unshard 0 0 by 1 backward implicit open
            post_backward 1 tensors=2 autograd
                reshard 1 288
                reduce_scatter 1 288 avg tensors=2
            pre_backward 0
                unshard 0 0 open
            post_backward 0 tensors=2 final_callback
                reshard 0 288
                reduce_scatter 0 288 avg tensors=2
    """)
    assert rec.steps[0].events[-1]["unsharded_peak"] == 3 * LINEAR


def test_reshard_after_forward_to_a_smaller_mesh(fake_pg: Any, record: Any) -> None:
    model = chain(2)
    mesh = fake_pg(4)
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh, reshard_after_forward=2)
    with record(model) as rec:
        train(model)
    # After the forward each rank keeps half: the gather of the backward is over 2 ranks. The post-backward frees it
    # all.
    trace(rec.steps[0]).reads("""
        forward (root)
            pre_forward 0 input=none
                unshard 0 288
                wait 0 288
            post_forward 0
                reshard 0 288 post_forward
            pre_forward 1 input=hooked
                unshard 1 288
                wait 1 288
            post_forward 1
                reshard 1 288 post_forward
        backward
            pre_backward 1
                unshard 1 288 of 2
                wait 1 288
                prefetch 1 > 0 backward implicit
                    unshard 0 288 of 2 by 1 backward implicit
            post_backward 1 tensors=2 autograd
                reshard 1 288
                reduce_scatter 1 288 avg tensors=2
            pre_backward 0
                unshard 0 0 of 2 pending
                wait 0 288
            post_backward 0 tensors=2 final_callback
                reshard 0 288
                reduce_scatter 0 288 avg tensors=2
    """)
    for event in rec.steps[0]:
        if event.kind == "unshard" and event["world"] == 2 and not event.get("noop"):
            assert event["wire_bytes"] == 144  # one of two halves comes from the other rank
    assert [group.post_forward_world for group in rec.model_map()] == [2, 2]
    assert [group.reshard_after_forward for group in rec.model_map()] == [2, 2]


@HSDP
def test_hsdp(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(2, 2, names=("replicate", "shard")), 2)
    with record(model) as rec:
        train(model)
    # Sharded over 2: (4 rows x 8 + 4) x 4 bytes x 2 ranks = 288. The reduce-scatter takes all of it, leaves half to the
    # rank, and the all-reduce sums that half, 144 bytes, over the 2 replicas.
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
            post_forward 1
                reshard 1 288
        backward
            pre_backward 1
                unshard 1 288
                wait 1 288
                prefetch 1 > 0 backward implicit
                    unshard 0 288 by 1 backward implicit
            post_backward 1 tensors=2 autograd
                reshard 1 288
                reduce_scatter 1 288 avg tensors=2
                all_reduce 1 144 avg tensors=2
            pre_backward 0
                unshard 0 0 pending
                wait 0 288
            post_backward 0 tensors=2 final_callback
                reshard 0 288
                reduce_scatter 0 288 avg tensors=2
                all_reduce 0 144 avg tensors=2
    """)
    wires = {event.kind: event["wire_bytes"] for event in rec.steps[0] if event.get("bytes") and "wire_bytes" in event.data}
    # Gather and scatter over 2: half of 288. All-reduce: scatter and gather of 144 over 2, 72 each.
    assert wires == {"unshard": 144, "reduce_scatter": 144, "all_reduce": 144}
    info = rec.model_map().groups[0]
    assert (info.world, info.replicate_world, dict(info.mesh)) == (2, 2, {"replicate": 2, "shard": 2})


@HSDP
def test_hsdp_without_all_reduce(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(2, 2, names=("replicate", "shard")), 1)
    with record(model) as rec:
        model.set_requires_all_reduce(False)
        train(model)
        model.set_requires_all_reduce(True)
        train(model)
        rec.step()
    step = rec.steps[0]
    # The first micro-batch is scattered only; the switches are seen when they are used.
    assert [event.kind for event in step if event.kind in ("reduce_scatter", "all_reduce", "flag")] == [
        "flag", "reduce_scatter", "flag", "reduce_scatter", "all_reduce",
    ]  # fmt: skip
    assert [event["value"] for event in step if event.kind == "flag"] == [False, True]
    assert {event["flag"] for event in step if event.kind == "flag"} == {"requires_all_reduce"}


def test_mixed_precision(fake_pg: Any, record: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded_chain(fake_pg(4), 2, mp_policy=policy)
    with record(model) as rec:
        train(model)
    # Gathered in bf16: 72 elements x 2 bytes = 144. Reduced in fp32: 288.
    unshards = [event for event in rec.steps[0] if event.kind == "unshard" and not event.get("noop")]
    assert [(e["bytes"], e["dtype"], e["wire_bytes"]) for e in unshards] == [(144, "bfloat16", 108)] * 4
    scatters = [event for event in rec.steps[0] if event.kind == "reduce_scatter"]
    assert [(e["bytes"], e["dtype"], e["op"]) for e in scatters] == [(288, "float32", "avg")] * 2
    assert {e["bytes"] for e in rec.steps[0] if e.kind in ("wait", "reshard")} == {144}
    info = rec.model_map().groups[0]
    assert (info.dtype, info.reduce_dtype, info.bytes, info.sharded_bytes) == ("bfloat16", "float32", 144, 72)


def test_low_precision_reduction(fake_pg: Any, record: Any) -> None:
    # fp16 is not averaged by the collective: it is divided before and after a sum.
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    model = sharded_chain(fake_pg(4), 1, mp_policy=policy)
    with record(model) as rec:
        train(model)
    (scatter,) = [event for event in rec.steps[0] if event.kind == "reduce_scatter"]
    assert (scatter["bytes"], scatter["dtype"], scatter["op"]) == (144, "float16", "sum")


def test_uneven_shards_are_padded(fake_pg: Any, record: Any) -> None:
    # Linear(3, 5) over 4 ranks: 5 rows make 2, 2, 1, 0; all are padded to 2. (2x3 + 2) elements x 4 ranks x 4 bytes =
    # 128, though the parameters have (15 + 5) x 4 = 80.
    model = nn.Sequential(nn.Linear(3, 5))
    mesh = fake_pg(4, rank=2)
    fully_shard(model, mesh=mesh)
    with record(model) as rec:
        train(model, inputs=torch.randn(2, 3))
    trace(rec.steps[0]).reads("""
        forward (root)
            pre_forward (root) input=none
                unshard (root) 128
                wait (root) 128
            post_forward (root)  # the root stays open by its default policy
                flag (root) reshard_after_forward=False  # what that policy became at the first forward
        backward
            pre_backward (root)
                unshard (root) 0 open
            post_backward (root) tensors=2 final_callback
                reshard (root) 128
                reduce_scatter (root) 128 avg tensors=2
    """)
    info = rec.model_map().groups[0]
    # Rank 2 has 1 row of 3 and 1 element of the bias: 16 bytes.
    assert (info.bytes, info.sharded_bytes) == (128, 16)
    assert [(p.name, p.shape, p.bytes) for p in info.params] == [("0.weight", (5, 3), 96), ("0.bias", (5,), 32)]


@since(2, 8, "older ones set a root's reshard_after_forward to False themselves")
def test_nested_units_share_no_parameters(fake_pg: Any, record: Any) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(8, 8)
            self.inner = nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.before(x))

    mesh = fake_pg(4)
    model = Outer()
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    with record(model) as rec:
        train(model, inputs=torch.randn(4, 8, requires_grad=True))
    # The root's own forward holds its group open around the inner unit's. inner: 64 elements, 256 bytes; root: 288.
    # Both hook the same output, inner first. The order list is inner, root, so that the root prefetches what is open.
    trace(rec.steps[0]).reads("""
        forward (root)
            pre_forward (root) input=hooked
                unshard (root) 288
                wait (root) 288
            pre_forward inner input=hooked
                unshard inner 256
                wait inner 256
            post_forward inner
                reshard inner 256
            post_forward (root)
                reshard (root) 288
        backward
            pre_backward inner
                unshard inner 256
                wait inner 256
            pre_backward (root)
                unshard (root) 288
                wait (root) 288
                prefetch (root) > inner backward implicit
                    unshard inner 0 by (root) backward implicit open
            post_backward inner tensors=1 autograd
                reshard inner 256
                reduce_scatter inner 256 avg tensors=1
            post_backward (root) tensors=2 autograd
                reshard (root) 288
                reduce_scatter (root) 288 avg tensors=2
    """)


def test_world_size_one(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(1), 2)
    with record(model) as rec:
        train(model)
    step = rec.steps[0]
    # Nothing travels, but the copies are made all the same.
    unshards = [event for event in step if event.kind == "unshard" and not event.get("noop")]
    assert [(e["bytes"], e["world"], e["wire_bytes"]) for e in unshards] == [(288, 1, 0)] * 4
    assert "reduce_scatter" not in step.counts
    assert "all_reduce" not in step.counts
    assert step.counts["reshard"] == 4
    assert step.events[-1]["unsharded_bytes"] == 0
