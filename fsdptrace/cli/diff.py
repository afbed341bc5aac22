"""``fsdptrace diff A B``: what differs between two runs, times apart."""

from __future__ import annotations

from collections.abc import Sequence

from fsdptrace.analysis.diff import Changed, Diff, Parting, Side
from fsdptrace.analysis.findings import Finding
from fsdptrace.checks.text import count, pattern, size
from fsdptrace.cli.output import Column, Screen, clean, name, number

SHOWN = 30  # lines of one section
_WORDS = {
    "gathers_forward": "gathers in forward", "gathers_backward": "gathers in backward",
    "gathers_recompute": "gathers in recomputation", "gathers_other": "gathers elsewhere", "noops": "gathers not needed",
    "wasted": "gathers wasted", "prefetched": "prefetches", "gathered_bytes": "bytes gathered",
    "wire_bytes": "bytes received by gathers", "reduce_scatters": "reduce-scatters", "all_reduces": "all-reduces",
    "reduced_bytes": "bytes reduced", "reduce_wire_bytes": "bytes received by reductions", "waits": "waits",
    "unsharded_peak": "most gathered at one time", "past_backward_peak": "most held past its backward",
}  # fmt: skip


def show(screen: Screen, diff: Diff, every: bool) -> None:
    """All of it, and what it is based on."""
    for letter, side in (("A", diff.a), ("B", diff.b)):
        screen.prose(f"{letter}  {_side(side)}", style="bold", hang=4)
    screen.prose(
        f"compared event by event: {count(diff.steps, 'step')} (summed over ranks) that both have in full; "
        f"by their step lines: {count(diff.line_steps, 'step')}"
    )
    _findings(screen, diff)
    many = len({item.model for item in (*diff.model, *diff.counts)} | {item.model for item in diff.partings}) > 1
    if diff.model:
        screen.title("the model")
        _lines(screen, [_of_model(item, many) for item in _alike(diff.model)], every)
    if diff.memory:
        screen.title("memory in gathered parameters")
        for item in diff.memory:
            screen.prose(f"{_WORDS[item.what]}: {size(item.a)} in A, {size(item.b)} in B{_share(item.a, item.b)}", 2)
    if diff.counts:
        _counts(screen, diff, every)
    if diff.partings:
        _partings(screen, diff.partings, every, many)
    screen.line()
    if diff.same:
        screen.prose("no difference" if diff.steps else "no difference in what could be compared", style="bold green")
    else:
        screen.prose("they differ", style="bold yellow")
    for line in diff.notes:
        screen.item(clean(line), "yellow")
    for problem in (*diff.a.problems, *diff.b.problems):
        screen.item(clean(problem, 600))


def _side(side: Side) -> str:
    return (
        f"run {clean(side.label)}: {clean(side.folder)} ({count(side.ranks, 'rank')}, {count(side.steps, 'step')}, "
        f"torch {clean(', '.join(side.torch))})"
    )


def _findings(screen: Screen, diff: Diff) -> None:
    sides: tuple[tuple[str, list[Finding]], ...] = (("A", diff.findings_a), ("B", diff.findings_b))
    if not diff.findings_a and not diff.findings_b:
        return
    screen.title("findings")
    for letter, found in sides:
        for finding in found[:SHOWN]:
            screen.item(
                f"only in {letter}: {clean(finding.severity, 20)} {clean(finding.rule, 60)} {name(finding.pattern)}, "
                f"{count(finding.times, 'time')}. {clean(finding.first.message)}"
            )


def _alike(changes: Sequence[Changed]) -> list[tuple[Changed, int]]:
    """Units of one name pattern that changed in the same way, as one: the first, and how many."""
    together: dict[tuple[object, ...], list[Changed]] = {}
    for item in changes:
        together.setdefault((item.model, pattern(item.unit), item.what, str(item.a), str(item.b)), []).append(item)
    return [(items[0], len(items)) for items in together.values()]


def _unit(item: Changed, units: int, many: bool) -> str:
    where = name(item.unit) if units == 1 else f"{name(pattern(item.unit))} x{units}"
    return where + (f" (model {item.model})" if many else "")


def _of_model(alike: tuple[Changed, int], many: bool) -> str:
    item, units = alike
    where = _unit(item, units, many)
    if item.what == "unit":
        return f"{where}: only in {'A' if item.a else 'B'}"
    return f"{where}: {item.what} {clean(item.a, 100)} in A, {clean(item.b, 100)} in B"


def _lines(screen: Screen, lines: Sequence[str], every: bool) -> None:
    shown = lines if every else lines[:SHOWN]
    for line in shown:
        screen.item(line)
    if len(shown) < len(lines):
        screen.prose(f"({len(shown)} of {len(lines)}; --all shows each)", style="dim")


def _share(a: float, b: float) -> str:
    return f" ({100 * (b - a) / a:+.1f} %)" if a else ""


def _counts(screen: Screen, diff: Diff, every: bool) -> None:
    screen.title("counts and bytes, per step and rank")
    many = len({item.model for item in diff.counts}) > 1
    alike = _alike(diff.counts)
    shown = alike if every else alike[:SHOWN]
    columns = [Column("unit", right=False), Column("what", right=False), Column("A"), Column("B"), Column("", keep=1)]
    steps = max(1, diff.steps)
    cells = []
    for item, units in shown:
        is_bytes = item.what.endswith("bytes")
        a, b = (size(round(value / steps)) if is_bytes else number(value / steps) for value in (item.a, item.b))
        if a == b:  # too small a difference to be seen per step
            a, b = (f"{value:,} in all" for value in (item.a, item.b))
        cells.append(
            [_unit(item, units, many), _WORDS.get(item.what, item.what.replace("_", " ")), a, b, _share(item.a, item.b)]
        )
    screen.table(columns, cells)
    if len(shown) < len(alike):
        screen.prose(f"({len(shown)} of {len(alike)} rows; --all shows each)", style="dim")


def _partings(screen: Screen, partings: Sequence[Parting], every: bool, many: bool) -> None:
    screen.title("where sequences part: the first event of a unit that is another one")
    together: dict[tuple[object, ...], list[Parting]] = {}
    for item in partings:
        unit = pattern(item.unit) if item.unit is not None else None
        key = (item.model, unit, item.place, pattern(item.a), pattern(item.b)) if not every else (id(item),)
        together.setdefault(key, []).append(item)
    groups = list(together.values())
    for item, *others in groups if every else groups[: SHOWN // 3]:
        where = "(no unit)" if item.unit is None else name(item.unit)
        more = f" (and {len(others)} more of {name(pattern(item.unit or ''))} alike)" if others else ""
        model = f", model {item.model}" if many else ""
        screen.item(
            f"{where}{more}: first in step {item.step} on rank {item.rank}{model}, in {count(item.steps, 'step')} in all"
        )
        if item.place:
            if item.before:
                screen.prose(f"after   {clean(item.before)}", 6, "dim")
            for letter, text, seq in (("A", item.a, item.a_seq), ("B", item.b, item.b_seq)):
                screen.prose(f"{letter}       {clean(text)} (event {seq})" if text else f"{letter}       nothing more", 6)
    if not every and len(groups) > SHOWN // 3:
        screen.prose(f"({SHOWN // 3} of {len(groups)}; --all shows each)", style="dim")
