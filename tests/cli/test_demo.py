"""The demo, for real: two processes that train, the finding by its names, the healthy run silent."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from fsdptrace.analysis import check, load
from fsdptrace.cli import demo
from fsdptrace.files import read_file
from support.torches import RELEASE

LAYERS, STEPS = 6, 2
EXPERTS_BYTES = 4 * (4 * 32 * 32 + 32 * 4 * 32)  # w1 and w2 in float32; nothing is padded over 2 ranks: 32 KiB
COMMAND = [sys.executable, "-c", "from fsdptrace.cli import main; main()", "demo"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the command printed, and where its files are."""
    out = tmp_path_factory.mktemp("demo")
    # What a launcher or the user's shell set is not the demo's business.
    env = {**os.environ, "COLUMNS": "", "RANK": "7", "FSDPTRACE": "0", "MASTER_PORT": "1", "FSDPTRACE_RUN_ID": "mine"}
    done = subprocess.run(
        [*COMMAND, "--steps", str(STEPS), "--layers", str(LAYERS), "--out", str(out)],
        capture_output=True, text=True, env=env, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout, out


def _run(out: Path, kind: str) -> Path:
    (folder,) = out.glob(f"demo-{kind}-*")
    return folder


@pytest.mark.multiprocess
def test_the_leak_is_named(ran: tuple[str, Path]) -> None:
    report = load(_run(ran[1], "leak"))
    (finding,) = [finding for finding in report.findings if finding.severity == "error"]
    assert (finding.rule, finding.pattern) == ("gather-after-backward", "layers.*.moe.experts")
    assert sorted(finding.units) == [f"layers.{n}.moe.experts" for n in range(1, LAYERS)]  # five of six
    assert (finding.ranks, finding.steps, finding.times) == ([0, 1], [0, 1], 5 * 2 * STEPS)
    assert (finding.bytes, finding.step_bytes) == (EXPERTS_BYTES, 5 * EXPERTS_BYTES)
    process = report.processes[0]
    names = process.models[0].fqn
    seen = {data["evidence"][-1] for data in process.violations if data["step"] == 0}
    wrong = [event for event in read_file(process.source.path).events if event.seq in seen]
    assert [(names(event["issuer"]), names(event.group), event["bytes"], event["mode"]) for event in wrong] == [
        (f"layers.{n - 1}.moe.experts", f"layers.{n}.moe.experts", EXPERTS_BYTES, "implicit") for n in range(LAYERS - 1, 0, -1)
    ]
    rows = {row.name: row for row in report.models[0].rows}
    assert [rows[f"layers.{n}.moe.experts"].mean("wasted") for n in range(LAYERS)] == [0, 1, 1, 1, 1, 1]


@pytest.mark.multiprocess
def test_the_healthy_run_is_silent(ran: tuple[str, Path]) -> None:
    report = load(_run(ran[1], "healthy"))
    assert report.findings == []
    assert report.problems == []
    assert report.notes == []
    assert (report.basis.ranks, report.basis.steps, report.basis.full_rank_steps) == (2, STEPS, 2 * STEPS)
    assert not any(row.sums.wasted for row in report.models[0].rows)
    assert check(_run(ran[1], "healthy")).failed is False


@pytest.mark.multiprocess
def test_check_says_over_the_files_what_was_said_online(ran: tuple[str, Path]) -> None:
    result = check(_run(ran[1], "leak"))
    assert result.failed
    assert (result.judged, result.incomplete, result.new, result.gone) == (2 * STEPS, 0, 0, 0)


@pytest.mark.multiprocess
def test_what_it_shows(ran: tuple[str, Path]) -> None:
    text, out = ran
    assert str(torch.__version__) in text
    if RELEASE >= (2, 10):
        assert "the demo put the post-forward bookkeeping of torch 2.9 and older back" in text
    else:
        assert "nothing was changed for this run" in text
    assert re.search(r"prefetch of layers\.4\.moe\.experts gathered layers\.5\.moe\.experts \(32 KiB\) at event \d+", text)
    assert re.search(r"first: rank 0, step 0, event \d+", text)
    assert re.search(r"\d+  layers\.0\.moe\.experts  layers\.1\.moe\.experts  32 KiB +160 KiB", text)
    assert "what to change:" in text
    assert "nothing found" in text
    assert "the same to the last bit in both" in text
    assert text.index("ERROR gather-after-backward") < text.index("nothing found")
    assert f"fsdptrace report {_run(out, 'leak')}" in text.splitlines()[-4]
    assert len(list(out.rglob("*.jsonl"))) == 4


@pytest.mark.multiprocess
def test_a_child_that_fails_is_shown_and_none_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    job_of = demo.Job

    def broken(rank: int, *rest: object) -> demo.Job:
        job = job_of(rank, *rest)  # type: ignore[arg-type]
        return job_of(**{**{name: getattr(job, name) for name in job.__slots__}, "layers": "six" if rank else job.layers})

    monkeypatch.setattr(demo, "Job", broken)
    monkeypatch.setattr(demo, "GRACE", 0.5)
    with pytest.raises(demo.DemoFailed, match=r"rank [01] of the training (failed|was ended).*Its last lines: "):
        demo.train({"healthy": "x"}, 1, 2, tmp_path)
    assert not [child for child in psutil.Process().children(recursive=True) if "demo_training" in " ".join(child.cmdline())]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    from fsdptrace.cli.output import Screen

    (tmp_path / "file").write_text("")
    folder = demo._folder(Screen(), tmp_path / "file" / "below")
    assert folder.is_absolute()
    assert folder != tmp_path / "file" / "below"


def test_jobs_travel_as_json() -> None:
    job = demo.Job(0, 2, 6, 3, "/out", "/store", "/result", 60, {"leak": "a"})
    assert demo.Job(**json.loads(json.dumps({name: getattr(job, name) for name in job.__slots__}))) == job
