"""Tables and charts of the page, as plain numbers: how they are shown, the page decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdptrace.analysis import ModelReport, Run, by_pattern
from fsdptrace.checks.text import count, size
from fsdptrace.cli.device import advice

MANY_STEPS, MANY_LINES = 4000, 8  # points and lines of a chart over steps
_OF_STEPS = ("duration_ns", "unsharded_peak", "past_backward_peak")
MANY_UNITS = 60  # more units than this are put together by name pattern

Table = dict[str, Any]


def tables(run: Run) -> list[Table]:
    """Units, communication and prefetches of each model, then ranks; those that have a row."""
    made: list[Table] = []
    for model in run.models:
        of = f" of {model.called(run.several_models)}"
        made += [_units(model, of), _communication(model, of), _prefetches(model, of), _device(model, of)]
    made.append(_ranks(run))
    return [table for place, table in enumerate(made) if table["rows"] or not place]


def _table(
    title: str, note: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[Any]], marked: Sequence[bool]
) -> Table:
    """``columns`` are ``(title, type)``: ``name``, ``text``, ``number``, ``bytes`` or ``ns``."""
    return {
        "title": title, "note": note, "columns": [{"title": name, "type": kind} for name, kind in columns],
        "rows": [list(row) for row in rows], "marked": list(marked),
    }  # fmt: skip


def step_lines(run: Run) -> dict[str, Any]:
    """The lines of the charts over steps: one per rank, or of many ranks the largest of all. Of very many steps a point is the
    largest of ``together`` in a row, so that none that stands out is lost; ``first`` are the first ones of each."""
    processes = [process for process in run.processes if len(process.steps)]
    ranks = sorted({process.rank for process in processes})
    numbers = sorted({number for process in processes for number in process.steps.numbers})
    together = max(1, -(-len(numbers) // MANY_STEPS))
    place = {number: i // together for i, number in enumerate(numbers)}
    first = numbers[::together]
    many = len(ranks) > MANY_LINES
    names = ["largest of all ranks"] if many else [f"rank {rank}" for rank in ranks]
    of: dict[str, list[list[int | None]]] = {name: [[None] * len(first) for _ in names] for name in _OF_STEPS}
    for process in processes:
        own = 0 if many else ranks.index(process.rank)
        for line in process.steps:
            at = place[line.step]
            for name, value in zip(_OF_STEPS, (line.duration_ns, line.unsharded_peak, line.past_backward_peak), strict=True):
                before = of[name][own][at]
                of[name][own][at] = value if before is None else max(before, value)
    return {"first": first, "together": together, "names": names, **of}


_UNIT_COLUMNS = (
    ("gathers forward", "gathers_forward", "number"), ("backward", "gathers_backward", "number"),
    ("recompute", "gathers_recompute", "number"), ("other", "gathers_other", "number"), ("no-op", "noops", "number"),
    ("prefetched", "prefetched", "number"), ("wasted", "wasted", "number"), ("gathered", "gathered_bytes", "bytes"),
    ("received", "wire_bytes", "bytes"), ("reduce-scatter", "reduce_scatters", "number"),
    ("all-reduce", "all_reduces", "number"), ("gathered for", "lifetime_ns", "ns"),
)  # fmt: skip


def _units(model: ModelReport, of: str) -> Table:
    """Means per step, rank and unit."""
    grouped = len(model.rows) > MANY_UNITS
    rows = by_pattern(model.rows) if grouped else model.rows
    kept = [column for column in _UNIT_COLUMNS if any(getattr(row.sums, column[1]) for row in rows)]
    waits = any(row.sums.waits for row in rows)
    note = f"per step{' and unit' if grouped else ''}, {model.behind}"
    if model.map.uncovered:
        left = len(model.map.uncovered) - 20
        note += f"; in no unit: {', '.join(model.map.uncovered[:20])}" + (f" and {left} more" if left > 0 else "")
    return _table(
        f"Units{of}", note,
        [
            ("unit", "name"), *([("units", "number")] if grouped else []), *((title, kind) for title, _, kind in kept),
            *([("issue to use", "ns"), ("at most", "ns")] if waits else []),
        ],
        [
            [
                row.name, *([row.units] if grouped else []), *(round(row.mean(name), 3) for _, name, _ in kept),
                *([row.sums.distance_ns // max(1, row.sums.waits), row.sums.distance_max_ns] if waits else []),
            ]
            for row in rows
        ],
        [row.sums.wasted > 0 for row in rows],
    )  # fmt: skip


def _communication(model: ModelReport, of: str) -> Table:
    """Bytes received, beside the closed form of the wrap."""
    traffic, steps = model.traffic, max(1, model.traffic.steps)
    note = (
        f"per step and rank: {size(round(traffic.wire_bytes / steps))} received, "
        f"{size(round(traffic.expected_wire_bytes / steps))} by the closed form of this wrap"
    )
    if traffic.unknown:
        note += f"; the form leaves out reductions of {count(len(traffic.unknown), 'unit')} whose dtypes are not in the files"
    return _table(
        f"Communication{of}", note,
        [
            ("collective", "text"), ("mesh", "text"), ("dtype", "text"), ("calls", "number"), ("by the form", "number"),
            ("received", "bytes"), ("by the form", "bytes"),
        ],
        [
            [
                row.collective, row.mesh, row.dtype, round(row.calls / steps, 3), round(row.expected_calls / steps, 3),
                row.wire_bytes / steps, row.expected_wire_bytes / steps,
            ]
            for row in traffic.rows
        ],
        [row.calls != row.expected_calls or row.wire_bytes != row.expected_wire_bytes for row in traffic.rows],
    )  # fmt: skip


def _prefetches(model: ModelReport, of: str) -> Table:
    """How prefetches served."""
    steps = max(1, model.steps)
    return _table(
        f"Prefetches{of}", "per step and rank; late: no other unit's hook lay between issue and wait",
        [
            ("pass", "text"), ("mode", "text"), ("issued", "number"), ("used", "number"), ("late", "number"),
            ("wasted", "number"), ("issue to wait", "ns"),
        ],
        [
            [
                direction, mode, *(round(value / steps, 3) for value in (entry.issued, entry.used, entry.late, entry.wasted)),
                entry.distance_ns // max(1, entry.waits),
            ]
            for (direction, mode), entry in model.prefetches.items()
        ],
        [entry.wasted > 0 or entry.late > 0 for entry in model.prefetches.values()],
    )  # fmt: skip


def _device(model: ModelReport, of: str) -> Table:
    """Device time per unit, where it was measured."""
    sums = model.device
    steps = max(1, sums.steps)
    rows = sums.rows(grouped=len(sums.units) > MANY_UNITS) if sums.units else []
    note = f"per step of {count(sums.steps, 'timed step')}; exposed: compute stood still for it"
    for item in sums.advice(model.map) if sums.units else ():
        note += f". {advice(item)}"
    return _table(
        f"On the device{of}", note,
        [
            ("unit", "name"), ("units", "number"), ("all-gathers", "ns"), ("exposed", "ns"), ("never waited for", "number"),
            ("reductions", "ns"), ("exposed", "ns"),
        ],
        [
            [
                row.name, row.units, row.gather_ns / steps / row.units, row.gather_exposed_ns / steps / row.units,
                round(row.unwaited / steps / row.units, 3), row.reduce_ns / steps / row.units,
                row.reduce_exposed_ns / steps / row.units,
            ]
            for row in rows
        ],
        [10 * (row.gather_exposed_ns + row.reduce_exposed_ns) > row.gather_ns + row.reduce_ns for row in rows],
    )  # fmt: skip


def _ranks(run: Run) -> Table:
    """Ranks beside each other, where there are several."""
    side = run.side_by_side
    rows = side.rows if len(side.rows) > 1 else []
    note = f"host times; {count(side.compared, 'collective')} of {count(side.steps, 'step')} compared" + (
        f" over {side.hosts} hosts, as good as their clocks agree" if side.hosts > 1 else ""
    )
    return _table(
        "Ranks", note,
        [
            ("rank", "number"), ("host", "text"), ("steps", "number"), ("per step", "ns"), ("in waits", "ns"),
            ("came last", "number"), ("behind the first", "ns"),
        ],
        [[row.rank, row.host, row.steps, row.step_ns, row.wait_ns, row.last, row.behind_ns] for row in rows],
        [False] * len(rows),
    )  # fmt: skip


def memory(model: ModelReport, several: bool) -> dict[str, Any]:
    peak = model.peak
    return {
        "root": model.called(several), "now": model.now[0], "now_rank": model.now[1], "peak": peak.bytes, "rank": peak.rank,
        "step": peak.step, "seq": peak.seq, "units": [list(unit) for unit in peak.units[:40]],
        "more_units": max(0, len(peak.units) - 40), "past_backward_peak": model.past_backward_peak,
        "past_backward": model.past_backward[0],
    }  # fmt: skip
