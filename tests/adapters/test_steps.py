"""Where a step ends, and what an optimizer's step says."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from support.models import sharded_chain, train
from support.show import trace, tree


def test_steps_end_at_the_next_forward(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model) as rec:
        for _ in range(3):
            train(model)  # two micro-batches
            train(model, optimizer)
            assert len(rec.events) > 0  # the step is not over yet
    assert [step.number for step in rec.steps] == [0, 1, 2]
    assert [step.counts["forward"] for step in rec.steps] == [2, 2, 2]
    # The gradients' second optimizer-free micro-batch does not end it, the optimizer's step does.
    assert [step.events[-1].kind for step in rec.steps] == ["step"] * 3


def test_several_optimizers_make_one_step(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 2)
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[1].parameters(), lr=0.1)]
    with record(model) as rec:
        for _ in range(2):
            train(model)
            for optimizer in optimizers:
                optimizer.step()
    assert len(rec.steps) == 2
    for step in rec.steps:
        trace([event for event in step if event.kind in ("optimizer_step", "param_change")], step.map).reads("""
            optimizer_step SGD#1 tensors=2 groups=1
                param_change 0 optimizer_step tensors=2
            optimizer_step AdamW#2 tensors=2 groups=1
                param_change 1 optimizer_step tensors=2
        """)


def test_optimizer_in_backward(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 1)
    model(torch.randn(4, 8))  # the first forward may put new shards in the parameters' place
    model.zero_grad()
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with record(model) as rec:
        for _ in range(2):
            train(model)
    # Each parameter's optimizer steps inside the group's post-backward. The step ends with the next forward.
    assert len(rec.steps) == 2
    trace([event for event in rec.steps[1] if event.pass_ == "backward"], rec.model_map()).reads("""
        backward
            pre_backward 0
                unshard 0 288
                wait 0 288
            post_backward 0 tensors=2 final_callback
                reshard 0 288
                optimizer_step SGD#1 tensors=1 groups=1
                    param_change 0 optimizer_step tensors=1
                optimizer_step SGD#2 tensors=1 groups=1
                    param_change 0 optimizer_step tensors=1
                reduce_scatter 0 288 avg tensors=2
    """)


def test_optimizer_of_others_and_of_gathered_copies(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 2)
    other = nn.Linear(3, 3)
    model[1].unshard()
    copies = torch.optim.SGD(model[1].parameters(), lr=0.1)  # the mistake: these are freed again
    mixed = torch.optim.SGD([*model[0].parameters(), *other.parameters()], lr=0.1)
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    with record(model) as rec:
        train(model)
        foreign.step()
        mixed.step()
        copies.step()
    lines = tree(rec.steps[0], rec.model_map()).splitlines()
    assert [line for line in lines if "optimizer_step" in line and "param_change" not in line] == [
        "optimizer_step SGD#1 tensors=2 groups=1 foreign=2",
        "optimizer_step SGD#2 tensors=0 groups=0 temporary=2",
    ]


def test_param_group_added_later(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 2)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with record(model) as rec:
        train(model, optimizer)
        optimizer.add_param_group({"params": list(model[1].parameters())})
        train(model, optimizer)
    assert [event["groups"] for step in rec.steps for event in step if event.kind == "optimizer_step"] == [1, 2]


def test_steps_by_hand_and_empty_ones(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 1)
    with record(model) as rec:
        rec.step()
        train(model)
        rec.step()
        rec.step()
        train(model)
    # Three of five boundaries had nothing to close. (The last one is the end of the recording.)
    assert [step.number for step in rec.steps] == [0, 1]
    assert [step.counts["forward"] for step in rec.steps] == [1, 1]


def test_what_a_recording_tells(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model) as rec:
        assert rec.summary() is not None
        train(model, optimizer)
    summary = rec.summary()
    rows = {row.fqn: row for row in summary.groups}
    # Two gathers a layer; 288 bytes each, 216 of them over the wire, and 216 of the reduce-scatter.
    for row in rows.values():
        assert (row.gathers_forward, row.gathers_backward, row.gathers_recompute, row.gathers_other) == (1, 1, 0, 0)
        assert (row.gathered_bytes, row.wire_bytes, row.reduced_bytes, row.reduce_wire_bytes) == (576, 432, 288, 216)
        assert (row.waits, row.wasted, row.reduce_scatters, row.all_reduces) == (2, 0, 1, 0)
    assert (rows["0"].prefetched, rows["1"].prefetched) == (1, 0)
    assert (rows["0"].noops, rows["1"].noops) == (1, 0)
    # Both are there when 1 has prefetched 0.
    assert summary.unsharded_peak == 576
    assert sorted(summary.peak_groups) == [("0", 288), ("1", 288)]
    assert (summary.unsharded_bytes, summary.past_backward_bytes, summary.steps) == (0, 0, 1)
    assert rec.counts() == rec.steps[0].counts
    scalars = rec.scalars()
    assert len(scalars) <= 12
    assert all(type(value) is float for value in scalars.values())
    assert scalars["fsdp/gathers"] == 4
    assert scalars["fsdp/gathered_bytes"] == 4 * 288
    assert scalars["fsdp/wire_bytes"] == 6 * 216
    assert scalars["fsdp/reduce_scatters"] == 2
    assert scalars["fsdp/unsharded_peak_bytes"] == 576
    columns = rec.steps[0].columns()
    assert columns["seq"].dtype == "int64"
    assert len(columns["kind"]) == len(rec.steps[0])


def test_information_is_counted_but_is_no_alarm(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 3)
    model[0].requires_grad_(False)
    seen = []
    with record(model, checks=None, on_violation="record") as rec:
        for by_hand in (False, True, False):
            train(model)
            if by_hand:
                model[2].unshard()
            rec.step()
            seen.append((rec.violation_count, rec.alarm_count, rec.scalars()["fsdp/violations"]))
    # Each step: layer 1, the first trainable one, prefetches layer 0, which is frozen and has no backward: information.
    # The second step: nobody reshards layer 2: an error.
    assert sorted((violation.step, violation.severity, violation.rule) for violation in rec.violations) == [
        (0, "info", "unused-gather"), (1, "error", "unpaired-unshard"), (1, "info", "unused-gather"),
        (2, "info", "unused-gather"),
    ]  # fmt: skip
    assert seen == [(1, 0, 0.0), (3, 1, 1.0), (4, 1, 1.0)]
