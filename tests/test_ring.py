"""The buffer between training and drain: bounded, split into steps, with what matters kept."""

from __future__ import annotations

import threading

from fsdptrace import events as ev
from fsdptrace.ring import KEPT_STEPS, Ring


def record(kind: int, seq: int, model: int = 0, thread: int = 0) -> tuple[int, ...]:
    return (kind, seq, 1, 2, 0, 0, ev.MODEL_UNIT * model + ev.THREAD_UNIT * thread, 0, 0, 0, 0, 0)


def seqs(records: list[int]) -> list[int]:
    return records[ev.SEQ :: ev.WIDTH]


def held(ring: Ring) -> int:
    """Events in memory, wherever they lie, each counted once."""
    steps = {id(step): step for step in (*ring.finished, *ring.kept, *ring.rescued, *ring.running.values())}
    return len(ring) + sum(len(step.records) // ev.WIDTH for step in steps.values())


def test_steps_are_split() -> None:
    ring = Ring()
    for seq, kind in enumerate((ev.UNSHARD, ev.STEP, ev.WAIT, ev.WAIT, ev.STEP, ev.UNSHARD), 1):
        ring.append(record(kind, seq))
    assert len(ring) == 6
    ring.pump()
    assert len(ring) == 0
    assert [(step.step, seqs(step.records)) for step in ring.take()] == [(0, [1, 2]), (1, [3, 4, 5])]
    assert (ring.running[0].step, seqs(ring.running[0].records)) == (2, [6])
    ring.append(record(ev.STEP, 7))
    ring.pump()
    assert [(step.step, seqs(step.records), step.events) for step in ring.take()] == [(2, [6, 7], 2)]


def test_models_are_split() -> None:
    ring = Ring()
    for seq, (kind, model) in enumerate(
        ((ev.UNSHARD, 0), (ev.UNSHARD, 1), (ev.STEP, 0), (ev.WAIT, 1), (ev.UNSHARD, 0), (ev.STEP, 1), (ev.WAIT, 255)), 1
    ):
        ring.append(record(kind, seq, model, thread=seq % 2))
    ring.pump()
    assert [(step.model, seqs(step.records)) for step in ring.take()] == [(0, [1, 3]), (1, [2, 4, 6])]
    assert {model: seqs(step.records) for model, step in ring.running.items() if step.records} == {0: [5], 255: [7]}


def test_violations_are_counted() -> None:
    ring = Ring()
    for seq, kind in enumerate((ev.VIOLATION, ev.UNSHARD, ev.VIOLATION), 1):
        ring.append(record(kind, seq))
        ring.pump()
    assert ring.running[0].violations == 2


def test_finished_steps_stay_within_the_capacity() -> None:
    ring = Ring(capacity=1000)
    seq = 0
    for step in range(500):
        for kind in (*[ev.UNSHARD] * 20, *[ev.VIOLATION] * (step % 10 == 0), ev.STEP):
            seq += 1
            ring.append(record(kind, seq))
        ring.pump()
        assert held(ring) <= 1000 + 2 * (step + 1)  # what is rescued: a step's own record and its violations
    taken = ring.take()
    # All steps are there, in order, and know what they had. The newest have all their events, the others their own
    # record and their violations.
    assert [step.step for step in taken] == list(range(500))
    assert len(taken[-1].records) == 21 * ev.WIDTH
    first = taken[0]
    assert first.records[ev.KIND :: ev.WIDTH] == [ev.VIOLATION, ev.STEP]
    assert (first.dropped, first.events) == (20, 22)
    assert +first.cut == {ev.UNSHARD: 20}
    kept = sum(len(step.records) // ev.WIDTH for step in taken)
    assert kept + ring.dropped == seq
    assert ring.dropped == sum(step.dropped for step in taken)


def test_a_step_without_end_stays_within_the_capacity() -> None:
    ring = Ring(capacity=1000)
    for seq in range(1, 20_001):
        ring.append(record(ev.VIOLATION if seq == 7 else ev.UNSHARD, seq))
        if seq % 100 == 0:
            ring.pump()
            assert held(ring) <= 1000
    step = ring.running[0]
    assert seqs(step.records)[-1] == 20_000  # the newest are there
    assert step.events == 20_000
    assert step.cut[ev.UNSHARD] + len(step.records) // ev.WIDTH == 20_000
    assert ring.dropped == step.dropped
    assert ring.dropped + len(step.records) // ev.WIDTH == 20_000
    # A violation is not lost among the events around it.
    assert ev.VIOLATION in step.records[ev.KIND :: ev.WIDTH]


def test_what_was_written_is_not_counted_as_dropped() -> None:
    ring = Ring(capacity=1000)
    for seq in range(1, 5001):
        ring.append(record(ev.UNSHARD, seq))
        if seq % 100 == 0:
            ring.pump()
            ring.running[0].written = len(ring.running[0].records)
    assert ring.dropped == 0
    assert held(ring) <= 1000


def test_kept_steps() -> None:
    ring = Ring()
    for seq in range(1, 21):
        ring.append(record(ev.STEP, seq))
    ring.pump()
    ring.take()
    assert [seqs(step.records) for step in ring.kept] == [[20 - KEPT_STEPS + i + 1] for i in range(KEPT_STEPS)]


def test_full_says_when_somebody_should_pump() -> None:
    ring = Ring(capacity=1000)
    for seq in range(250):
        ring.append(record(ev.UNSHARD, seq))
    assert not ring.full()
    ring.append(record(ev.UNSHARD, 250))
    assert ring.full()
    with ring.lock:
        ring.pump_if_free()  # somebody else does it: no waiting
        assert len(ring) == 251
    ring.pump_if_free()
    assert len(ring) == 0


def test_nothing_is_lost_or_torn_between_threads() -> None:
    # Two training threads append whole records while a third one pumps.
    ring = Ring(capacity=10**6)
    done = threading.Event()

    def append(thread: int) -> None:
        for seq in range(20_000):
            ring.append(record(ev.UNSHARD, seq, thread=thread))

    def pump() -> None:
        while not done.is_set():
            ring.pump()

    pumping = threading.Thread(target=pump)
    training = [threading.Thread(target=append, args=(thread,)) for thread in range(2)]
    pumping.start()
    for one in training:
        one.start()
    for one in training:
        one.join()
    done.set()
    pumping.join()
    ring.pump()
    records = ring.running[0].records
    assert len(records) == 40_000 * ev.WIDTH
    for thread in range(2):
        mine = [
            records[i + ev.SEQ] for i in range(0, len(records), ev.WIDTH) if records[i + ev.CONTEXT] == thread * ev.THREAD_UNIT
        ]
        assert mine == list(range(20_000))


def test_clear() -> None:
    ring = Ring()
    append = ring.append
    append(record(ev.UNSHARD, 1))
    ring.pump()
    append(record(ev.UNSHARD, 2))
    ring.clear()
    assert held(ring) == 0
    append(record(ev.STEP, 3))  # bound once, and still the same buffer
    ring.pump()
    assert [seqs(step.records) for step in ring.take()] == [[3]]
