"""docs/events.md and docs/rules.md say what the code says."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

from fsdptrace import events as ev
from fsdptrace.checks.registry import RULES

GENERATOR = Path(__file__).parents[2] / "docs" / "generate.py"


def test_generated_pages_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, GENERATOR, "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_every_kind_field_and_rule_is_in_them() -> None:
    generate = runpy.run_path(str(GENERATOR))
    events, rules = generate["events_page"](), generate["rules_page"]()
    for spec in ev.SPECS.values():
        assert f"### `{spec.name}`\n" in events
        for field in spec.fields:
            assert field.codec in ("how", "op") or spec.number == ev.VIOLATION or f"\n| `{field.name}` |" in events
    for line in ("model", "heartbeat", "entered", "end"):
        assert f"\n| `{line}` |" in events
    for rule in RULES.values():
        assert f"\n## {rule.name}\n" in rules
        assert rule.mend in rules
