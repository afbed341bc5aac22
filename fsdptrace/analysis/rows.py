"""What the steps of all ranks add up to per unit, and the memory behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from fsdptrace.analysis.process import StepPart
from fsdptrace.checks.text import pattern
from fsdptrace.summary import GroupSummary, Prefetches, RegionSums, Summariser, Summary, Traffic

_SUMS = tuple(
    item.name for item in fields(GroupSummary) if item.name not in ("group", "fqn", "bytes", "distance_max_ns")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that were gathered at one time on one rank, and the units that held them, largest first.

    ``units`` is empty where the step's events were not written. ``seq`` is the event that made it, 0 then.
    """

    bytes: int = 0
    rank: int = 0
    step: int = 0
    seq: int = 0
    units: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True)
class UnitRow:
    """One param group (or, in a grouped table, several of one name pattern) over steps and ranks.

    Attributes:
        name: FQN, or a pattern; empty for the root.
        units: how many groups the row stands for.
        steps: steps behind it, summed over ranks: divide sums by it for a mean per step, rank and group.
        bytes_low, bytes_high: size of one gather, in bytes.
        sums: the sums of :class:`~fsdptrace.summary.GroupSummary`, by field.
        differs: fields whose mean per step is not the same on all ranks.
    """

    name: str
    units: int
    steps: int
    bytes_low: int
    bytes_high: int
    sums: GroupSummary
    differs: tuple[str, ...] = ()

    def mean(self, field_name: str) -> float:
        """``field_name`` per step, rank and group."""
        return float(getattr(self.sums, field_name)) / self.steps if self.steps else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data, with means."""
        sums = {name: getattr(self.sums, name) for name in (*_SUMS, "distance_max_ns")}
        means = {name: self.mean(name) for name in (*_SUMS, "gathers")}
        return {
            "name": self.name, "units": self.units, "steps": self.steps, "bytes_low": self.bytes_low,
            "bytes_high": self.bytes_high, "sum": {**sums, "gathers": self.sums.gathers}, "mean": means,
            "differs_between_ranks": list(self.differs),
        }  # fmt: skip


@dataclass(slots=True)
class Units:
    """Sums of one model on one rank, over the steps whose events were all read.

    ``unfinished`` says that there was none, so that the sums are those of a step that did not end.
    """

    rank: int
    steps: int = 0
    groups: dict[str, GroupSummary] = field(default_factory=dict)
    now: int = 0
    peak: Peak = field(default_factory=Peak)
    past_backward: int = 0
    past_backward_peak: int = 0
    unfinished: bool = False
    traffic: dict[tuple[int, int, int, int], Traffic] = field(default_factory=dict)
    prefetches: dict[tuple[str, str], Prefetches] = field(default_factory=dict)
    regions: dict[str, RegionSums] = field(default_factory=dict)
    outermost: set[int] = field(default_factory=set)

    def add(self, summary: Summary) -> None:
        """Adds the sums of some steps."""
        for row in summary.groups:
            into = self.groups.get(row.fqn)
            if into is None:
                self.groups[row.fqn] = replace(row)
            else:
                _add(into, row)
        for key, entry in summary.traffic.items():
            add_fields(self.traffic.setdefault(key, Traffic()), entry)
        for name, prefetches in summary.prefetches.items():
            add_fields(self.prefetches.setdefault(name, Prefetches()), prefetches)
        for name_of_region, region in summary.regions.items():
            add_fields(self.regions.setdefault(name_of_region, RegionSums()), region)
        self.outermost |= summary.outermost


T = TypeVar("T", Traffic, Prefetches, RegionSums)


def add_fields(into: T, other: T) -> None:
    """Adds every field of ``other`` to that of ``into``."""
    for item in fields(other):
        setattr(into, item.name, getattr(into, item.name) + getattr(other, item.name))


def _add(into: GroupSummary, row: GroupSummary) -> None:
    for name in _SUMS:
        setattr(into, name, getattr(into, name) + getattr(row, name))
    into.distance_max_ns = max(into.distance_max_ns, row.distance_max_ns)


class UnitSums:
    """A sink for :func:`~fsdptrace.analysis.lines.read_process`: sums per model of one process.

    Steps that were written with one line only are a gap: what was open before one is not known after it, so that sums
    start anew there; the memory figures come from the step lines, which see everything.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.models: dict[int, Units] = {}
        self._running: dict[int, Summariser] = {}

    def __call__(self, part: StepPart) -> None:
        number = part.map.model
        units = self.models.setdefault(number, Units(self.rank))
        if part.line is not None:
            units.now = part.line.unsharded_bytes
            units.past_backward = part.line.past_backward_bytes
            units.past_backward_peak = max(units.past_backward_peak, part.line.past_backward_peak)
        if part.line is None or not part.full:
            self._partial(units, part)
            return
        summariser = self._running.get(number) if part.contiguous else None
        if summariser is None:
            self._close(number, units)
            summariser = self._running[number] = Summariser(part.map, part.texts)
        summariser.feed(part.records)
        units.steps += 1
        self._peak(units, part, summariser)

    def _partial(self, units: Units, part: StepPart) -> None:
        """A step of which not all is known: nothing for the table, but what memory says counts."""
        summariser = self._running.get(part.map.model) if part.contiguous else None
        self._close(part.map.model, units)
        if part.line is not None:
            if part.line.unsharded_peak > units.peak.bytes:
                units.peak = Peak(part.line.unsharded_peak, self.rank, part.step)
            return
        summariser = summariser or Summariser(part.map, part.texts)
        summariser.feed(part.records)
        result = summariser.result()
        units.now = result.unsharded_bytes
        self._peak(units, part, summariser)
        if not units.steps:
            units.steps, units.unfinished = 1, True
            units.add(result)

    def _peak(self, units: Units, part: StepPart, summariser: Summariser) -> None:
        result = summariser.result()
        line_peak = part.line.unsharded_peak if part.line is not None else 0
        if result.unsharded_peak > units.peak.bytes:
            units.peak = Peak(result.unsharded_peak, self.rank, part.step, result.peak_seq, tuple(result.peak_groups))
        if line_peak > units.peak.bytes:
            units.peak = Peak(line_peak, self.rank, part.step)

    def _close(self, number: int, units: Units) -> None:
        summariser = self._running.pop(number, None)
        if summariser is not None:
            units.add(summariser.result())

    def result(self) -> dict[int, Units]:
        """The sums by model number; call once, when all is read."""
        for number, units in self.models.items():
            self._close(number, units)
        return self.models


