"""What is on disk when a process dies: told to, by an exception, stuck; and that it dies as it would without us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import fsdptrace
from fsdptrace import disk, drain, files, last_words
from fsdptrace.analysis.postmortem import postmortem
from support.models import fake_mesh, sharded_chain, train
from support.ranks import run_alone, run_to_the_end


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [files.json.loads(line) for line in path.read_text().splitlines()]


def of_rank(folder: Path, rank: int) -> list[dict[str, Any]]:
    (path,) = folder.glob(f"r/rank{rank:05d}.*.jsonl")
    return lines_of(path)


# -- told to end -------------------------------------------------------------------------------------------------------
def stuck_and_sleeping(rank: int, out: str, number: int) -> None:
    """Rank 0 is stuck in the all-gather of the second step's first layer, in C++; rank 1, which never comes, ends both."""
    model = sharded_chain(init_device_mesh("cpu", (2,)), 2)
    recording = fsdptrace.record(model, out=out, run_id="r", detail="summary")
    recording.__enter__()
    train(model)
    Path(out, f"pid{rank}").write_text(str(os.getpid()))
    if rank == 0:
        train(model)
    other = Path(out, "pid0")
    while not other.exists() or not other.read_text():
        time.sleep(0.01)
    time.sleep(0.5)  # until rank 0 is inside
    os.kill(int(other.read_text()), number)
    while _alive(int(other.read_text())):
        time.sleep(0.01)
    os.kill(os.getpid(), number)
    time.sleep(60)  # interrupted: the process ends


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends_by(number: int, tmp_path: Path) -> None:
    results = run_to_the_end(stuck_and_sleeping, 2, str(tmp_path), number)
    assert results == [(-number, None), (-number, None)]  # as without us
    name = signal.Signals(number).name
    stuck, sleeping = of_rank(tmp_path, 0)[-1], of_rank(tmp_path, 1)[-1]
    assert (stuck["kind"], stuck["signal"]) == (sleeping["kind"], sleeping["signal"]) == ("signal", name)
    assert stuck["collective"] == {"kind": "unshard", "model": 0, "group": 0}
    assert "collective" not in sleeping
    assert stuck["stack"][1].startswith("support/models.py:")
    assert stuck["stack"][1].endswith(" in train")
    assert sleeping["stack"][0].startswith("tests/test_death.py:")
    assert sleeping["stack"][0].endswith(" in stuck_and_sleeping")
    # Not a step in full was wanted, yet the newest events of the running one are there: the second layer was reduced last.
    for path in tmp_path.glob("r/*.jsonl"):
        trace = files.read_file(path)
        assert not trace.damaged
        reduced = [event.group for event in trace.events if event.kind == "reduce_scatter"]
        assert reduced == [1, 0]


def test_sigterm(tmp_path: Path) -> None:
    ends_by(signal.SIGTERM, tmp_path)


def test_sigabrt(tmp_path: Path) -> None:
    ends_by(signal.SIGABRT, tmp_path)


def has_a_handler(out: str, before: bool) -> tuple[list[int], Any]:
    """The program's own handler, set before recording or after, decides what SIGTERM does; the words are said all the same."""
    got: list[int] = []
    if before:
        signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    model = sharded_chain(fake_mesh(), 2)
    with fsdptrace.record(model, out=out, run_id="r") as rec:
        if not before:
            signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
        train(model)
        rec.flush()
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and '"signal"' not in Path(rec.path).read_text():
            time.sleep(0.01)
    rec.close()
    lines = lines_of(Path(rec.path))
    assert sum(line.get("kind") == "signal" for line in lines) == 1
    assert lines[-1]["kind"] == "end"
    assert "exception" not in lines[-1]
    return got, rec.enabled


def test_a_handler_of_the_programs(tmp_path: Path) -> None:
    for before in (True, False):
        code, result = run_alone(has_a_handler, str(tmp_path / str(before)), before)
        assert (code, result) == (0, ([signal.SIGTERM], True))


