"""docs/hang.md: its commands are run as they stand there, and say what it says they say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

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
