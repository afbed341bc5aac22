"""A run while it goes on, from files that grow under the reader's eyes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from fsdptrace.analysis import live
from fsdptrace.analysis.live import RankNow, RunWatch
from support.made import Made, run


class Growing:
    """A file that is written line by line while it is watched."""

    def __init__(self, folder: Path, **header: object) -> None:
        now = {"perf_counter_ns": time.perf_counter_ns(), "unix_ns": time.time_ns()}
        self.made = Made(0, 2, **{"clock": now, **header})
        self.path = self.made.write(folder)
        self.written = len(self.made.lines)
        self.watch = RunWatch(folder)

    def look(self) -> RankNow:
        """Writes what was made since, and looks."""
        with open(self.path, "a") as stream:
            stream.write("".join(line + "\n" for line in self.made.lines[self.written :]))
        self.written = len(self.made.lines)
        (rank,) = self.watch.look().ranks
        return rank

    def beat(self, **data: object) -> None:
        self.made.line({"kind": "heartbeat", "t": time.perf_counter_ns(), "last": self.made.seq, "step": 0, **data})


def test_what_is_gathered_as_it_goes(tmp_path: Path) -> None:
    growing = Growing(tmp_path)
    assert growing.look() == RankNow(0, 2, "", "node", idle_s=pytest.approx(0, abs=5))
    growing.made.unshard(0, 1000, "forward")
    growing.made.unshard(1, 3000, "forward")
    growing.made.unshard(1, 0, "forward", noop="open")
    now = growing.look()
    assert (now.step, now.gathered, now.open) == (0, 4000, [("layers.1", 3000), ("layers.0", 1000)])
    growing.made.event("reshard", 1, bytes=3000)
    assert growing.look().gathered == 1000
    growing.made.end_step(peak=4000, now=1000, past=1000)
    now = growing.look()
    assert (now.step, now.gathered, now.peak, now.past_backward, now.step_ns) == (1, 1000, 4000, 1000, 0)
    growing.made.event("discard", 0, bytes=1000)
    growing.made.end_step(peak=1000)
    now = growing.look()
    assert (now.step, now.gathered, now.open, now.past_backward, now.step_ns) == (2, 0, [], 0, 20)
    growing.made.end()
    now = growing.look()
    assert (now.ended, now.step) == ("ended", 1)  # the last one there was
    assert growing.watch.look().over


def test_a_torn_line_waits_for_its_rest(tmp_path: Path) -> None:
    growing = Growing(tmp_path)
    growing.made.unshard(0, 1000, "forward")
    line = growing.made.lines[-1]
    with open(growing.path, "a") as stream:
        stream.write(line[:40])
    assert growing.watch.look().ranks[0].gathered == 0
    with open(growing.path, "a") as stream:
        stream.write(line[40:] + "\nno json at all\n")
    assert growing.watch.look().ranks[0].gathered == 1000


def test_what_was_found_last(tmp_path: Path) -> None:
    growing = Growing(tmp_path)
    growing.made.violation("unused-gather", "layers.0", severity="warning")
    growing.made.violation("policy-ignored", "layers.0", severity="info")
    growing.look()
    assert (growing.watch.look().last.rule, growing.watch.look().ranks[0].warnings) == ("unused-gather", 1)  # type: ignore[union-attr]
    growing.made.violation("gather-after-backward", "layers.1")
    growing.made.violation("unused-gather", "layers.1", severity="warning")
    now = growing.look()
    assert (now.errors, now.warnings) == (1, 2)
    last = growing.watch.look().last
    assert last is not None
    assert (last.rule, last.fqn, last.message) == ("gather-after-backward", "layers.1", "gather-after-backward at layers.1")


def test_where_a_rank_is_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SILENT", 0.3)
    growing = Growing(tmp_path)
    growing.beat(collective={"kind": "unshard", "model": 0, "group": 1})
    now = growing.look()
    assert (now.inside, now.ended) == ("all-gather of layers.1", "")
    first = time.monotonic()
    time.sleep(0.2)
    growing.beat(collective={"kind": "unshard", "model": 0, "group": 1})
    now = growing.look()
    assert 0.2 <= now.inside_s <= time.monotonic() - first + 0.1
    time.sleep(0.35)
    now = growing.look()
    assert now.ended == "silent"
    assert now.idle_s >= 0.35
    growing.beat()
    now = growing.look()
    assert (now.ended, now.inside) == ("", "")


def test_what_grows_too_fast_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST", 20_000)
    monkeypatch.setattr(live, "KEPT", 2_000)
    made = Made(0, 1)
    for _ in range(50):
        made.step()
    made.unshard(0, 1000, "forward")
    made.write(tmp_path)
    growing = RunWatch(tmp_path)
    now = growing.look().ranks[0]
    assert now.step == 50
    assert (now.gathered, now.peak) == (1000, 4000)  # the step before ended within what was read: since then all is known
    for _ in range(60):
        made.unshard(1, 3000, "forward")
        for _ in range(60):
            made.event("pre_forward", 1)
    path = made.write(tmp_path)
    assert path.stat().st_size > 40_000
    assert growing.look().ranks[0].gathered is None  # no step has ended since
    made.end_step(peak=4000, now=3000)
    made.write(tmp_path)
    assert growing.look().ranks[0].gathered is None
    made.end_step(peak=4000, now=0)
    made.write(tmp_path)
    assert growing.look().ranks[0].gathered == 0


def test_further_parts_and_thinned_ones(tmp_path: Path) -> None:
    growing = Growing(tmp_path)
    growing.made.step()
    assert growing.look().step == 1
    head = growing.made.lines[:2]
    growing.path.write_text("\n".join(head) + "\n")  # thinned
    second = growing.path.with_name(growing.path.name.replace(".jsonl", ".1.jsonl"))
    growing.made.lines = list(head)
    growing.made.step()
    growing.made.unshard(1, 3000, "forward")
    second.write_text("\n".join(growing.made.lines) + "\n")
    now = growing.watch.look().ranks[0]
    assert (now.step, now.gathered) == (2, 3000)


def test_the_tail_of_a_step_that_is_not_written(tmp_path: Path) -> None:
    growing = Growing(tmp_path)
    growing.made.one_line_step()
    growing.look()
    lines = len(growing.made.lines)
    growing.made.unshard(1, 3000, "forward")
    tail = growing.path.with_name(growing.path.stem + ".tail")
    tail.write_text("\n".join(growing.made.lines[lines:]) + "\n")
    assert growing.watch.look().ranks[0].open == [("layers.1", 3000)]
    growing.made.event("reshard", 1, bytes=3000)
    growing.made.unshard(0, 1000, "forward")
    tail.write_text("\n".join(growing.made.lines[lines:]) + "\n")
    assert growing.watch.look().ranks[0].open == [("layers.0", 1000)]


def test_ranks_that_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LOOK_FOR_FILES", 0.0)
    run(tmp_path, ranks=1, world=2)
    watch = RunWatch(tmp_path)
    assert [rank.rank for rank in watch.look().ranks] == [0]
    run(tmp_path, ranks=2)
    (tmp_path / "other").mkdir()
    run(tmp_path / "other", ranks=1, run_id="newer", clock={"perf_counter_ns": 0, "unix_ns": 5_000})
    now = watch.look()
    assert [rank.rank for rank in now.ranks] == [0, 1]  # and no other run's
    assert now.label == "run"


def test_hostile_lines_change_nothing(tmp_path: Path) -> None:
    growing = Growing(tmp_path)
    for line in (
        {"kind": "unshard", "group": 99, "bytes": "x", "t1": 1, "step": 0}, {"kind": "step"}, {"kind": "heartbeat", "t": None},
        {"kind": "violation"}, {"kind": "model", "groups": 3}, {"kind": "entered", "what": [], "group": {}},
    ):  # fmt: skip
        growing.made.lines.append(json.dumps(line))
    growing.made.unshard(0, 1000, "forward")
    now = growing.look()
    assert now.gathered == 1000
