"""The examples run by themselves, and say what a person works out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, tmp_path: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--out", str(tmp_path / "out"), *arguments],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done


def test_the_leak_at_its_own_scale(tmp_path: Path) -> None:
    """94 blocks on a fake group of 16. Experts are 64 x 16 and 16 x 64 in float32: 2 x 1,024 x 4 B = 8,192 B gathered. The
    backward runs from 93 to 0; the experts of each block but the last one to run prefetch those of the block after it: 93."""
    done = run("leak_at_scale.py", tmp_path, "--warn")
    assert f"94 blocks, 93 units gathered after their backward, {93 * 8192:,} bytes" in done.stdout
    healthy = run("leak_at_scale.py", tmp_path, "--healthy")
    assert "94 blocks, 0 units gathered after their backward, 0 bytes" in healthy.stdout


def test_raise_at_the_first_wrong_prefetch(tmp_path: Path) -> None:
    """The first of the first backward: the experts of block 92 prefetch those of 93. It is the last line but the hint."""
    done = run("leak_at_scale.py", tmp_path, code=1)
    (line,) = [line for line in done.stderr.splitlines() if "InvariantViolation: " in line]
    assert "The implicit backward prefetch of layers.92.experts gathered layers.93.experts (8,192 B) at event " in line
    assert "layers.92.experts.set_modules_to_backward_prefetch([layers.91])" in done.stderr


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_every_example_explains_itself(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert "usage: " in done.stdout
