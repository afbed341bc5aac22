"""What is on disk: names, modes, header, lines, bounds; and that they are read back."""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import schedule

import fsdptrace
from fsdptrace import files
from fsdptrace.disk import TraceWriter
from support.models import sharded_chain, train
from support.programs import PROGRAMS
from support.torches import RELEASE

HEADER = '{"schema":"fsdptrace/1","rank":0}\n'
MODEL = '{"kind":"model","model":0,"root":"Net","units":[],"groups":[]}\n'


def lines_of(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for part in files.parts_of(Path(path)) for line in part.read_text().splitlines()]


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


# -- a recording's file ------------------------------------------------------------------------------------------------
def test_header_and_last_line(fake_pg: Any, record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=secret-token")
    monkeypatch.setenv("FSDPTRACE_ROLE", "actor")
    old = os.umask(0)  # whatever the umask, the trace is the user's own
    try:
        model = sharded_chain(fake_pg(4, rank=2), 1)
        with record(model, on_violation=lambda violation: None, run_id="run-1") as rec:
            train(model)
        rec.close()
    finally:
        os.umask(old)
    path = Path(rec.path)
    assert path.parent == tmp_path / "out" / "run-1"
    assert path.name.startswith("actor-rank00002.")
    assert path.name.endswith(f"-{os.getpid()}.jsonl")
    assert (mode(path), mode(path.parent), mode(path.parent.parent)) == (0o600, 0o700, 0o700)
    lines = lines_of(path)
    header = lines[0]
    assert set(header) >= {
        "schema", "rank", "world_size", "local_rank", "role", "host", "pid", "run_id", "run_id_source", "attempt", "versions",
        "options", "clock", "coverage",
    }  # fmt: skip
    assert (header["schema"], header["rank"], header["world_size"], header["role"]) == ("fsdptrace/1", 2, 4, "actor")
    assert (header["run_id"], header["run_id_source"], header["pid"]) == ("run-1", "option", os.getpid())
    assert header["versions"]["torch"] == torch.__version__
    assert header["options"]["on_violation"] == "function"
    # The clock: what perf_counter_ns showed at a Unix time.
    clock = header["clock"]
    now = time.time_ns() - (time.perf_counter_ns() - clock["perf_counter_ns"])
    assert abs(now - clock["unix_ns"]) < 1_000_000_000
    assert "secret-token" not in path.read_text()
    model_line = lines[1]
    assert (model_line["kind"], model_line["model"], model_line["root"]) == ("model", 0, "Sequential")
    assert model_line["groups"][0]["fqn"] == "0"
    end = lines[-1]
    # state, forward, pre_forward, unshard, wait, post_forward, reshard; backward, pre_backward, unshard, wait,
    # post_backward, reshard, reduce_scatter; step.
    assert (end["kind"], end["events"], end["dropped"], end["violations"]) == ("end", 15, 0, 0)


@pytest.mark.parametrize("name", ["plain", "checkpointing_nested", "explicit_prefetch", "several_groups_per_module"])
def test_a_file_reads_back_as_it_was_recorded(fake_pg: Any, record: Any, name: str) -> None:
    program = next(program for program in PROGRAMS if program.name == name)
    if name == "several_groups_per_module" and RELEASE < (2, 13):
        pytest.skip("torch 2.13 and newer: one module can have param groups on several meshes")
    running = program.build(fake_pg(4))
    with record(running.models) as rec:
        running.step()
        running.step()
    recorded = rec.steps
    rec.close()
    trace = files.read_file(rec.path)
    assert trace.complete
    assert trace.damaged == []
    assert trace.models[0] == rec.model_map()
    for step in recorded:
        mine = sorted((event for event in trace.events if event.step == step.number), key=lambda event: event.seq)
        assert len(mine) == len(step)
        for read, event in zip(mine, step, strict=True):
            if event.kind != "step":
                assert read == event
    for summary, step in zip(trace.summaries, recorded, strict=True):
        assert summary["counts"] == {kind: number for kind, number in step.counts.items() if kind != "step"}


def test_size_of_an_event_on_disk(fake_pg: Any, record: Any) -> None:
    # A real model: names, activation checkpointing, prefetches, an optimizer.
    program = next(program for program in PROGRAMS if program.name == "checkpointing")
    running = program.build(fake_pg(4))
    with record(running.models, detail="full") as rec:
        for _ in range(12):
            running.step()
    rec.close()
    lines = Path(rec.path).read_text().splitlines(keepends=True)
    events = [line for line in lines if '"seq":' in line]
    assert len(events) > 500
    assert sum(map(len, events)) / len(events) <= 160


def test_detail(fake_pg: Any, record: Any, tmp_path: Path) -> None:
    model = sharded_chain(fake_pg(4), 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def detailed(**options: Any) -> list[int]:
        with record(model, out=str(tmp_path / repr(len(list(tmp_path.iterdir())))), **options) as rec:
            first = rec._recorded[0].engine.tracker.step_number
            for _ in range(120):
                train(model, optimizer)
        rec.close()
        trace = files.read_file(rec.path)
        # Every step has its own line, with the counts of all its events.
        assert [summary["step"] - first for summary in trace.summaries] == list(range(120))
        assert {summary["counts"]["unshard"] for summary in trace.summaries} == {2}
        assert trace.complete
        return sorted({event.step - first for event in trace.events if event.kind == "unshard"})

    assert detailed() == [*range(10), 100]
    assert detailed(detail="summary") == []
    assert detailed(detail="full") == list(range(120))
    # As torch.profiler counts: 2 steps skipped, then 3 waiting, 1 warming up, 2 recorded, twice.
    chosen = schedule(skip_first=2, wait=3, warmup=1, active=2, repeat=2)
    assert detailed(schedule=chosen) == [6, 7, 12, 13]


def test_a_step_with_a_violation_has_its_detail(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, checks="gather-after-backward", on_violation="record", detail="summary") as rec:
        for i in range(6):
            model[0].set_modules_to_backward_prefetch([model[2]] if i == 3 else [])
            train(model, optimizer)
    rec.close()
    trace = files.read_file(rec.path)
    assert {event.step for event in trace.events if event.kind == "unshard"} == {3}
    (violation,) = files.violations_of(trace.events)
    assert (violation["rule"], violation["step"], violation["fqn"], violation["group"]) == ("gather-after-backward", 3, "2", 2)
    # The evidence is in the file.
    assert {event.seq for event in trace.events} >= set(violation["evidence"])
    assert trace.end is not None
    assert trace.end["violations"] == 1


def test_flush_and_heartbeat(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 1)
    with record(model, detail="full") as rec:
        train(model)
        rec.flush()
        trace = files.read_file(rec.path)
        assert not trace.complete
        assert [event.kind for event in trace.events] == [event.kind for event in sorted_by_end(rec.events)]
        assert trace.heartbeats
        assert all(beat["step"] == 0 and beat["last"] <= 14 for beat in trace.heartbeats)


def sorted_by_end(events: list[fsdptrace.Event]) -> list[fsdptrace.Event]:
    # A call is recorded when it ends; what is recorded for it inside shares its end and comes first.
    order = {event.seq: i for i, event in enumerate(sorted(events, key=lambda event: (event.t1, -event.seq)))}
    reductions = {event.seq for event in events if event.kind in ("reduce_scatter", "all_reduce")}
    assert reductions
    return sorted(events, key=lambda event: order[event.seq])


def test_recordings_of_one_process_share_a_file_where_they_agree(fake_pg: Any, record: Any) -> None:
    mesh = fake_pg(4)
    one, two = sharded_chain(mesh, 1), sharded_chain(mesh, 2)
    with record(one, run_id="r") as first:
        train(one)
        with record(two, run_id="r") as second:
            train(two)
        with record(two, run_id="r", detail="full") as third:  # another file, beside it
            train(two)
    for rec in (first, third):
        rec.close()
    assert first.path == second.path
    assert Path(third.path).parent == Path(first.path).parent
    assert third.path != first.path
    assert [model.model for model in files.read_file(first.path).models.values()] == [0, 1]
    assert len(files.find_files(Path(first.path).parents[1])) == 2
    assert not files.read_file(third.path).damaged


def test_an_old_file_of_the_same_name_is_left_alone(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 1)
    with record(model, run_id="r") as rec:
        train(model)
    rec.close()
    before = Path(rec.path).read_bytes()
    with record(model, run_id="r") as again:
        train(model)
    again.close()
    assert again.path != rec.path
    assert Path(rec.path).read_bytes() == before
    assert files.read_file(again.path).complete


def test_unwritable_folder(
    fake_pg: Any, record: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    model = sharded_chain(fake_pg(4), 1)
    with caplog.at_level(logging.WARNING), record(model, out=str(tmp_path / "file" / "out")) as rec:
        train(model)
        rec.flush()
    assert [line.getMessage() for line in caplog.records if line.name == "fsdptrace"] == [
        f"cannot write to {tmp_path}/file/out: Not a directory; files go to {tmp_path}/temporary/fsdptrace-out-{os.getuid()} "
        "instead (set out=... or FSDPTRACE_OUT)"
    ]
    rec.close()
    assert files.read_file(rec.path).complete
    assert rec.path.startswith(str(tmp_path / "temporary"))
    # And where that cannot be written either: no trace, and training goes on.
    caplog.clear()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING), record(model, out=str(tmp_path / "file" / "other")) as rec:
        train(model)
        rec.flush()
        train(model)
    rec.close()
    messages = [line.getMessage() for line in caplog.records if line.name == "fsdptrace"]
    assert len(messages) == 2
    assert "There is no trace; checks and training go on" in messages[1]
    assert rec.steps[-1].counts["forward"] == 2
    assert rec.faults == 0


def test_without_out_files_go_to_the_working_folder(fake_pg: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = sharded_chain(fake_pg(4), 1)
    with fsdptrace.record(model) as rec:
        train(model)
    rec.close()
    assert Path(rec.path).parents[1] == tmp_path / "fsdptrace-out"


def test_the_log_is_quiet(fake_pg: Any, record: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = sharded_chain(fake_pg(4))
    model[0].set_modules_to_backward_prefetch([model[2]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with caplog.at_level(logging.DEBUG, logger="fsdptrace"):
        with record(model, checks="gather-after-backward") as rec:
            for _ in range(1000):
                train(model, optimizer)
        rec.close()
    lines = [line for line in caplog.records if line.name.startswith("fsdptrace")]
    assert len(rec.violations) == 1000
    assert 1 <= len(lines) <= 5
    # The first one says what and where, the last one how often and where to read on.
    assert "gather-after-backward" in lines[0].getMessage()
    assert "set_modules_to_backward_prefetch" in lines[0].getMessage()
    assert "1,000 times" in lines[-1].getMessage()
    assert str(Path(rec.path).parent) in lines[-1].getMessage()
    # The host's own logging was left as it was.
    assert logging.getLogger("fsdptrace").handlers == []


# -- the writer alone --------------------------------------------------------------------------------------------------
def writer(folder: Path, max_bytes: int, complaints: list[str] | None = None) -> TraceWriter:
    made = TraceWriter(folder, "rank00000.h-1", max_bytes, lambda: HEADER + MODEL, (complaints or []).append)
    made.open()
    return made


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def event(seq: int, kind: str = "wait") -> str:
    return f'{{"seq":{seq},"kind":"{kind}","t0":1,"t1":2,"step":0,"bytes":8}}\n'


def step_line(seq: int, step: int) -> str:
    return (
        f'{{"seq":{seq},"kind":"step","t0":1,"t1":2,"step":{step},"unsharded_bytes":0,"unsharded_peak":0,'
        '"past_backward_bytes":0,"dropped":0}\n'
    )


def test_rotation_keeps_what_matters(tmp_path: Path) -> None:
    limit = 1 << 16
    out = writer(tmp_path / "run", limit)
    steps = 0
    for seq in range(1, 3000):
        if seq % 100 == 0:
            steps += 1
            out.write(step_line(seq, steps))
        else:
            out.write(event(seq))
        assert size(out.folder) <= limit
    out.close()
    trace = files.read_file(out.path)
    assert not trace.damaged
    assert trace.header["rank"] == 0
    assert list(trace.models) == [0]
    # The newest detail is there, the oldest is not, and no step is missing.
    seqs = [event.seq for event in trace.events]
    assert seqs == sorted(seqs)
    assert seqs[-1] == 2999
    assert [summary["step"] for summary in trace.summaries] == list(range(1, 30))
    assert len(seqs) < 2999
    assert len(files.find_files(tmp_path)) == 1
    assert {mode(path) for path in out.folder.iterdir()} == {0o600}


def test_the_bound_holds_for_steps_alone(tmp_path: Path) -> None:
    # A very long run: when the steps' own lines no longer fit, the oldest of them go.
    limit = 1 << 16
    out = writer(tmp_path / "run", limit)
    for seq in range(1, 5000):
        out.write(step_line(seq, seq))
        assert size(out.folder) <= limit
    out.close()
    trace = files.read_file(out.path)
    assert not trace.damaged
    assert list(trace.models) == [0]
    steps = [summary["step"] for summary in trace.summaries]
    assert steps == list(range(steps[0], 5000))
    assert len(steps) > 200


def test_the_tail_counts_too(tmp_path: Path) -> None:
    limit = 1 << 16
    out = writer(tmp_path / "run", limit)
    for seq in range(1, 2000):
        out.write(event(seq))
    out.write_tail("".join(event(seq) for seq in range(2000, 6000)))
    assert size(out.folder) <= limit
    trace = files.read_file(out.path)
    assert not trace.damaged
    assert [event.seq for event in trace.events][-50:] == list(range(5950, 6000))
    out.write_tail(event(6000))
    assert [event.seq for event in files.read_file(out.path).events if event.seq >= 2000] == [6000]
    out.close()
    assert not files.tail_of(out.path).exists()


def test_a_large_model_does_not_multiply(tmp_path: Path) -> None:
    out = TraceWriter(
        tmp_path / "run", "rank00000.h-1", 1 << 16, lambda: HEADER + MODEL + " " * 30_000 + "\n", lambda text: None
    )
    out.open()
    for seq in range(1, 5000):
        out.write(event(seq))
        assert size(out.folder) <= 1 << 16
    out.close()
    assert [event.seq for event in files.read_file(out.path).events][-1] == 4999


def test_lines_longer_than_a_part(tmp_path: Path) -> None:
    out = writer(tmp_path / "run", 1 << 16)
    for number in range(10):
        out.write("".join(event(number * 300 + i) for i in range(1, 301)))  # 20 KB at a time
        assert size(out.folder) <= 1 << 16
    out.close()
    assert [event.seq for event in files.read_file(out.path).events][-1] == 3000


def test_damaged_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rank00000.h-1.jsonl"
    later = '{"kind":"of a later version","x":1}\n'
    torn = '{"seq":3,"kind":"wa'
    path.write_text(HEADER + MODEL + event(1) + "\x00garbage\n" + later + '["a list"]\n' + event(2) + torn)
    trace = files.read_file(path)
    assert [event.seq for event in trace.events] == [1, 2]
    assert trace.damaged == [(path, 4), (path, 6), (path, 8)]
    assert not trace.complete


def test_what_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"schema":"other/1"}\n{"x":1}\n')
    with pytest.raises(files.NotATrace, match="no header with a schema"):
        files.read_file(tmp_path / "a.jsonl")
    with pytest.raises(files.NotATrace, match="no such file or folder"):
        files.find_files(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(files.NotATrace, match=r"no \.jsonl files in it"):
        files.find_files(tmp_path / "empty")
    assert files.find_files(tmp_path / "a.jsonl") == [tmp_path / "a.jsonl"]
