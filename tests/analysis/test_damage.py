"""Files as they are after a crash, a full disk, a bad copy: what is left is used, and what is wrong is said."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fsdptrace.analysis import NotATrace, load
from support.made import Made, run


def _text(made: Made) -> str:
    return "\n".join(made.lines) + "\n"


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotATrace, match="no such file or folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(NotATrace, match=r"no \.jsonl files in it; give the folder that `out` named"):
        load(tmp_path)


def test_foreign_and_empty_files_alone(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "hello"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00garbage")
    with pytest.raises(NotATrace, match="no trace that can be read") as caught:
        load(tmp_path)
    assert "not a file of fsdptrace" in str(caught.value)


def test_foreign_and_empty_files_beside_a_run(tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "run" / "data.jsonl").write_text('{"text": "hello"}\n')
    (tmp_path / "run" / "rank00007.node-9.jsonl").write_text("")
    report = load(tmp_path)
    assert report.ranks == [0, 1]
    told = sorted(str(problem) for problem in report.problems)
    assert len(told) == 2
    assert "data.jsonl: not a file of fsdptrace" in told[0]
    assert "rank00007.node-9.jsonl: empty: the process ended before its first line" in told[1]


def test_compressed_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "rank00000.node-1.jsonl.gz").write_bytes(b"x")
    with pytest.raises(NotATrace, match=r"1 compressed file \(rank00000\.node-1\.jsonl\.gz…\): unpack"):
        load(tmp_path)
    run(tmp_path)
    assert [problem.message.partition(" (")[0] for problem in load(tmp_path).problems] == ["1 compressed file"]


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """Opening a pipe that nobody writes to would last for ever."""
    (path, _) = run(tmp_path)
    os.mkfifo(path.with_name("rank00002.node-102.jsonl"))
    os.mkfifo(path.with_name(path.name.replace(".jsonl", ".tail")))
    report = load(tmp_path)
    assert (report.ranks, report.basis.events) == ([0, 1], 72)
    assert [str(problem) for problem in report.problems] == [
        f"{path.with_name('rank00002.node-102.jsonl')}: a pipe, socket or device, no file; left out"
    ]
    assert load(path).ranks == [0]
    with pytest.raises(NotATrace, match="neither a file nor a folder"):
        load(path.with_name("rank00002.node-102.jsonl"))


def test_another_schema(tmp_path: Path) -> None:
    run(tmp_path, ranks=1)
    (tmp_path / "run" / "rank00001.node-2.jsonl").write_text('{"schema": "fsdptrace/9", "rank": 1}\n')
    (problem,) = load(tmp_path).problems
    assert "schema 'fsdptrace/9', this fsdptrace reads 'fsdptrace/1'" in problem.message


def test_a_torn_last_line_is_the_end_of_a_killed_process(tmp_path: Path) -> None:
    made = Made(0, 1)
    made.step()
    made.unshard(0, 1000, "forward")
    made.write(tmp_path, _text(made) + '{"seq":20,"kind":"wai')
    report = load(tmp_path)
    assert report.processes[0].events == 19
    assert report.models[0].now == (1000, 0)  # what was gathered in the step that did not end
    assert report.models[0].rows[0].steps == 1  # which is not in the table
    assert [problem.message for problem in report.problems] == [
        "its last line is cut off, as a killed process or a copy leaves it"
    ]
    assert any(note.startswith("rank 0 (node-100): no end line") for note in report.notes)


def test_damaged_lines_are_counted_and_named(tmp_path: Path) -> None:
    made = Made(0, 1)
    made.step()
    made.step()
    made.end()
    made.lines[5] = "@@@@"
    made.lines[6] = '{"seq":"x","kind":"wait","group":0,"t0":1,"t1":2,"step":0,"bytes":1}'
    made.lines[7] = '{"seq":6,"kind":"wait","group":77,"t0":1,"t1":2,"step":0,"bytes":1}'
    made.lines[8] = "17"
    made.write(tmp_path)
    report = load(tmp_path)
    (problem,) = report.problems
    assert problem.message.startswith("lines 6, 7, 8, 9 cannot be read")
    assert report.processes[0].damaged == 4
    # The step that lost lines is no longer full; the other one is.
    assert [line.full for line in report.processes[0].steps] == [False, True]
    assert report.models[0].rows[0].steps == 1


@pytest.mark.parametrize("hit", range(0, 40, 3))
def test_any_damage_to_any_line_is_survived(tmp_path: Path, hit: int) -> None:
    made = Made(0, 1)
    made.step()
    made.step()
    made.end()
    hit = min(hit, len(made.lines) - 1)
    for text in ("", "{}", "null", '{"kind":"model"}', '{"kind":"step"}', "[" * 5000, made.lines[hit][:-7], "\x00" * 40):
        lines = [*made.lines[:hit], text, *made.lines[hit + 1 :]]
        made.write(tmp_path, "\n".join(lines) + "\n")
        try:
            report = load(tmp_path)
        except NotATrace:
            assert hit == 0
            continue
        json.dumps(report.to_json(steps=True))
        assert report.processes[0].damaged >= 1
        assert report.problems


def test_a_missing_rank(tmp_path: Path) -> None:
    for rank in (0, 3):
        made = Made(rank, 4)
        made.step()
        made.end()
        made.write(tmp_path)
    report = load(tmp_path)
    assert report.notes[0] == "no file of ranks 1-2 (2 of 4 ranks are here)"
    assert (report.basis.ranks, report.basis.world_size) == (2, 4)


def test_run_ids_that_nobody_agreed_on(tmp_path: Path) -> None:
    run(tmp_path, ranks=1, world=4, run_id_source="local")
    assert "set FSDPTRACE_RUN_ID to one value for all ranks" in load(tmp_path).notes[0]


def test_mixed_versions(tmp_path: Path) -> None:
    run(tmp_path, ranks=1, world=2)
    other = Made(1, versions={"fsdptrace": "0.1.0", "torch": "2.9.1"})
    other.line({"kind": "aurora", "t": 1})  # of a later version: skipped
    other.step()
    other.step()
    other.lines[-3] = json.dumps({**json.loads(other.lines[-3]), "novelty": [1, 2]})
    other.end()
    other.write(tmp_path)
    report = load(tmp_path)
    assert report.problems == []
    assert "ranks differ in their version of torch: 2.13.0 on rank 0; 2.9.1 on rank 1" in report.notes
    assert report.models[0].rows[0].steps == 4


def test_ranks_that_stand_apart(tmp_path: Path) -> None:
    for rank, steps in ((0, 3), (1, 1), (2, 3)):
        made = Made(rank, 3)
        for _ in range(steps):
            made.step()
        made.end()
        made.write(tmp_path)
    assert "ranks stand apart: rank 1 at step 0; the others at step 2" in load(tmp_path).notes


def test_the_collective_that_a_dead_process_was_in(tmp_path: Path) -> None:
    made = Made(0, 1)
    made.step()
    made.line({"kind": "entered", "t": 171, "what": "unshard", "model": 0, "group": 0})
    made.unshard(0, 1000, "forward")
    made.line({"kind": "entered", "t": 191, "what": "reduce_scatter", "model": 0, "group": 1})
    made.write(tmp_path)
    (note,) = (note for note in load(tmp_path).notes if "no end line" in note)
    assert note.endswith("it had entered the reduce-scatter of layers.1 and not left it")


def test_a_heartbeat_names_it_as_well_until_it_is_left(tmp_path: Path) -> None:
    made = Made(0, 1)
    inside = {"kind": "heartbeat", "t": 5, "last": 1, "step": 0, "collective": {"kind": "unshard", "model": 0, "group": 1}}
    made.line(inside)
    path = made.write(tmp_path)
    assert "all-gather of layers.1 and not left" in load(path).notes[0]
    made.line({"kind": "heartbeat", "t": 9, "last": 1, "step": 0})
    made.write(tmp_path)
    assert "not left" not in load(path).notes[0]


def test_a_running_step_in_the_tail(tmp_path: Path) -> None:
    made = Made(0, 1, options={"detail": "summary"})
    made.one_line_step()
    path = made.write(tmp_path)
    before = len(made.lines)
    made.unshard(0, 1000, "forward")
    made.unshard(1, 3000, "forward")
    path.with_suffix(".tail").write_text("\n".join(made.lines[before:]) + "\n")
    report = load(tmp_path)
    assert report.models[0].now == (4000, 0)
    assert report.models[0].unfinished
    assert [row.sums.gathers for row in report.models[0].rows] == [1, 1]


def test_the_tail_does_not_count_twice(tmp_path: Path) -> None:
    made = Made(0, 1)
    made.unshard(0, 1000, "forward")
    path = made.write(tmp_path)
    path.with_suffix(".tail").write_text("\n".join(made.lines[2:]) + "\n")
    assert load(tmp_path).processes[0].events == 1


def test_events_and_violations_that_were_dropped(tmp_path: Path) -> None:
    made = Made(0, 1)
    made.counts = {"unshard": 5, "violation": 2}
    made.end_step(step_dropped=7)
    made.line({"kind": "end", "events": 8, "dropped": 7, "violations": 2, "t": 99})
    made.write(tmp_path)
    notes = load(tmp_path).notes
    assert "7 events did not fit in memory and were dropped on rank 0; rules saw all of them" in notes
    assert "2 violations more were found whose lines were not kept" in notes


def test_an_exception_is_said(tmp_path: Path) -> None:
    made = Made(0, 1)
    made.event("exception", type="torch.OutOfMemoryError", unit=2)
    made.end_step(0)
    made.end()
    made.write(tmp_path)
    assert "torch.OutOfMemoryError left layers.1 in step 0 on rank 0" in load(tmp_path).notes
