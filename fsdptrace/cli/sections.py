"""Sections of ``fsdptrace report`` behind the units: communication, prefetches, ranks, the tracer's own cost."""

from __future__ import annotations

from collections.abc import Sequence

from fsdptrace.analysis import ModelReport, Run
from fsdptrace.analysis.ranks import RankRow, Ranks, Slowest
from fsdptrace.analysis.rows import add_fields
from fsdptrace.analysis.traffic import Difference
from fsdptrace.checks.text import count, pattern, size
from fsdptrace.cli.output import Column, Screen, clean, duration, name, number
from fsdptrace.summary import RegionSums

MANY_RANKS = 16  # of more ranks, only those that come last most often are shown
SHOWN = 8


def communication(screen: Screen, model: ModelReport, every: bool) -> None:
    """Bytes received per step and rank, by mesh and dtype, beside the closed form."""
    traffic = model.traffic
    if not traffic.rows or not traffic.steps:
        return
    steps = traffic.steps
    screen.title(
        f"communication, per step and rank: {size(round(traffic.wire_bytes / steps))} received; "
        f"{size(round(traffic.expected_wire_bytes / steps))} by the closed form of this wrap"
    )
    columns = [
        Column("collective", right=False), Column("mesh", right=False, keep=4), Column("dtype", right=False, keep=3),
        Column("calls"), Column("of the form", keep=1), Column("received"), Column("of the form", keep=2),
    ]  # fmt: skip
    cells = [
        [
            row.collective, clean(row.mesh, 40), clean(row.dtype, 20), number(row.calls / steps),
            number(row.expected_calls / steps), size(round(row.wire_bytes / steps)),
            size(round(row.expected_wire_bytes / steps)),
        ]
        for row in traffic.rows
    ]  # fmt: skip
    more = [row.calls > row.expected_calls or row.wire_bytes > row.expected_wire_bytes for row in traffic.rows]
    screen.table(columns, cells, ["yellow" if item else "" for item in more])
    above = [item for item in traffic.differences if item.wire_bytes > item.expected_wire_bytes]
    open_already = [item for item in traffic.differences if item not in above and item.collective == "all-gather"]
    held_back = [item for item in traffic.differences if item not in above and item not in open_already]
    for said, items, style in (
        ("more than the form", above, "yellow"), ("less, since they were open already", open_already, "dim"),
        ("less, since gradients were held back", held_back, "dim"),
    ):  # fmt: skip
        _not_the_form(screen, said, items, style, steps, every)
    if traffic.unknown:
        names = ", ".join(name(unit) for unit in traffic.unknown[:3]) + (" …" if len(traffic.unknown) > 3 else "")
        screen.prose(f"the form leaves out reductions of {names}: their dtypes are not in the model line", style="dim")


def _not_the_form(screen: Screen, said: str, items: Sequence[Difference], style: str, steps: int, every: bool) -> None:
    """A line on the units that differ in one way; of one name pattern that differ alike, the first."""
    alike: dict[tuple[object, ...], list[Difference]] = {}
    for item in items:
        numbers = (item.calls, item.expected_calls, item.wire_bytes, item.expected_wire_bytes)
        key = (item.collective, pattern(item.unit), *numbers) if not every else (item.collective, item.unit)
        alike.setdefault(key, []).append(item)
    if not alike:
        return
    parts = [_difference(first, steps) + (f" and {len(rest)} alike" if rest else "") for first, *rest in alike.values()]
    left = 0 if every else max(0, len(parts) - SHOWN)
    shown = "; ".join(parts if every else parts[:SHOWN]) + (f"; and {left} more (--all)" if left else "")
    screen.prose(f"{said}: {shown}", 2, style)


def _difference(item: Difference, steps: int) -> str:
    bytes_ = item.wire_bytes - item.expected_wire_bytes
    sign = "+" if bytes_ >= 0 else "-"
    return (
        f"{item.collective} of {name(item.unit)} {number(item.calls / steps)}x instead of "
        f"{number(item.expected_calls / steps)}x ({sign}{size(round(abs(bytes_) / steps))})"
    )


def prefetches(screen: Screen, model: ModelReport) -> None:
    """How many prefetches were issued, used, late and wasted."""
    if not model.prefetches or not model.steps:
        return
    screen.title("prefetches, per step and rank")
    columns = [
        Column("pass", right=False), Column("mode", right=False), Column("issued"), Column("used"), Column("late", keep=2),
        Column("wasted"), Column("issue to wait", keep=3),
    ]  # fmt: skip
    cells, styles = [], []
    for (direction, mode), entry in model.prefetches.items():
        counts = [number(value / model.steps) for value in (entry.issued, entry.used, entry.late, entry.wasted)]
        cells.append([direction, mode, *counts, duration(entry.distance_ns / entry.waits) if entry.waits else "-"])
        styles.append("yellow" if entry.wasted or entry.late else "")
    screen.table(columns, cells, styles)
    if any(entry.late for entry in model.prefetches.values()):
        screen.prose(
            "(late: no other unit's hook between issue and wait, so there was nothing to hide the gather behind)", style="dim"
        )


