"""docs/hang.md: its commands are run as they stand there, and say what it says they say."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.models import sharded_chain, train
from support.torches import since

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "hang.md").read_text()


def block(name: str) -> list[str]:
    """The lines of the code block between two marks."""
    found = re.search(rf"<!-- {name} -->\n```\n(.*?)```\n<!-- /{name} -->", PAGE, re.DOTALL)
    assert found is not None, name
    return found[1].splitlines()


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("COLUMNS", None)
    status = {}
    output = {}
    for line in [*block("start"), *block("run")]:
        done = subprocess.run(
            shlex.split(line), capture_output=True, text=True, timeout=400, check=False, cwd=tmp_path, env=environment
        )  # fmt: skip
        name = line.split()[1]
        status[name], output[name] = done.returncode, done.stdout + done.stderr
    assert status == {"run": 0, "postmortem": 0, "check": 1}
    (said,) = [line for line in output["run"].splitlines() if line.startswith("rank-order: ")]
    assert said.startswith(block("log")[0])
    for line in block("postmortem"):
        assert any(line in shown for shown in output["postmortem"].splitlines()), line
    assert "ERROR rank-order  visual.*" in output["check"]
    assert "ERROR rank-order  layers.*" in output["check"]


def run(line: str, folder: Path) -> str:
    """A command of the page in ``folder``; what it printed."""
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        shlex.split(line), capture_output=True, text=True, timeout=100, check=False, cwd=folder, env=environment
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


PR_SET_PTRACER, ANY = 0x59616D61, -1


@pytest.mark.skipif(
    shutil.which("py-spy", path=str(Path(sys.executable).parent)) is None, reason="py-spy is not installed here"
)
def test_the_stack_by_py_spy(fake_pg: Any, record: Any, tmp_path: Path) -> None:
    """The process is the one that the file's name says, and its stack has the line that it hangs at."""
    (line,) = block("py-spy")
    with contextlib.suppress(OSError, AttributeError):  # where only ancestors may attach
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANY, 0, 0, 0)
    model = sharded_chain(fake_pg(2))
    with record(model) as rec:
        train(model)
        rec.flush()
    pid = Path(rec.path).stem.rpartition("-")[2]

    def next_batch() -> str:
        return run(line.replace("PID", pid), tmp_path)

    assert re.search(r"next_batch \(.*test_hang.py:\d+\)", next_batch())


def dump(ranks: int, size: int, stuck: bool) -> dict[str, Any]:
    """What the watchdog of NCCL writes of a rank (seen on an H200 with torch 2.11): an all-gather that ended, and one that did
    not if the rank is ``stuck``."""
    entries = [
        {
            "frames": [{"name": "all_gather_into_tensor", "filename": "distributed_c10d.py", "line": 4186}],
            "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"), "thread_name": "python3", "thread_id": "1",
            "collective_seq_id": number + 1, "p2p_seq_id": 0, "op_id": number + 1, "profiling_name": "nccl:_all_gather_base",
            "time_created_ns": 1, "input_sizes": [[size]], "input_dtypes": ["Float"], "output_sizes": [[size * ranks]],
            "output_dtypes": ["Float"], "state": "scheduled" if number else "completed", "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None if number else 2, "retired": not number, "timeout_ms": 8000, "is_p2p": False,
        }
        for number in range(1 + stuck)
    ]  # fmt: skip
    return {
        "version": "2.10", "comm_lib_version": "2.28.9", "entries": entries,
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}},
        "pg_status": {
            "0": {"last_enqueued_collective": len(entries), "last_started_collective": -1, "last_completed_collective": 1},
        },
    }  # fmt: skip


@since(2, 13, "others print otherwise")
def test_the_flight_recorders_dumps(tmp_path: Path) -> None:
    """Of eight ranks all but rank 7 are in their second all-gather."""
    (tmp_path / "traces" / "run").mkdir(parents=True)
    (tmp_path / "traces" / "run" / "rank00007.host-1.jsonl").write_text("{}")  # ours, which it must leave alone
    for rank in range(8):
        (tmp_path / "traces" / f"fr_{rank}").write_bytes(pickle.dumps(dump(8, 64, rank != 7)))
    missing, printed = (run(line, tmp_path) for line in block("torchfrtrace"))
    assert "missing ranks: {7}" in missing
    assert "missing ranks: {7}" in PAGE
    assert [line.rstrip() for line in printed.splitlines() if line.strip()] == block("fr")