def merge(per_rank: Iterable[Units]) -> list[UnitRow]:
    """One row per group over all ranks, in the order of the model map."""
    rows: dict[str, UnitRow] = {}
    means: dict[str, list[tuple[float, ...]]] = {}
    compared = ("gathers", "noops", "wasted", "reduce_scatters", "all_reduces")
    for units in per_rank:
        if not units.steps:
            continue
        for fqn, group in units.groups.items():
            row = rows.get(fqn)
            if row is None:
                row = rows[fqn] = UnitRow(fqn, 1, 0, group.bytes, group.bytes, GroupSummary(group.group, fqn, group.bytes))
            _widen(row, group.bytes, group.bytes)
            row.steps += units.steps
            _add(row.sums, group)
            means.setdefault(fqn, []).append(tuple(getattr(group, name) / units.steps for name in compared))
    for fqn, row in rows.items():
        columns = zip(*means[fqn], strict=True)
        row.differs = tuple(name for name, values in zip(compared, columns, strict=True) if len(set(values)) > 1)
    return list(rows.values())


def _widen(row: UnitRow, low: int, high: int) -> None:
    row.bytes_low, row.bytes_high = min(row.bytes_low, low), max(row.bytes_high, high)


def by_pattern(rows: Iterable[UnitRow]) -> list[UnitRow]:
    """Rows of one name pattern as one: ``layers.*`` for all layers."""
    grouped: dict[str, UnitRow] = {}
    for row in rows:
        name = pattern(row.name)
        into = grouped.get(name)
        if into is None:
            into = grouped[name] = UnitRow(
                name, 0, 0, row.bytes_low, row.bytes_high, GroupSummary(row.sums.group, name, row.bytes_high)
            )
        into.units += row.units
        into.steps += row.steps
        _widen(into, row.bytes_low, row.bytes_high)
        _add(into.sums, row.sums)
        into.differs = tuple(dict.fromkeys((*into.differs, *row.differs)))
    return list(grouped.values())


def peak_json(peak: Peak) -> dict[str, Any]:
    """Plain data."""
    data = asdict(peak)
    data["units"] = [{"name": name, "bytes": size} for name, size in peak.units]
    return data
