"""When units were gathered and when they computed, against times worked out from traces made by hand."""

from __future__ import annotations

from pathlib import Path

from fsdptrace import events as ev
from fsdptrace.analysis import find_runs, load, read_process
from fsdptrace.analysis.timeline import DISCARDED, OPEN, RESHARDED, UNKNOWN, ModelTimes, ProcessTimes, clock_offsets
from support.made import STEP_EVENTS, Made


def times_of(folder: Path, place: int = 0) -> ModelTimes:
    times = ProcessTimes()
    read_process(find_runs(folder)[0][0].sources[place], times)
    times.finish()
    return times.models[0]


def test_holds_uses_and_levels_of_a_step(tmp_path: Path) -> None:
    made = Made(0, 1)
    made.step()
    made.end()
    made.write(tmp_path)
    times = times_of(tmp_path)
    holds = [(h.group, h.seq, h.t0, h.ready, h.use_seq, h.t1, h.end_seq, h.end, h.bytes) for h in times.holds]
    # Event n begins at 10 n ns and takes 5.
    assert holds == [
        (0, 1, 10, 25, 3, 40, 4, RESHARDED, 1000),
        (1, 6, 60, 75, 8, 130, 13, RESHARDED, 3000),
        (0, 11, 110, 145, 15, 170, 17, RESHARDED, 1000),
    ]
    assert [hold.pass_ for hold in times.holds] == [ev.PASS_FORWARD, ev.PASS_FORWARD, ev.PASS_BACKWARD]
    assert [(hold.issuer, hold.prefetched) for hold in times.holds] == [(-1, False), (-1, False), (1, True)]
    # From the end of the pre-hook to the begin of the post-hook.
    assert [(use.group, use.seq, use.t0, use.t1) for use in times.uses] == [(0, 3, 35, 50), (1, 8, 85, 90)]
    assert times.levels == [(10, 1000), (40, 0), (60, 3000), (110, 4000), (130, 1000), (170, 0)]


def test_ends_that_are_no_free(tmp_path: Path) -> None:
    made = Made(0, 1)
    made.unshard(0, 1000, "forward")  # never freed
    made.unshard(1, 3000, "backward")
    made.event("discard", 1, bytes=3000)
    made.end_step(4000, now=1000)
    made.write(tmp_path)
    times = times_of(tmp_path)
    assert [(hold.group, hold.t1, hold.end, hold.used) for hold in times.holds] == [
        (0, 45, OPEN, False),  # the last moment known: the end of the step's line
        (1, 30, DISCARDED, False),
    ]


def test_nothing_is_drawn_over_a_gap(tmp_path: Path) -> None:
    made = Made(0, 1)
    made.unshard(0, 1000, "forward")
    made.end_step(1000, now=1000)
    made.one_line_step()
    made.unshard(1, 3000, "forward")
    made.event("reshard", 1, bytes=3000)
    made.end_step(3000)
    made.end()
    made.write(tmp_path)
    times = times_of(tmp_path)
    assert [(hold.group, hold.end) for hold in times.holds] == [(0, UNKNOWN), (1, RESHARDED)]
    assert times.holds[0].t1 == 25
    assert times.levels[-1] == (times.holds[1].t1, 0)


def test_what_was_open_at_the_start_counts(tmp_path: Path) -> None:
    made = Made(0, 1)
    made.event("state", 0, sharded="unsharded", pending=False, training="idle", order=0, bytes=1000)
    made.event("state", 1, sharded="sharded", pending=False, training="idle", order=0, bytes=3000)
    made.event("reshard", 0, bytes=1000)
    made.end_step(1000)
    made.write(tmp_path)
    times = times_of(tmp_path)
    assert [(hold.group, hold.seq, hold.t0, hold.t1) for hold in times.holds] == [(0, 0, 10, 30)]
    assert times.levels == [(10, 1000), (30, 0)]


def test_only_wanted_steps(tmp_path: Path) -> None:
    made = Made(0, 1)
    for _ in range(3):
        made.step()
    made.end()
    made.write(tmp_path)
    times = ProcessTimes(lambda model, step: step == 1)
    read_process(find_runs(tmp_path)[0][0].sources[0], times)
    times.finish()
    assert [hold.seq for hold in times.models[0].holds] == [STEP_EVENTS + 1 + i for i in (0, 5, 10)]


def test_clocks(tmp_path: Path) -> None:
    clocks = [
        ("a", 1_000, 5_001_000),  # offset 5,000,000
        ("a", 9_000, 5_009_700),  # the same host: its own would be 700 ns off, since the clock was set in between
        ("b", 2_000, 8_002_000),  # another host: its own clock is all there is
        ("a", 0, 90_000_000_000),  # named alike, but another boot: its monotonic clock is another
        ("c", 0, 0),  # no clock in the header
    ]
    for rank, (host, perf, unix) in enumerate(clocks):
        made = Made(rank, 5, host=host, clock={"perf_counter_ns": perf, "unix_ns": unix})
        made.step()
        made.end()
        made.write(tmp_path)
    offsets = clock_offsets(load(tmp_path).processes)
    assert offsets == [5_000_000, 5_000_000, 8_000_000, 90_000_000_000, 5_000_000]