def gives_back(out: str) -> list[Any]:
    model = sharded_chain(fake_mesh(), 2)
    seen = []
    with fsdptrace.record(model, out=out, run_id="r") as rec:
        train(model)
        seen.append(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        pid = os.fork()
        if not pid:  # a forked child, as a DataLoader's worker: its signals are as they were
            time.sleep(60)
        time.sleep(0.1)
        os.kill(pid, signal.SIGTERM)
        seen.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        rec.flush()
        seen.append('"signal"' in Path(rec.path).read_text())
    rec.close()
    seen.append([signal.getsignal(number) is signal.SIG_DFL for number in last_words.SIGNALS])
    seen.append(signal.set_wakeup_fd(-1))
    return seen


def test_signals_are_given_back_and_not_inherited(tmp_path: Path) -> None:
    code, seen = run_alone(gives_back, str(tmp_path))
    assert code == 0
    assert seen == [False, -signal.SIGTERM, False, [True, True], -1]


def has_a_loop(out: str) -> tuple[int, bool]:
    """Somebody else has the wakeup pipe (an asyncio loop with signal handlers): nothing of it is touched."""
    _, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    model = sharded_chain(fake_mesh(), 1)
    with fsdptrace.record(model, out=out, run_id="r") as rec:
        train(model)
        default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    rec.close()
    return int(signal.set_wakeup_fd(-1) == write), default


def test_somebody_elses_pipe(tmp_path: Path) -> None:
    assert run_alone(has_a_loop, str(tmp_path)) == (0, (1, True))


# -- exceptions --------------------------------------------------------------------------------------------------------
SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from fsdptrace.analysis.postmortem import postmortem
from support.models import fake_mesh, sharded_chain, train
import fsdptrace, torch
model = sharded_chain(fake_mesh(), 2)
with fsdptrace.record(model, out={out!r}, run_id="r", detail="summary") as rec:
    for step in range(2):
        train(model)
        rec.step()
    train(model)
{last}
"""


def test_an_exception_ends_the_program(tmp_path: Path) -> None:
    text = SCRIPT.format(tests=str(Path(__file__).parent), out=str(tmp_path), last='    raise KeyError("no such batch")')
    path = tmp_path / "program.py"
    path.write_text(text)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "KeyError: 'no such batch'" in done.stderr
    (trace,) = tmp_path.glob("r/*.jsonl")
    lines = lines_of(trace)
    where = SCRIPT.count("\n", 0, SCRIPT.index("{last}")) + 1
    assert lines[-1]["exception"] == f"KeyError at {tmp_path.name}/program.py:{where} in <module>"
    # The step that it ended is written with all its events, although none was wanted.
    assert lines[-2]["kind"] == "step"
    steps = {line["step"] for line in lines if line.get("kind") == "unshard"}
    assert steps == {2}
    assert [line["type"] for line in lines if line.get("kind") == "exception"] == ["KeyError"]


# -- standing still ----------------------------------------------------------------------------------------------------
def test_a_heartbeat_says_where_it_stands(fake_pg: Any, record: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(drain, "HEARTBEAT", 0.0)
    model = sharded_chain(fake_pg(4), 2, dim=4)
    with record(model, detail="summary") as rec:
        handle = model[1].register_forward_pre_hook(lambda module, args: rec.flush() or rec.flush())
        model(torch.randn(2, 4))
        handle.remove()
    rec.close()
    beats = [line for line in lines_of(Path(rec.path)) if line.get("kind") == "heartbeat" and "held" in line]
    assert beats
    # Inside the second layer's forward: its 4 x 4 weights and 4 biases are gathered, 80 bytes.
    at, (held,) = beats[0]["at"], beats[0]["held"]
    assert (at["kind"], at["pass"], at["group"]) == ("pre_forward", "forward", 1)
    assert held == {"bytes": 80, "groups": [1]}
    assert beats[0]["moved"] <= beats[0]["t"]


# -- a disk that blocks ------------------------------------------------------------------------------------------------
def test_training_waits_for_no_disk(fake_pg: Any, record: Any, monkeypatch: Any) -> None:
    """While a write blocks, steps run, summaries are read, and another recording starts."""
    mesh = fake_pg(4)
    model, other = sharded_chain(mesh, 2), sharded_chain(mesh, 2)
    blocked, free = threading.Event(), threading.Event()
    write = disk._write_all

    def slow(fd: int, data: bytes, offset: int | None = None) -> None:
        blocked.set()
        assert free.wait(60)
        write(fd, data, offset)

    with record(model, detail="full") as rec:
        train(model)
        rec.flush()
        monkeypatch.setattr(disk, "_write_all", slow)
        train(model)
        rec._session.drain.wake.set()
        assert blocked.wait(60)
        train(model)
        rec.step()
        assert rec.scalars()["fsdp/gathers"] == 12.0  # two layers, forward and backward, three times
        with fsdptrace.record(other, out=rec.options.out, run_id=rec.options.run_id, detail="full") as second:
            train(other)
            assert not free.is_set()
        free.set()
    second.close()
    rec.close()
    trace = files.read_file(rec.path)
    assert not trace.damaged
    assert trace.end is not None
    assert sorted(trace.models) == [0, 1]
    assert sum(event.kind == "unshard" and "noop" not in event.data for event in trace.events) == 4 * 4


def test_a_step_that_ends_while_it_is_written(fake_pg: Any, record: Any) -> None:
    """Another thread may move the record that ends a step to where the drain is writing it: it is one line all the same."""
    model = sharded_chain(fake_pg(4), 2)
    with record(model, detail="full") as rec:
        session = rec._session
        train(model)
        rec.flush()
        running = session.ring.running[0]
        rec.step()
        session.ring.pump()
        with session.drain._turn:
            session.drain._write(running, 0.0)
        train(model)
    rec.close()
    lines = [line for line in lines_of(Path(rec.path)) if line.get("kind") == "step"]
    assert [(line["step"], line["counts"]["unshard"]) for line in lines] == [(0, 5), (1, 5)]


def test_killed_at_random_moments() -> None:
    """A few of the hundred of benchmarks/kill.py."""
    script = Path(__file__).parents[1] / "benchmarks" / "kill.py"
    done = subprocess.run(
        [sys.executable, script, "--times", "2"], capture_output=True, text=True, timeout=200, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    none, collective = done.stdout.splitlines()
    for line, flush in ((none, "none"), (collective, "collective")):
        assert line.startswith(f"flush={flush}: 2 kills; read: 2; steps in the files ")
        assert line.endswith("newest event before the last collective missing: 0")


# -- restarted ---------------------------------------------------------------------------------------------------------
def restarted(out: str, attempt: int) -> None:
    """What torchrun starts again after a failure: the same run, another attempt."""
    os.environ.update(TORCHELASTIC_RUN_ID="job7", TORCHELASTIC_RESTART_COUNT=str(attempt))
    model = sharded_chain(fake_mesh(), 1)
    with fsdptrace.record(model, out=out) as rec:
        for _ in range(1 + attempt):
            train(model)
            rec.step()
        rec.flush()
        if not attempt:
            os.kill(os.getpid(), signal.SIGKILL)
    rec.close()


def test_attempts_are_told_apart(tmp_path: Path) -> None:
    codes = [run_alone(restarted, str(tmp_path), attempt)[0] for attempt in (0, 1)]
    assert codes == [-signal.SIGKILL, 0]
    assert len(list(tmp_path.glob("job7/*.jsonl"))) == 2
    second = postmortem(tmp_path)
    assert (second.run, second.others) == ("job7:1", ["job7"])
    assert [(rank.step, rank.end) for rank in second.ranks] == [(1, "ended in order")]
    for path in tmp_path.glob("job7/*.jsonl"):
        os.utime(path, (time.time() - 60,) * 2)
    first = postmortem(tmp_path, "job7:0")
    assert [(rank.step, rank.end) for rank in first.ranks] == [(0, "ended by SIGKILL, abort() or without a word")]
