"""Ways to read the same: the short one and the long one, one worker or several, files as people move them about."""

from __future__ import annotations

import cProfile
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import fsdptrace
from fsdptrace import events as ev
from fsdptrace.analysis import ProcessTrace, StepPart, check, find_runs, load, read_process, scan, workers
from fsdptrace.analysis.postmortem import postmortem
from fsdptrace.summary import rows_of
from support.made import Made, run

NEVER = re.compile(rb"(x{9})(x{9})(x{9})(x{9})(x{9})(x{9})(x{9})(x{9})|([^\n]*\n|[^\n]+)")


def _everything(path: str | Path) -> tuple[list[Any], Any]:
    parts: list[Any] = []

    def sink(part: StepPart) -> None:
        texts = [part.texts.get(i) for i in range(3)]
        parts.append((part.step, part.line, part.full, part.intact, part.contiguous, list(part.records), texts))

    (found,) = find_runs(path)[0]
    trace = read_process(found.sources[0], sink)
    return parts, (
        trace.events,
        trace.last_seq,
        trace.last_t,
        trace.entered,
        list(trace.steps),
        trace.damaged,
        trace.exceptions,
    )


def test_the_short_way_reads_what_the_long_way_reads(
    fake_pg: Callable[..., Any], record: Callable[..., fsdptrace.Recording], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)])
    mesh = fake_pg(4)
    for i, block in enumerate(model):
        model[i] = checkpoint_wrapper(block)  # regions, whose numbers no two lines share
        fully_shard(model[i], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, detail="full", checks=None, flush="collective") as recording:  # with `entered` lines between
        for _ in range(3):
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 9))
    recording.close()
    path = Path(recording.path)
    lines = path.read_text().splitlines(keepends=True)
    lines[20] = "@@@\n"
    lines[30] = lines[30].replace('"t0":', '"t0": ')
    path.write_text("".join(lines) + '{"seq":9999,"kind":"wai')
    taken = 0
    slowly = fsdptrace.analysis.lines.LineReader._slowly  # type: ignore[attr-defined]

    def counted(self: Any, number: int, row: scan.Row) -> None:
        nonlocal taken
        taken += 1
        slowly(self, number, row)

    monkeypatch.setattr("fsdptrace.analysis.lines.LineReader._slowly", counted)
    short = _everything(path)
    assert taken < len(lines) * 0.8  # the first line of each form, and those around the collective that was entered
    taken = 0
    monkeypatch.setattr(scan, "_LINE", NEVER)
    assert _everything(path) == short
    assert taken == len(lines) + 1
    assert sum(line.full for line in short[1][4]) >= 2


def test_a_line_that_says_more_than_its_form_is_read_the_long_way() -> None:
    forms = scan.Forms()
    row = scan._LINE.findall(b'{"seq":1,"kind":"wait","group":0,"t0":1,"t1":2,"step":0,"bytes":7,"seq":5}\n')[0]
    forms.learn(row, (2, 5, 1, 2, 0, 0, 0, 7, 0, 0, 0, 0), 0)  # JSON takes the last of two
    assert forms.known == {}
    assert scan.whole(row) == b'{"seq":1,"kind":"wait","group":0,"t0":1,"t1":2,"step":0,"bytes":7,"seq":5}\n'


def test_regions_are_told_apart_by_their_numbers() -> None:
    line = b'{"seq":7,"kind":"region","group":0,"t0":1,"t1":2,"step":0,"parent":3,"region":7,"saved":12}\n'
    row = scan._LINE.findall(line)[0]
    assert scan.whole(row) == line
    forms = scan.Forms()
    forms.learn(row, (ev.REGION, 7, 1, 2, 0, 3, 0, 7, 12, 0, 0, 0), 0)
    assert list(forms.known) == [(b'"kind":"region","group":0', b',"saved":12')]
    other = scan.Forms()
    other.learn(row, (ev.WAIT, 7, 1, 2, 0, 3, 0, 7, 0, 0, 0, 0), 0)  # of another kind: not its first field
    assert other.known == {}


def test_workers_give_the_same_answer(tmp_path: Path) -> None:
    run(tmp_path, ranks=3, steps=4)
    told: list[tuple[int, int]] = []
    alone = load(tmp_path, progress=lambda done, total: told.append((done, total)))
    total = sum(path.stat().st_size for path in tmp_path.rglob("*.jsonl"))
    assert told[-1] == (total, total)
    shared: list[tuple[int, int]] = []
    together = load(tmp_path, jobs=2, progress=lambda done, total: shared.append((done, total)))
    assert shared[-1] == (total, total)
    assert together.to_json(steps=True) == alone.to_json(steps=True)


