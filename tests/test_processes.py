"""Processes that end badly, fork or talk to each other: what is on disk then."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import fsdptrace
from fsdptrace import files
from support.models import fake_mesh, sharded_chain, train
from support.ranks import run_alone, run_ranks

pytestmark = pytest.mark.multiprocess


def only_file(out: Path) -> files.TraceFile:
    (path,) = files.find_files(out)
    return files.read_file(path)


# -- killed ------------------------------------------------------------------------------------------------------------
def trains_until_killed(out: str, finished_steps: int) -> None:
    """Trains, then stays in one step until events of it are on disk, and kills itself."""
    model = sharded_chain(fake_mesh(), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fsdptrace.record(model, out=out, run_id="r") as rec:
        for _ in range(finished_steps):
            train(model, optimizer)
        train(model)
        deadline = time.monotonic() + 20
        wanted = 0
        while time.monotonic() < deadline:
            train(model)
            time.sleep(0.02)
            mark = rec._session.ring.running.get(0)  # what the drain has seen by now must soon be there
            if not wanted and mark is not None and mark.step == finished_steps and mark.records:
                wanted = mark.records[-11]
            if wanted and any(event.seq >= wanted for event in files.read_file(rec.path).events):
                Path(out, "seen").write_text(str(wanted))
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("finished_steps", [0, 12])
def test_killed(tmp_path: Path, finished_steps: int) -> None:
    code, _ = run_alone(trains_until_killed, str(tmp_path), finished_steps)
    assert code == -signal.SIGKILL
    trace = only_file(tmp_path)
    assert not trace.complete
    assert len(trace.damaged) <= 1  # a torn last line, at most
    # The running step is there, in full detail or, beyond the tenth step, in the tail.
    running = [event.seq for event in trace.events if event.step == finished_steps]
    assert running[-1] >= int((tmp_path / "seen").read_text())
    assert [summary["step"] for summary in trace.summaries] == list(range(finished_steps))
    assert files.tail_of(trace.path).exists() == (finished_steps > 10)
    assert trace.heartbeats
    if finished_steps:
        assert {event.step for event in trace.events if event.kind == "unshard"} == {*range(10), finished_steps}


# -- no room -----------------------------------------------------------------------------------------------------------
def trains_on_a_full_disk(out: str) -> tuple[list[str], int, bool]:
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("fsdptrace").addHandler(Handler())
    model = sharded_chain(fake_mesh(), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))  # a write beyond it fails, as on a full disk
    with fsdptrace.record(model, out=out, detail="full") as rec:
        for _ in range(30):
            train(model, optimizer)
            rec.flush()
    rec.close()
    return messages, len(rec.steps), rec.enabled


def test_full_disk(tmp_path: Path) -> None:
    code, (messages, steps, enabled) = run_alone(trains_on_a_full_disk, str(tmp_path))
    assert code == 0
    assert enabled
    assert steps > 0
    (message,) = messages
    assert "File too large. The trace stops here; checks and training go on" in message
    trace = only_file(tmp_path)
    assert trace.path.stat().st_size <= 40_000
    assert len(trace.events) > 100
    assert trace.damaged == []  # what was written of a line that did not fit was taken back
    assert not trace.complete


# -- forks -------------------------------------------------------------------------------------------------------------
def forks_while_recording(out: str) -> dict[str, Any]:
    model = sharded_chain(fake_mesh(), 2)
    x = torch.randn(4, 8)

    def forward() -> None:
        with torch.no_grad():
            model(x)

    def in_child(what: Any) -> int:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                what()
                code = 0
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def goes_on() -> None:
        forward()
        assert rec.events == []  # the parent's recording is over here
        assert rec._session is not None
        assert len(rec._session.ring) == 0

    def records_itself() -> None:
        forward()
        with fsdptrace.record(model, out=out, run_id="r") as mine:
            forward()
            forward()
        assert mine.steps[-1].counts["forward"] == 2
        mine.close()

    codes = []
    with fsdptrace.record(model, out=out, run_id="r") as rec:
        forward()
        rec.flush()
        codes.append(in_child(goes_on))
        forward()
        codes.append(in_child(records_itself))
        forward()
        child = multiprocessing.get_context("fork").Process(target=_records_without_closing, args=(model, out))
        child.start()
        child.join()
        codes.append(child.exitcode or 0)
    rec.close()
    return {"codes": codes, "path": rec.path, "forwards": rec.steps[-1].counts["forward"]}


def _records_without_closing(model: Any, out: str) -> None:
    with fsdptrace.record(model, out=out, run_id="r"), torch.no_grad():
        model(torch.randn(4, 8))


def test_fork_while_recording(tmp_path: Path) -> None:
    code, result = run_alone(forks_while_recording, str(tmp_path))
    assert code == 0
    assert result["codes"] == [0, 0, 0]
    assert result["forwards"] == 3
    traces = {trace.header["pid"]: trace for trace in map(files.read_file, files.find_files(tmp_path))}
    assert len(traces) == 3  # the parent's, and those of the children that recorded
    assert all(trace.complete and not trace.damaged for trace in traces.values())
    forwards = {trace.path: sum(event.kind == "forward" for event in trace.events) for trace in traces.values()}
    assert forwards.pop(Path(result["path"])) == 3
    assert sorted(forwards.values()) == [1, 2]


# -- ranks -------------------------------------------------------------------------------------------------------------
def records_on_a_rank(rank: int, out: str) -> tuple[str, dict[str, Any]]:
    model = sharded_chain(init_device_mesh("cpu", (2,)), 2)
    with fsdptrace.record(model, out=out) as rec:
        train(model)
    rec.close()
    return rec.path, files.read_file(rec.path).header


def test_ranks_agree_on_the_run(tmp_path: Path) -> None:
    results = run_ranks(records_on_a_rank, 2, str(tmp_path))
    paths = [Path(path) for path, _ in results]
    headers = [header for _, header in results]
    assert paths[0].parent == paths[1].parent
    assert [path.name.split(".")[0] for path in paths] == ["rank00000", "rank00001"]
    assert [header["rank"] for header in headers] == [0, 1]
    assert {(header["world_size"], header["run_id_source"]) for header in headers} == {(2, "store")}
    assert headers[0]["run_id"] == headers[1]["run_id"] == paths[0].parent.name


def dies_before_a_collective(rank: int, out: str, flush: str) -> list[dict[str, Any]]:
    """Rank 1 leaves without a word after the first layer; rank 0 goes into the second one's all-gather."""
    model = sharded_chain(init_device_mesh("cpu", (2,)), 2)
    if rank == 1:
        model[0].register_forward_hook(lambda module, args, output: os._exit(0))
    with fsdptrace.record(model, out=out, flush=flush, run_id="r") as rec:
        try:
            model(torch.randn(4, 8))
        except RuntimeError:
            # As if the process were aborted now: what is on disk?
            return [files.json.loads(line) for line in Path(rec.path).read_text().splitlines()]
    return []


def test_the_collective_is_on_disk_before_it_is_entered(tmp_path: Path) -> None:
    lines, nothing = run_ranks(dies_before_a_collective, 2, str(tmp_path), "collective")
    assert nothing is None
    entered = [(line["what"], line["model"], line["group"]) for line in lines if line.get("kind") == "entered"]
    assert entered == [("unshard", 0, 0), ("unshard", 0, 1)]
    assert lines[-1].get("kind") in ("entered", "heartbeat")
    # Everything before it is there as well.
    events = [(line["kind"], line["group"]) for line in lines if "seq" in line and line["kind"] != "state"]
    assert events == [("unshard", 0), ("wait", 0), ("pre_forward", 0), ("reshard", 0), ("post_forward", 0)]
    # Rank 1's file tells that it got past the first layer's gather and never into the second one's.
    one = next(trace for trace in map(files.read_file, files.find_files(tmp_path)) if trace.rank == 1)
    assert [(line["what"], line["group"]) for line in one.entered] == [("unshard", 0)]
