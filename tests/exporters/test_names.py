"""docs/opentelemetry.md names everything that is sent."""

from __future__ import annotations

import re
from pathlib import Path

from fsdptrace_exporters.metrics import COUNTERS, GAUGES, HISTOGRAMS
from support.servers import ROOT

PAGE = (ROOT / "docs" / "opentelemetry.md").read_text()


def test_every_metric() -> None:
    for name, (unit, text, *_) in {**GAUGES, **COUNTERS, **HISTOGRAMS}.items():
        (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
        assert f"| {unit} | {text} |" in line


def test_every_span_and_attribute() -> None:
    folder = ROOT / "exporters" / "fsdptrace_exporters"
    names: set[str] = set()
    for path in (*folder.rglob("*.py"),):
        names |= set(re.findall(r'"((?:fsdp|fsdptrace|dl)\.[a-z_.]+)"', Path(path).read_text()))
    missing = {name for name in names if f"`{name}`" not in PAGE} - {"fsdptrace.exporters"}
    assert not missing
