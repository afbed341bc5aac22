"""What a run adds up to, against numbers that a person worked out from traces made by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdptrace import events as ev
from fsdptrace.analysis import NotATrace, by_pattern, find_runs, load
from fsdptrace.analysis.records import record_of
from fsdptrace.files import read_event, read_file
from support.made import STEP_EVENTS, Made, run


def test_sums_per_unit(tmp_path: Path) -> None:
    run(tmp_path, ranks=2, steps=3)
    report = load(tmp_path)
    rows = {row.name: row for row in report.models[0].rows}
    assert list(rows) == ["layers.0", "layers.1"]
    first, second = rows["layers.0"], rows["layers.1"]
    assert (first.steps, first.bytes_low, first.bytes_high) == (6, 1000, 1000)
    assert (first.mean("gathers_forward"), first.mean("gathers_backward"), first.mean("reduce_scatters")) == (1, 1, 1)
    assert (second.mean("gathers_forward"), second.mean("gathers_backward"), second.mean("reduce_scatters")) == (1, 0, 1)
    # Two gathers of 1,000 B a step over 2 ranks: each rank receives the other's half.
    assert first.sums.gathered_bytes == 6 * 2 * 1000
    assert first.sums.wire_bytes == 6 * 2 * 500
    assert second.sums.reduced_bytes == 6 * 3000
    # From the begin of its gather to that of its free, 10 ns an event: 30 ns in forward and 60 in backward; 70 for layers.1.
    assert first.mean("lifetime_ns") == 90
    assert second.mean("lifetime_ns") == 70
    assert first.sums.wasted == second.sums.wasted == 0
    assert first.differs == ()


def test_memory_and_who_holds_it_at_the_peak(tmp_path: Path) -> None:
    run(tmp_path, steps=2)
    model = load(tmp_path).models[0]
    assert model.now == (0, 0)
    assert model.past_backward == (0, 0)
    peak = model.peak
    assert (peak.bytes, peak.rank, peak.step, peak.seq) == (4000, 0, 0, 11)
    assert peak.units == (("layers.1", 3000), ("layers.0", 1000))


def test_the_rank_that_holds_most_is_named(tmp_path: Path) -> None:
    run(tmp_path, ranks=1, world=2)
    other = Made(1)
    other.step()
    other.one_line_step(peak=9000, now=700, past=600)
    other.end()
    other.write(tmp_path)
    model = load(tmp_path).models[0]
    assert (model.peak.bytes, model.peak.rank, model.peak.step, model.peak.units) == (9000, 1, 1, ())
    assert model.now == (700, 1)
    assert model.past_backward == (600, 1)


def test_only_steps_with_all_events_count_in_the_table(tmp_path: Path) -> None:
    made = Made(0, 1)
    made.step()
    made.one_line_step()
    made.step()
    made.end()
    made.write(tmp_path)
    report = load(tmp_path)
    row = report.models[0].rows[0]
    assert row.steps == 2
    assert row.sums.gathers == 4
    assert [line.full for line in report.processes[0].steps] == [True, False, True]
    assert report.basis.steps == 3
    assert report.basis.full_rank_steps == 2
    assert report.basis.events == 2 * STEP_EVENTS + 4
    assert any("all events of 2 of 3 steps" in note for note in report.notes)


def test_what_is_open_is_not_guessed_over_a_gap(tmp_path: Path) -> None:
    made = Made(0, 1)
    made.unshard(0, 1000, "forward")
    made.end_step(peak=1000, now=1000)
    made.one_line_step()
    made.unshard(1, 3000, "forward")
    made.event("reshard", 1, bytes=3000, **{"pass": "forward"})
    made.end_step(peak=3000)
    made.end()
    made.write(tmp_path)
    model = load(tmp_path).models[0]
    assert model.peak.bytes == 4000  # of the step that was written as one line
    assert model.peak.units == ()


def test_ranks_that_differ_are_told_apart(tmp_path: Path) -> None:
    run(tmp_path, ranks=1, steps=1, world=2)
    other = Made(1)
    other.unshard(0, 1000, "forward")
    other.event("reshard", 0, bytes=1000)
    other.end_step(1000)
    other.end()
    other.write(tmp_path)
    row = load(tmp_path).models[0].rows[0]
    assert row.mean("gathers") == 1.5
    assert row.mean("wasted") == 0.5
    assert set(row.differs) == {"gathers", "wasted", "reduce_scatters"}


def test_rows_by_pattern() -> None:
    from fsdptrace.analysis.rows import UnitRow
    from fsdptrace.summary import GroupSummary

    rows = [
        UnitRow(f"layers.{i}.mlp", 1, 2, 100 + i, 100 + i, GroupSummary(i, f"layers.{i}.mlp", 100 + i, gathers_forward=2))
        for i in range(3)
    ]
    (row,) = by_pattern(rows)
    assert (row.name, row.units, row.steps, row.bytes_low, row.bytes_high) == ("layers.*.mlp", 3, 6, 100, 102)
    assert row.mean("gathers_forward") == 1
    assert rows[0].sums.gathers_forward == 2


def test_findings_are_put_together_by_rule_pattern_and_severity(tmp_path: Path) -> None:
    for rank in range(2):
        made = Made(rank)
        for step in range(2):
            made.step() if step else None
            for i in range(3):
                made.violation("gather-after-backward", f"layers.{i}.experts", bytes=100 * (i + 1), evidence=[3, 7 + i])
            made.violation("unused-gather", "layers.0", severity="warning")
            made.end_step()
        made.end()
        made.write(tmp_path)
    report = load(tmp_path)
    assert report.worst == "error"
    error, warning = report.findings
    assert (error.rule, error.pattern, error.severity) == ("gather-after-backward", "layers.*.experts", "error")
    assert (error.times, error.unit_count, error.ranks, error.steps) == (12, 3, [0, 1], [0, 2])
    assert (error.bytes, error.step_bytes) == (300, 600)
    assert (error.first.rank, error.first.step, error.first.seq, error.first.fqn) == (0, 0, 7, "layers.0.experts")
    assert error.first.evidence == (3, 7)
    assert error.first.message == "gather-after-backward at layers.0.experts"
    assert (warning.rule, warning.pattern, warning.times) == ("unused-gather", "layers.*", 4)


def test_the_newest_run_unless_told(tmp_path: Path) -> None:
    run(tmp_path, ranks=1, run_id="old", clock={"perf_counter_ns": 0, "unix_ns": 5})
    run(tmp_path, ranks=1, run_id="new", clock={"perf_counter_ns": 0, "unix_ns": 9})
    report = load(tmp_path)
    assert (report.id, report.others) == ("new", ["old"])
    assert load(tmp_path, "old").id == "old"
    assert load(tmp_path / "old").others == []
    with pytest.raises(NotATrace, match="no run 'nope'; there are: new, old"):
        load(tmp_path, "nope")


def test_attempts_of_a_run_are_apart(tmp_path: Path) -> None:
    run(tmp_path, ranks=1, run_id="job")
    again = Made(0, 1, "job", attempt=1, pid=500, clock={"perf_counter_ns": 0, "unix_ns": 2_000})
    again.end()
    path = again.write(tmp_path / "elsewhere")
    path.rename(tmp_path / "job" / "rank00000.node-500.jsonl")
    assert [found.label for found in find_runs(tmp_path)[0]] == ["job:1", "job"]
    assert load(tmp_path).attempt == 1
    assert load(tmp_path, "job:0").attempt == 0


def test_one_file_and_its_parts(tmp_path: Path) -> None:
    made = Made(0, 1)
    made.step()
    head = made.lines[:2]
    path = made.write(tmp_path)
    made.lines = list(head)
    made.step()
    made.end()
    path.with_name(path.name.replace(".jsonl", ".1.jsonl")).write_text("\n".join(made.lines) + "\n")
    report = load(path)
    assert len(report.processes) == 1
    assert [line.step for line in report.processes[0].steps] == [0, 1]
    assert report.models[0].rows[0].steps == 2
    assert report.processes[0].end is not None


def test_json_is_plain(tmp_path: Path) -> None:
    run(tmp_path)
    data = json.loads(json.dumps(load(tmp_path).to_json(steps=True)))
    assert data["schema"] == "fsdptrace-report/1"
    assert data["models"][0]["peak"]["units"] == [{"name": "layers.1", "bytes": 3000}, {"name": "layers.0", "bytes": 1000}]
    assert [step["rank"] for step in data["steps"]] == [0, 1, 0, 1]


def test_records_are_those_of_the_events(tmp_path: Path) -> None:
    """The short way from a line to its integers gives what the long one gives."""
    path = run(tmp_path, ranks=1)[0]
    trace = read_file(path)
    texts = ev.Texts()
    for raw in path.read_text().splitlines():
        data = json.loads(raw)
        if data.get("kind") in ev.KIND_NUMBER:
            event = read_event(data, trace.models[0])
            assert record_of(data, trace.models[0], texts) == ev.encode(event, texts)


def test_needs_no_torch(tmp_path: Path) -> None:
    run(tmp_path)
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from fsdptrace.analysis import load, check\n"
        f"load({str(tmp_path)!r}); check({str(tmp_path)!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
