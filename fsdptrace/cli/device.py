"""Section of ``fsdptrace report``: what the device did, where it was timed, and what to change about exposed gathers."""

from __future__ import annotations

from fsdptrace.analysis import ModelReport
from fsdptrace.analysis.device import Advice, UnitDevice
from fsdptrace.checks.text import count, size
from fsdptrace.cli.output import Column, Screen, duration, name, number

MANY_ROWS = 30


def show(screen: Screen, model: ModelReport, every: bool) -> None:
    """Device time per unit, exposed time, allocator memory, advice; nothing without device timing."""
    sums = model.device
    if not sums.units:
        return
    steps = max(1, sums.steps)
    rows = sums.rows(grouped=not every and len(sums.units) > MANY_ROWS)
    exposed = sum(row.gather_exposed_ns + row.reduce_exposed_ns for row in rows)
    share = f", {100 * exposed / sums.span_ns:.1f} % of it" if sums.span_ns else ""
    screen.title(
        f"on the device, per step and rank: {duration(sums.span_ns / steps)}, compute waited {duration(exposed / steps)} for "
        f"communication{share}; mean of {count(sums.steps, 'timed step')}"
    )
    columns = [
        Column("unit", right=False), Column("all-gather"), Column("exposed"), Column("overlapped", keep=3),
        Column("never waited for", keep=2), Column("reduction", keep=1), Column("exposed"),
    ]  # fmt: skip
    screen.table(columns, [_cells(row, steps) for row in rows], ["yellow" if _exposed(row) else "" for row in rows])
    screen.prose("(time on the device, per step of all its calls; exposed: compute stood still for it)", style="dim")
    if sums.allocated:
        screen.prose(
            f"allocator at unit boundaries, at most: {size(sums.allocated)} allocated, {size(sums.reserved)} reserved", 2
        )
    for item in sums.advice(model.map):
        screen.item(advice(item))
    if sums.missing:
        screen.prose(f"{count(sums.missing, 'timing')} never completed: the device was far behind, or stopped", style="yellow")


def _exposed(row: UnitDevice) -> bool:
    return (row.gather_exposed_ns + row.reduce_exposed_ns) * 10 > row.gather_ns + row.reduce_ns


def _cells(row: UnitDevice, steps: int) -> list[str]:
    each = steps * max(1, row.units)
    unwaited = f"{number(row.unwaited / each)}x {duration(row.unwaited_ns / each)}" if row.unwaited else "-"
    return [
        name(row.name) + (f"  x{row.units}" if row.units > 1 else ""),
        duration(row.gather_ns / each), duration(row.gather_exposed_ns / each),
        duration((row.gather_ns - row.gather_exposed_ns) / each), unwaited,
        duration(row.reduce_ns / each) if row.reductions else "-",
        duration(row.reduce_exposed_ns / each) if row.reductions else "-",
    ]  # fmt: skip


def advice(item: Advice) -> str:
    """One sentence: how much is exposed, what would hide it, what that costs."""
    text = f"in {item.name}, compute waits {duration(item.exposed_ns)} a step for all-gathers"
    if not item.ahead:
        return (
            f"{text}: they run {duration(item.gather_ns)} one after the other, compute between them only "
            f"{duration(item.compute_ns)}, so that prefetching cannot hide more than all but {duration(item.least_ns)}. More "
            "compute per gather would: a larger batch, smaller param_dtype (MixedPrecisionPolicy), a smaller shard mesh "
            "(HSDP), or reshard_after_forward=False to gather once instead of twice."
        )
    cost = f"it costs up to {size(item.bytes)} more" if item.bytes else "it costs no more memory than now"
    return (
        f"{text}; {count(item.ahead, 'unit')} ahead would hide all but {duration(item.least_ns)} of it: on each unit, "
        f"{item.call}([the next {item.ahead}]); {cost}"
        + (" (issued by the unit before instead of when the host gets there)." if item.ahead == 1 else ".")
    )