def regions(screen: Screen, model: ModelReport, every: bool) -> None:
    """Checkpointed regions: what they save, and what their recomputation costs."""
    if not model.regions or not model.steps:
        return
    rows: dict[str, RegionSums] = {}
    for called, entry in model.regions.items():
        add_fields(rows.setdefault(called if every else pattern(called), RegionSums()), entry)
    steps = model.steps
    spent = sum(entry.recompute_ns for entry in rows.values()) / steps
    screen.title(f"checkpointed regions, per step and rank: {duration(spent)} of host time in recomputation")
    columns = [
        Column("region", right=False), Column("calls"), Column("saved tensors", keep=3), Column("saved bytes"),
        Column("recomputed"), Column("took", keep=2), Column("gathers in it", keep=1),
    ]  # fmt: skip
    cells = [
        [
            name(called), number(entry.calls / steps), number(entry.saved / steps) if entry.saved else "-",
            size(round(entry.saved_bytes / steps)) if entry.saved_bytes else "-", number(entry.recomputes / steps),
            duration(entry.recompute_ns / steps), number(entry.gathers / steps),
        ]
        for called, entry in rows.items()
    ]  # fmt: skip
    screen.table(columns, cells, ["" for _ in cells])


def ranks(screen: Screen, run: Run, every: bool) -> None:
    """Ranks beside each other, and who comes last to collectives."""
    side = run.side_by_side
    if len(side.rows) < 2:
        return
    timed = [row for row in side.rows if row.steps]
    screen.title("ranks (host times)")
    if timed:
        slow, quick = max(timed, key=lambda row: row.step_ns), min(timed, key=lambda row: row.step_ns)
        times = f"{slow.step_ns / quick.step_ns:.2f} times as long"
        screen.prose(
            f"a step takes {duration(slow.step_ns)} on rank {slow.rank}, the slowest, and {duration(quick.step_ns)} on rank "
            f"{quick.rank}, the quickest: {times}" if slow.step_ns > quick.step_ns * 1.005
            else f"a step takes {duration(slow.step_ns)} on all ranks alike"
        )  # fmt: skip
    shown = side.rows if every or len(side.rows) <= MANY_RANKS else _worst(side)
    columns = [
        Column("rank"), Column("host", right=False, keep=5), Column("steps", keep=4), Column("per step"),
        Column("in waits", keep=3), Column("came last", keep=1), Column("behind the first", keep=2),
    ]  # fmt: skip
    cells = [
        [
            str(row.rank), clean(row.host, 30), f"{row.steps:,}", duration(row.step_ns) if row.steps else "-",
            duration(row.wait_ns), f"{row.last:,}", duration(row.behind_ns),
        ]
        for row in shown
    ]  # fmt: skip
    screen.table(columns, cells)
    if len(shown) < len(side.rows):
        screen.prose(
            f"({len(shown)} of {len(side.rows)} ranks, those that came last most often; --all shows each)", style="dim"
        )
    _collectives(screen, side)


def _worst(side: Ranks) -> list[RankRow]:
    most = sorted(side.rows, key=lambda row: (-row.last, -row.behind_ns, row.rank))[:SHOWN]
    return sorted(most, key=lambda row: row.rank)


def _collectives(screen: Screen, side: Ranks) -> None:
    if side.different:
        screen.prose(
            f"in {count(side.different, 'step')} ranks issued different collectives, or in another order: not compared",
            style="yellow",
        )
    if not side.compared:
        return
    clocks = "" if side.hosts == 1 else f"; {side.hosts} hosts, so as good as their clocks agree"
    screen.prose(f"({count(side.compared, 'collective')} of {count(side.steps, 'step')} compared{clocks})", style="dim")
    alike: dict[tuple[str, str], list[Slowest]] = {}
    for item in side.slowest:
        alike.setdefault((item.collective, pattern(item.unit)), []).append(item)
    for item, *others in list(alike.values())[:5]:
        more = f" (and {len(others)} more of {pattern(item.unit)})" if others else ""
        screen.item(
            f"{item.collective} of {name(item.unit)}{more}: the last rank {duration(item.mean_ns)} behind the first, "
            f"{duration(item.max_ns)} at most; {item.times:,} of {item.calls:,} times it was rank {item.rank}"
        )


def own_cost(screen: Screen, rows: Sequence[RankRow], run: Run) -> None:
    """What tracing cost, as far as the files tell."""
    written = sum(row.events for row in rows)
    if not written or not run.basis.rank_steps:
        return
    on_disk = sum(row.bytes for row in rows)
    parts = [
        f"{count(round(run.basis.events / run.basis.rank_steps), 'event')} a step, {count(written, 'event')} written, "
        f"{size(on_disk)}, {on_disk / written:.0f} B each"
    ]
    drained = [row for row in rows if row.drain_ns and row.events]
    if drained:
        busy, events = sum(row.drain_ns for row in drained), sum(row.events for row in drained)
        parts.append(f"{duration(busy / events)} of CPU per written event on the drain thread")
        time = sum(row.step_ns * row.steps for row in drained)
        if time:
            parts.append(f"{100 * busy / time:.1f} % of the steps' time")
    dropped = sum(row.dropped for row in rows)
    parts.append(f"{count(dropped, 'event')} dropped" if dropped else "none dropped")
    screen.title("what tracing cost")
    screen.prose("; ".join(parts) + ". The hooks' own time is not in the files: docs/overhead.md has it as measured.", 2)
