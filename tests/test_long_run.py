"""A long run of a model with many groups: memory, disk and log stay where they are."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptrace import files
from support.models import sharded_chain, train

GROUPS, STEPS = 40, 100
CAPACITY = 5_000  # events; a step has 562, so that a few are held and the drain is behind at times
MAX_BYTES = 1 << 20


@pytest.mark.slow
def test_memory_disk_and_log_are_bounded(fake_pg: Any, record: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = sharded_chain(fake_pg(4), GROUPS, dim=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(2, 4)
    with caplog.at_level(logging.DEBUG, logger="fsdptrace"):
        with record(model, checks=None, detail="full", max_bytes=MAX_BYTES) as rec:
            session = rec._session
            ring = session.ring
            ring.capacity = CAPACITY
            most = 0
            for _ in range(STEPS):
                train(model, optimizer, x)
                steps = {id(step): step for step in (*ring.finished, *ring.kept, *ring.running.values())}
                most = max(most, len(ring) + sum(len(step.records) // 12 for step in steps.values()))
        rec.close()
    # What waits, what is kept and what the running step has, each within the capacity.
    assert most <= 2 * CAPACITY
    assert len(session.texts._texts) < 10
    assert rec.violations == []
    assert [step.number for step in rec.steps][-1] == STEPS - 1
    folder = Path(rec.path).parent
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_BYTES
    trace = files.read_file(rec.path)
    assert not trace.damaged
    assert trace.end is not None
    # Per layer: pre_forward, unshard, wait, post_forward, reshard; pre_backward, unshard, wait, post_backward, reshard,
    # reduce_scatter; param_change. Two more where it was prefetched (all but the last). Then forward, backward, the
    # optimizer's step and the step itself. Before all that, each layer's state.
    per_step = GROUPS * (5 + 6 + 1) + 2 * (GROUPS - 1) + 4
    assert trace.end["events"] == STEPS * per_step + GROUPS
    # Detail was lost to the bounds, steps were not, and each says all that it had.
    assert [summary["step"] for summary in trace.summaries] == list(range(STEPS))
    assert {sum(summary["counts"].values()) + 1 for summary in trace.summaries[1:]} == {per_step}
    assert trace.end["dropped"] == ring.dropped
    written = {event.step for event in trace.events if event.kind == "unshard"}
    assert STEPS - 1 in written
    assert len(written) < STEPS
    assert len([line for line in caplog.records if line.name.startswith("fsdptrace")]) <= 5


def collections_of(loop: Any) -> int:
    gc.collect()
    before = sum(generation["collections"] for generation in gc.get_stats())
    loop()
    return sum(generation["collections"] for generation in gc.get_stats()) - before


def test_recording_causes_no_garbage_collection(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 1)
    train(model)
    group = model[0]._get_fsdp_state()._fsdp_param_group

    def hooks() -> None:
        for _ in range(20_000):
            group.unshard()  # open already: nothing but the hook

    group.unshard()
    group.wait_for_unshard()
    hooks()
    alone = collections_of(hooks)
    with record(model, checks=None, on_violation="record", detail="full") as rec:
        hooks()
        recorded = collections_of(hooks)
    assert sum(step.counts.get("unshard", 0) for step in rec.steps) > 0
    assert (alone, recorded) == (0, 0)
