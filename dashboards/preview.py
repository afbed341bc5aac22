"""Draws a dashboard's panels from a Prometheus that has the data: ``python dashboards/preview.py URL RUN BOARD.json OUT.svg``.

It is how the picture in README.md was made: the queries are the dashboard's own and the numbers are Prometheus's, but the drawing
is this script's, not Grafana's.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.parse
import urllib.request
from html import escape
from pathlib import Path
from typing import Any

CELL, ROW, MARGIN = 46, 30, 6
COLOURS = ("#2f7ed8", "#d9534f", "#3c9a5f", "#e0a030", "#8a5fc0", "#3aa6b9", "#b0577b", "#6b7785")
SPAN = 120.0  # seconds that are shown
UNITS = {"bytes": 1024, "Bps": 1024}


def get(url: str, path: str, **query: str) -> list[dict[str, Any]]:
    """The result of a query."""
    with urllib.request.urlopen(f"{url}{path}?{urllib.parse.urlencode(query)}", timeout=20) as answer:
        result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return result


def filled(expr: str, run: str) -> str:
    """A query with the dashboard's variables filled in."""
    return expr.replace("$__rate_interval", "30s").replace("$rank", ".*").replace("$run", run)


def legend(text: str, labels: dict[str, str]) -> str:
    """A legend with its labels filled in."""
    for name, value in labels.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return text


def number(value: float, unit: str) -> str:
    """A value with its unit."""
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"
    base = UNITS.get(unit, 1000)
    for prefix in ("", "K", "M", "G", "T"):
        if abs(value) < base or prefix == "T":
            kind = {"bytes": "iB" if prefix else "B", "Bps": "iB/s" if prefix else "B/s"}.get(unit, "")
            return f"{value:.3g} {prefix}{kind}".strip()
        value /= base
    return ""


def text(
    x: float, y: float, words: str, size: int = 11, anchor: str = "start", weight: str = "normal", fill: str = "#333"
) -> str:
    """A line of text."""
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}">'
        f"{escape(words)}</text>"
    )


def graph(panel: dict[str, Any], box: tuple[float, float, float, float], url: str, run: str, now: float) -> list[str]:
    """Lines over time, with their names below."""
    x, y, w, h = box
    unit = panel["fieldConfig"]["defaults"].get("unit", "")
    series = []
    for target in panel["targets"]:
        found = get(
            url, "/api/v1/query_range", query=filled(target["expr"], run), start=str(now - SPAN), end=str(now), step="1"
        )
        series += [
            (legend(target.get("legendFormat", ""), s["metric"]), [(float(t), float(v)) for t, v in s["values"]]) for s in found
        ]
    series = [(name, [(t, v) for t, v in values if v == v]) for name, values in series]
    series = [(name, values) for name, values in series if values]
    if not series:
        return [
            text(x + w / 2, y + h / 2, panel["fieldConfig"]["defaults"].get("noValue", "no data"), 13, "middle", fill="#888")
        ]
    top = max((v for _, values in series for _, v in values), default=0) * 1.1 or 1
    left, bottom, lines = x + 66, y + h - 16 * min(4, len(series)) - 14, []
    for part in (0, 0.5, 1):
        level = bottom - (bottom - y - 30) * part
        lines.append(f'<line x1="{left}" y1="{level:.0f}" x2="{x + w - 8}" y2="{level:.0f}" stroke="#e3e6ea"/>')
        lines.append(text(left - 6, level + 4, number(top * part, unit), 10, "end", fill="#777"))
    for i, (name, values) in enumerate(series[:8]):
        colour = COLOURS[i % len(COLOURS)]
        points = " ".join(
            f"{left + (x + w - 8 - left) * (t - now + SPAN) / SPAN:.1f},{bottom - (bottom - y - 30) * v / top:.1f}"
            for t, v in values
        )
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if i < 4:
            at = bottom + 18 + 15 * i
            lines.append(f'<rect x="{left}" y="{at - 8:.0f}" width="12" height="4" fill="{colour}"/>')
            lines.append(text(left + 18, at - 2, f"{name}   {number(values[-1][1], unit)}", 10))
    return lines


def single(panel: dict[str, Any], box: tuple[float, float, float, float], url: str, run: str) -> list[str]:
    """One number, or bars."""
    x, y, w, h = box
    (target,) = panel["targets"]
    found = get(url, "/api/v1/query", query=filled(target["expr"], run))
    unit = panel["fieldConfig"]["defaults"].get("unit", "")
    if panel["type"] == "stat":
        value = float(found[0]["value"][1]) if found else 0.0
        steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
        red = any(step["value"] is not None and value >= step["value"] for step in steps)
        return [text(x + w / 2, y + h - 28, number(value, unit), 30, "middle", "bold", "#c9302c" if red else "#2e7d4f")]
    lines = []
    most = max((float(s["value"][1]) for s in found), default=1)
    for i, item in enumerate(found[:7]):
        at, value = y + 40 + 26 * i, float(item["value"][1])
        lines.append(text(x + 10, at, legend(target.get("legendFormat", ""), item["metric"]), 11))
        lines.append(
            f'<rect x="{x + w * 0.5:.0f}" y="{at - 11:.0f}" width="{w * 0.38 * value / most:.0f}" height="14" fill="#d9534f"/>'
        )
        lines.append(text(x + w - 10, at, number(value, unit), 11, "end"))
    return lines or [
        text(x + w / 2, y + h / 2, panel["fieldConfig"]["defaults"].get("noValue", "no data"), 13, "middle", fill="#888")
    ]


def draw(url: str, run: str, board: dict[str, Any]) -> str:
    """The whole board as SVG."""
    now = time.time()
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"]) * ROW + 50
    width = 24 * CELL + 2 * MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="DejaVu Sans, Arial, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#f4f5f7"/>', text(12, 26, board["title"], 17, weight="bold"),
    ]  # fmt: skip
    for panel in board["panels"]:
        place = panel["gridPos"]
        x, y = place["x"] * CELL + MARGIN, place["y"] * ROW + 40
        w, h = place["w"] * CELL - MARGIN, place["h"] * ROW - MARGIN
        if panel["type"] == "row":
            out.append(text(x + 4, y + 18, panel["title"], 13, weight="bold"))
            continue
        out.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="3" fill="white" stroke="#d8dce1"/>')
        out.append(text(x + 10, y + 18, panel["title"], 12, weight="bold"))
        box = (float(x), float(y), float(w), float(h))
        out += graph(panel, box, url, run, now) if panel["type"] == "timeseries" else single(panel, box, url, run)
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    address, run_id, source, target_file = sys.argv[1:]
    Path(target_file).write_text(draw(address, run_id, json.loads(Path(source).read_text())))
