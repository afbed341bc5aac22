"""`fsdptrace top` and `record(live=True)`, in a real (pseudo-)terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

from fsdptrace.cli.app import app
from fsdptrace.cli.below import LINES
from support.made import Made, run
from support.terminal import Terminal

COMMAND = str(Path(sys.executable).with_name("fsdptrace"))
TRAINING = """
import pathlib, sys, time
import torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import fsdptrace

out, stop = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=0, world_size=1)
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with fsdptrace.record(model, out=str(out), live=True) as recording:
    for number in range(100_000):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("line", number, flush=True)
        if stop.exists():
            break
        time.sleep(0.02)
recording.close()
dist.destroy_process_group()
print("all done", flush=True)
"""


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def make(*command: object, **size: int) -> Terminal:
        made.append(Terminal([str(part) for part in command], **size))
        return made[-1]

    yield make
    for one in made:
        one.close()


def faulty(folder: Path, ranks: int = 3) -> None:
    """Ranks of which the last one has an error, holds 3,000 B and does not end."""
    for rank in range(ranks):
        made = Made(rank, ranks)
        made.step()
        if rank == ranks - 1:
            made.violation("gather-after-backward", "layers.1", message="the message\x1b[2J")
            made.unshard(1, 3000, "forward")
        else:
            made.end()
        made.write(folder)


def test_without_a_terminal_it_tells_once(tmp_path: Path) -> None:
    faulty(tmp_path)
    result = CliRunner().invoke(app, ["top", str(tmp_path)])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].startswith("run  3 of 3 ranks  step 0 to 1  1 error  0 warnings  no line for a while from rank 2")
    titles = "rank step took gathered peak past backward units open found doing host"
    assert lines[2].split() == titles.split()
    assert lines[3].split() == ["0", "0", "-", "0", "B", "4,000", "B", "0", "B", "-", "-", "ended", "node"]
    assert lines[5].split()[:12] == ["2", "1", "-", "3,000", "B", "4,000", "B", "0", "B", "layers.1", "1", "silent"]
    assert lines[7] == "last error: gather-after-backward  layers.1  (rank 2, step 1)"
    assert lines[8] == "the message\\x1b[2J"


def test_json(tmp_path: Path) -> None:
    faulty(tmp_path)
    data = json.loads(CliRunner().invoke(app, ["top", str(tmp_path), "--json"]).output)
    assert (data["schema"], data["run"], data["over"]) == ("fsdptrace-top/1", "run", False)
    assert [rank["gathered"] for rank in data["ranks"]] == [0, 0, 3000]
    assert data["ranks"][2]["open"] == [{"name": "layers.1", "bytes": 3000}]
    assert data["last"]["rule"] == "gather-after-backward"


def test_nothing_there_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["top", str(tmp_path)])
    assert result.exit_code == 2
    assert "no .jsonl files in it" in result.output


def test_it_follows_until_the_run_is_over(tmp_path: Path, terminal: Callable[..., Terminal]) -> None:
    made = Made(0, 1)
    path = made.write(tmp_path)
    shown = terminal(COMMAND, "top", tmp_path, "--every", "0.2")
    shown.wait_for("1 of 1 rank")
    made.unshard(1, 3000, "forward")
    made.write(tmp_path)
    shown.wait_for("3,000 B")
    assert "layers.1" in shown.text
    lines = len(made.lines)
    made.event("reshard", 1, bytes=3000)
    made.end_step(3000)
    made.end()
    with open(path, "a") as stream:
        stream.write("\n".join(made.lines[lines:]) + "\n")
    assert shown.end() == 0
    assert "ended" in shown.text  # what was seen last stays
    assert not shown.screen.cursor.hidden


def test_many_ranks_and_ctrl_c(tmp_path: Path, terminal: Callable[..., Terminal]) -> None:
    faulty(tmp_path, ranks=40)
    shown = terminal(COMMAND, "top", tmp_path, rows=24)
    shown.wait_for("and 25 ranks more")
    assert "gather-after-backward" in shown.text
    assert any(line.split()[:2] == ["39", "1"] for line in shown.lines)  # the one that stands out is there
    shown.type(b"\x03")
    assert shown.end() == 0


# -- record(live=True) -------------------------------------------------------------------------------------------------
def test_the_panel_stays_below_what_training_prints(tmp_path: Path, terminal: Callable[..., Terminal]) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    shown = terminal(sys.executable, tmp_path / "train.py", tmp_path / "out", tmp_path / "stop", rows=24)
    rows = shown.screen.lines

    def as_it_should() -> bool:
        """The panel stands whole, and above it what training printed last, no line lost (the last one may be half there)."""
        panel, above = shown.lines[rows - LINES :], shown.lines[: rows - LINES]
        words = [line.split() for line in [line for line in above if line][:-1]]
        if not all(len(line) > 1 and line[1].isdigit() for line in words):  # looked at while it was being drawn
            return False
        numbers = [int(line[1]) for line in words]
        return (
            panel[0].startswith("────")
            and "1 of 1 rank" in panel[1]
            and panel[2].split()[:1] == ["rank"]
            and panel[3].split()[:1] == ["0"]
            and len(numbers) > 10
            and numbers[0] > 5
            and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        )

    shown.wait_until(as_it_should)
    assert (shown.screen.margins.top, shown.screen.margins.bottom) == (0, rows - LINES - 1)
    (tmp_path / "stop").touch()
    assert shown.end() == 0
    assert shown.screen.margins is None  # the whole terminal scrolls again
    assert shown.lines[: shown.screen.cursor.y][-1] == "all done"
    assert not any("────" in line for line in shown.lines)
    printed = [line for line in shown.raw.decode(errors="replace").replace("\r", "").split("\n") if "line " in line]
    assert len(printed) > 16


def test_the_panel_ends_with_a_killed_training(tmp_path: Path, terminal: Callable[..., Terminal]) -> None:
    (path,) = run(tmp_path, ranks=1)
    (tmp_path / "train.py").write_text(
        f"import time; from fsdptrace.live import Panel; Panel.start({str(path.parent)!r}, 'run', 0, print); time.sleep(100)"
    )
    shown = terminal("sh", "-c", f"{sys.executable} {tmp_path}/train.py; sleep 1; echo the shell goes on; read _")
    shown.wait_for("1 of 1 rank")
    (training,) = psutil.Process(shown.pid).children()
    (panel,) = training.children()
    training.kill()
    shown.wait_for("the shell goes on")
    gone, _ = psutil.wait_procs([panel], 10)
    assert gone or panel.status() == psutil.STATUS_ZOMBIE
    shown.read(0.2)
    assert shown.screen.margins is None
    assert "1 of 1 rank" not in shown.text


def test_without_a_terminal_one_line_says_what_to_do(
    fake_pg: Callable[..., Any], record: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("os.isatty", lambda fd: False)
    mesh = fake_pg(2)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model, mesh=mesh)
    children = psutil.Process().children()
    with record(model, live=True, run_id="here") as recording:
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
            recording.step()
    recording.close()
    said = [line.getMessage() for line in caplog.records if "live" in line.getMessage()]
    assert said == [f"live: standard error is no terminal; watch this run with: fsdptrace top {tmp_path / 'out' / 'here'}"]
    assert psutil.Process().children() == children
    assert recording.violations == []
