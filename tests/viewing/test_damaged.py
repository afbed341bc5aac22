"""Damaged files: every way to look at a run says what it can, and nothing throws."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdptrace.analysis import NotATrace, load
from fsdptrace.analysis.live import RunWatch
from fsdptrace.html import render
from fsdptrace_exporters.perfetto import merge
from support.made import Made

VALUES = (None, -1, 1 << 70, "x", [], {}, 3.5, True, 99_999, 0)


def healthy() -> list[str]:
    made = Made(0, 1)
    for _ in range(3):
        made.step()
        made.violation("unused-gather", "layers.0", group=0, severity="warning")
    made.line(
        {"kind": "heartbeat", "t": 900, "last": made.seq, "step": 3, "collective": {"kind": "unshard", "model": 0, "group": 1}}
    )
    made.line({
        "kind": "device_times", "model": 0, "step": 1, "base": 300, "span": 200, "missing": 0, "seq": [20, 21], "what":
        ["unshard", "wait"], "pass": [1, 1], "group": [0, 0], "t0": [0, 50], "ns": [40, 5], "exposed": [5, 5],
    })  # fmt: skip
    made.unshard(0, 1000, "forward")
    made.end()
    return made.lines


def damaged(lines: list[str], dice: random.Random) -> list[str]:
    """A few lines lost, cut, doubled, moved, with another value, or of a model with other groups."""
    lines = list(lines)
    for _ in range(dice.randint(1, 8)):
        at, other = dice.randrange(len(lines)), dice.randrange(len(lines))
        how = dice.randrange(6)
        if how == 0:
            lines.pop(at)
        elif how == 1:
            lines[at] = lines[at][: dice.randrange(len(lines[at]) + 1)]
        elif how == 2:
            lines[at], lines[other] = lines[other], lines[at]
        elif how == 3:
            lines.insert(at, lines[other])
        elif how == 4:
            lines[at] = changed(lines[at], lambda data: data.update({dice.choice(list(data)): dice.choice(VALUES)}))
        else:
            lines.insert(at, changed(lines[1], lambda data: data.update(groups=data["groups"][: dice.randrange(3)])))
        if len(lines) < 3:
            break
    return lines


def changed(line: str, change: Callable[[dict[str, Any]], None]) -> str:
    try:
        data = json.loads(line)
        change(data)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return line
    return json.dumps(data)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_throws(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    lines = healthy()
    path = tmp_path / "run" / "rank00000.node-100.jsonl"
    path.parent.mkdir()
    shown = 0
    for number in range(25):
        path.write_text("\n".join(damaged(lines, dice)) + "\n")
        for look in (
            lambda: render(load(tmp_path)), lambda: merge(load(tmp_path), tmp_path / "t.json"),
            lambda: merge(load(tmp_path), tmp_path / "t.pftrace"), lambda: RunWatch(tmp_path).look(),
        ):  # fmt: skip
            try:
                look()
                shown += 1
            except NotATrace:  # its header is gone
                pass
            except Exception as error:
                error.add_note(f"seed {seed}, file {number}:\n{path.read_text()}") if hasattr(error, "add_note") else None
                raise
    assert shown > 75