def _dies(source: Any, advance: Any) -> None:
    os._exit(9)


def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    run(tmp_path, ranks=2)
    with pytest.raises(OSError, match=r"a worker that read files was killed .* FSDPTRACE_JOBS=1"):
        workers.each(find_runs(tmp_path)[0][0].sources, _dies, jobs=2)


def _goes_on(source: Any, advance: Any) -> None:
    while True:
        advance(1)


def test_ctrl_c_stops_workers_in_the_middle_of_a_file(tmp_path: Path) -> None:
    run(tmp_path, ranks=8)

    def progress(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        workers.each(find_runs(tmp_path)[0][0].sources, _goes_on, jobs=2, progress=progress)


def test_how_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert workers.cores() >= 1
    monkeypatch.setenv("FSDPTRACE_JOBS", "7")
    assert workers.cores() == 7


def test_lines_out_of_order(tmp_path: Path) -> None:
    """A step's lines shuffled by another tool: the ends of the calls put them back."""
    made = Made(0, 1)
    made.step()
    made.step()
    made.end()
    straight = load(made.write(tmp_path / "a")).models[0]
    first = made.lines[2:19]
    random.Random(1).shuffle(first)
    made.lines[2:19] = first
    report = load(made.write(tmp_path / "b"))
    assert [problem.message.partition(" (")[0] for problem in report.problems] == [
        "its lines are not in the order in which they were written"
    ]
    assert report.models[0].to_json() == straight.to_json()


def test_two_lines_that_changed_places(tmp_path: Path) -> None:
    """The gather of layers.0 after its use and its free would be a use of parameters that are not there."""
    made = Made(0, 1)
    made.step()
    made.end()
    made.lines[2], made.lines[5] = made.lines[5], made.lines[2]
    path = made.write(tmp_path)
    assert check(path).findings == []
    assert ["put in order" in problem.message for problem in load(path).problems] == [True]


def test_what_a_recorder_writes_out_of_order_stays(tmp_path: Path) -> None:
    """A flag that was seen in a call stands before the call, with a later time; two threads swap by microseconds."""
    made = Made(0, 1)
    made.event("flag", 0, name="reshard_after_backward", value=1)
    made.event("post_forward", 0, **{"pass": "forward"})
    made.event("post_forward", 1, thread=1, **{"pass": "forward"})
    flag, call, other = (json.loads(line) for line in made.lines[-3:])
    for event, begin, end in ((flag, 40, 41), (call, 20, 39), (other, 10, 38)):
        made.lines[made.lines.index(json.dumps(event))] = json.dumps({**event, "t0": begin, "t1": end})
    made.end_step()
    made.end()
    parts: list[StepPart] = []
    (found,), _ = find_runs(made.write(tmp_path))
    trace = read_process(found.sources[0], parts.append)
    assert [record[ev.SEQ] for record in rows_of(parts[0].records)] == [1, 2, 3, 4]
    assert trace.problems == []


def test_lines_that_stand_there_twice_count_once(tmp_path: Path) -> None:
    """As joining two copies leaves them. A second line does not stand for one that is missing."""
    made = Made(0, 1)
    made.step()
    made.step()
    made.end()
    straight = load(made.write(tmp_path / "a")).models[0]
    whole = list(made.lines)
    made.lines[4:4] = made.lines[2:4]
    twice = load(made.write(tmp_path / "b"))
    assert twice.models[0].to_json() == straight.to_json()
    assert ["events of step 0 stand there twice" in problem.message for problem in twice.problems] == [True]
    made.lines = [*whole[:2], whole[7], *whole[3:]]  # the second gather instead of the first
    assert [line.full for _, line in load(made.write(tmp_path / "c")).step_lines()] == [False, True]


def test_steps_out_of_order(tmp_path: Path) -> None:
    made = Made(0, 1)
    for _ in range(3):
        made.step()
    made.end()
    made.lines[2:56] = [*made.lines[20:38], *made.lines[2:20], *made.lines[38:56]]
    report = load(made.write(tmp_path))
    assert "step 0 comes again after step 1" in report.problems[0].message
    assert report.models[0].rows[0].steps == 3  # each is whole
    assert report.processes[0].events == 54


def test_nothing_is_concluded_from_an_order_that_nobody_wrote(tmp_path: Path) -> None:
    """All lines of one rank shuffled: no false alarm about ranks that part ways, no step that took less than nothing."""
    run(tmp_path, ranks=1, steps=3, world=2, versions={"torch": "2.13.0"})
    made = Made(1, 2)
    for _ in range(3):
        made.step()
        made.line({"kind": "entered", "what": "unshard", "model": 0, "group": 0, "t": made.tick * made.seq + 1})
    made.end()
    rest = made.lines[2:]
    random.Random(3).shuffle(rest)
    made.lines[2:] = rest
    made.write(tmp_path)
    for path in (tmp_path / "run").iterdir():  # of one process group, so that their collectives are compared
        path.write_text(path.read_text().replace('"sharded_bytes"', '"shard_group": "0:0,1", "sharded_bytes"'))
    loaded = load(tmp_path)
    assert [problem.path.name for problem in loaded.problems] == ["rank00001.node-101.jsonl"]
    assert min(line.duration_ns for _, line in loaded.step_lines()) >= 0
    judged = check(tmp_path, select=["all"])
    assert [finding.rule for finding in judged.findings] == []
    dead = postmortem(tmp_path)
    assert (dead.differences, dead.holding) == ([], [])


CLOCK = {"clock": {"perf_counter_ns": 77, "unix_ns": 1_000}}


def test_a_copy_counts_once(tmp_path: Path) -> None:
    (path,) = run(tmp_path, ranks=1, **CLOCK)
    copy = tmp_path / "run" / "backup" / "rank0-copy.jsonl"
    copy.parent.mkdir()
    copy.write_text("\n".join(path.read_text().splitlines()[:-3]) + "\n")  # taken while it was being written
    report = load(tmp_path)
    assert len(report.processes) == 1
    assert report.processes[0].end is not None
    (problem,) = report.problems
    assert (problem.path, "a copy of" in problem.message) == (copy, True)


def test_parts_whose_names_were_changed(tmp_path: Path) -> None:
    made = Made(0, 1, **CLOCK)
    for _ in range(3):
        made.step()
    made.end()
    head, rest = made.lines[:2], made.lines[2:]
    folder = tmp_path / "run"
    folder.mkdir()
    for name, lines in (("z", rest[:18]), ("a", rest[18:36]), ("m", rest[36:])):
        (folder / f"{name}.jsonl").write_text("\n".join([*head, *lines]) + "\n")
    report = load(tmp_path)
    assert [path.name for path in report.processes[0].source.parts] == ["z.jsonl", "a.jsonl", "m.jsonl"]
    assert report.problems == []
    assert [line.step for line in report.processes[0].steps] == [0, 1, 2]
    assert all(line.full for line in report.processes[0].steps)


def test_many_step_lines_are_small(tmp_path: Path) -> None:
    made = Made(0, 1)
    made.one_line_step(peak=7)
    made.one_line_step(peak=8)
    made.end()
    steps = load(made.write(tmp_path)).processes[0].steps
    assert [line.unsharded_peak for line in steps] == [7, 8]
    assert (steps[1].unsharded_peak, steps[-2].unsharded_peak, len(steps[:1])) == (8, 7, 1)
    assert (steps.full, steps.numbers, steps.last(0), steps.last(1), len(steps)) == (0, {0, 1}, 1, -1, 2)
    with pytest.raises(IndexError):
        steps[2]
    assert steps._flat.itemsize * len(steps._flat) == 2 * 14 * 8


def test_json_of_all_sections_is_plain(tmp_path: Path) -> None:
    run(tmp_path)
    data = json.loads(json.dumps(load(tmp_path).to_json()))
    model = data["models"][0]
    assert model["communication"]["wire_bytes"] == 4 * 4500
    assert model["prefetches"] == [{
        "direction": "backward", "mode": "implicit", "issued": 4, "used": 4, "late": 4, "wasted": 0, "waits": 4,
        "distance_ns": 4 * 30,
    }]  # fmt: skip
    assert [row["rank"] for row in data["ranks_compared"]["rows"]] == [0, 1]


def test_workers_end_with_the_process_that_they_read_for(tmp_path: Path) -> None:
    """A report that is killed leaves no process behind."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\n"
        "from fsdptrace.analysis import workers\n"
        "from fsdptrace.analysis.sources import Header, Source\n"
        "def slow(source, advance):\n"
        "    with open(sys.argv[1], 'a') as stream:\n"
        "        stream.write(f'{os.getpid()}\\n')\n"
        "    time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    from pathlib import Path\n"
        "    from types import SimpleNamespace\n"
        "    some = [SimpleNamespace(parts=[], tail=None) for _ in range(2)]\n"
        "    workers.each(some, slow, jobs=2)\n"
    )
    started = tmp_path / "started"
    parent = subprocess.Popen([sys.executable, str(program), str(started)])
    try:
        wait_until(lambda: started.exists() and len(started.read_text().split()) == 2)
        parent.kill()
        for pid in map(int, started.read_text().split()):
            wait_until(lambda pid=pid: not alive(pid))
    finally:
        parent.kill()
        parent.wait()


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process of that number runs (an ended one that nobody waited for does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_one_file_taught_serves_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand ranks with a step each, every line would be the first of its form; unless the models differ."""
    monkeypatch.setattr(scan, "lent", scan.Lent())
    taken: list[int] = []
    slowly = fsdptrace.analysis.lines.LineReader._slowly  # type: ignore[attr-defined]

    def counted(self: Any, number: int, row: scan.Row) -> None:
        taken.append(number)
        slowly(self, number, row)

    monkeypatch.setattr("fsdptrace.analysis.lines.LineReader._slowly", counted)
    dtypes = ["float32", "float32", "bfloat16", "float32"]
    for rank, dtype in enumerate(dtypes):
        made = Made(rank, 4)
        model = json.loads(made.lines[1])
        for group in model["groups"]:
            group["dtype"], group["sharded_bytes"] = dtype, 500 + rank
        made.lines[1] = json.dumps(model, separators=(",", ":"))
        made.event("region", 0, region=1, name=f"block of rank {rank}", **{"pass": "forward"})
        made.step()
        made.end()
        made.write(tmp_path, "".join(map(_as_recorded, made.lines)))
    seen = []
    for path in sorted((tmp_path / "run").iterdir()):
        before = len(taken)
        trace, steps = _parts(path)
        names = [part.texts.get(record[-1]) for part in steps for record in rows_of(part.records) if record[0] == ev.REGION]
        kinds = {record[9] for part in steps for record in rows_of(part.records) if record[0] == ev.UNSHARD}
        seen.append((len(taken) - before, trace.events, names, [ev.DTYPES[kind] for kind in kinds]))
    # Without help: the header, the model, the end and the step's line; the region; and 17 events of 17 forms.
    assert seen == [
        (22, 19, ["block of rank 0"], ["float32"]), (5, 19, ["block of rank 1"], ["float32"]),
        (22, 19, ["block of rank 2"], ["bfloat16"]), (5, 19, ["block of rank 3"], ["float32"]),
    ]  # fmt: skip


def _as_recorded(line: str) -> str:
    """A line with its fields in the order in which the recorder writes them."""
    data = json.loads(line)
    first = [name for name in ("seq", "kind", "pass", "group", "t0", "t1", "step", "parent", "region") if name in data]
    return json.dumps({name: data[name] for name in (*first, *data)}, separators=(",", ":")) + "\n"


def _parts(path: Path) -> tuple[ProcessTrace, list[StepPart]]:
    steps: list[StepPart] = []
    (found,), _ = find_runs(path)
    return read_process(found.sources[0], steps.append), steps


def test_a_step_of_one_line_costs_little(tmp_path: Path) -> None:
    """A long run has a million of them. Counted are calls, which no other program on the machine changes."""
    made = Made(0, 1)
    for _ in range(1000):
        made.one_line_step()
    made.end()
    made.write(tmp_path)
    profile = cProfile.Profile()
    loaded = profile.runcall(load, tmp_path)
    assert len(loaded.processes[0].steps) == 1000
    assert sum(entry.callcount for entry in profile.getstats()) < 200 * 1000  # 100 a step; copies of values took 300


def test_a_step_line_as_data(tmp_path: Path) -> None:
    made = Made(0, 1)
    made.step()
    made.end()
    made.write(tmp_path)
    (line,) = load(tmp_path).processes[0].steps
    assert line.to_json() == asdict(line)
    assert (line.to_json()["step"], line.to_json()["full"], line.to_json()["unsharded_peak"]) == (0, True, 4000)
