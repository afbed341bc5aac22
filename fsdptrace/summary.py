"""What a step's events add up to: per unit and in all. Works on raw records, in the process and from a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fsdptrace import events as ev
from fsdptrace.model_map import ModelMap


@dataclass(slots=True)
class GroupSummary:
    """One param group over some steps.

    ``gathers_*`` count all-gathers issued in that pass (``gathers_recompute``: inside a recomputation); ``noops`` were
    asked for and not needed; ``wasted`` were freed or thrown away unused. ``gathered_bytes`` and ``wire_bytes`` add up
    over gathers. ``lifetime_ns`` is host time from issue to free, ``distance_ns`` from issue to the wait.
    """

    group: int
    fqn: str
    bytes: int
    gathers_forward: int = 0
    gathers_backward: int = 0
    gathers_recompute: int = 0
    gathers_other: int = 0
    noops: int = 0
    wasted: int = 0
    prefetched: int = 0
    gathered_bytes: int = 0
    wire_bytes: int = 0
    reduce_scatters: int = 0
    all_reduces: int = 0
    reduced_bytes: int = 0
    reduce_wire_bytes: int = 0
    lifetime_ns: int = 0
    distance_ns: int = 0
    distance_max_ns: int = 0
    waits: int = 0

    @property
    def gathers(self) -> int:
        """All-gathers issued, in every pass."""
        return self.gathers_forward + self.gathers_backward + self.gathers_recompute + self.gathers_other


@dataclass(slots=True)
class Summary:
    """Steps of one model: rows per group and totals.

    Attributes:
        model, root: number and class of the model.
        steps: steps that ended in the records, with ``duration_ns`` from first to last event.
        counts: events by kind.
        unsharded_bytes, unsharded_peak: open or pending at the end, and the peak, in bytes.
        peak_seq: event at the peak; ``peak_groups`` the groups that were open or pending then, largest first.
        past_backward_bytes: open or pending at the end of the last step although the backward was over;
            ``past_backward_peak`` the most at any time of a step that ended.
    """

    model: int
    root: str
    groups: list[GroupSummary]
    steps: int = 0
    duration_ns: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    unsharded_bytes: int = 0
    unsharded_peak: int = 0
    peak_seq: int = 0
    peak_groups: list[tuple[str, int]] = field(default_factory=list)
    past_backward_bytes: int = 0
    past_backward_peak: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(slots=True)
class _Copy:
    issued: int
    size: int
    used: bool = False


class Summariser:
    """Adds records up; feed it in order and take :meth:`result` when done."""

    def __init__(self, model_map: ModelMap) -> None:
        self._map = model_map
        self._rows = [GroupSummary(group.id, group.fqn, group.bytes) for group in model_map.groups]
        self._out = Summary(model_map.model, model_map.root, self._rows)
        self._copies: dict[int, _Copy] = {}
        self._held = 0
        self._peak_open: tuple[int, ...] = ()
        self._counts = [0] * len(ev.KINDS)
        self._first = self._last = 0

    def feed(self, record: Sequence[int]) -> None:
        """One record of the model."""
        kind, seq, t0, t1, group, _parent, context, a, b, c, _d, e = record
        self._counts[kind] += 1
        self._first = min(self._first or t0, t0)
        self._last = max(self._last, t1)
        if kind == ev.UNSHARD:
            self._unshard(self._rows[group], seq, t0, context % 4, a, b, e)
        elif kind == ev.WAIT:
            self._wait(self._rows[group], t0)
        elif kind in (ev.RESHARD, ev.DISCARD):
            self._free(group, t0, kind == ev.DISCARD)
        elif kind in (ev.PRE_FORWARD, ev.PRE_BACKWARD):
            copy = self._copies.get(group)
            if copy is not None:
                copy.used = True
        elif kind in (ev.REDUCE_SCATTER, ev.ALL_REDUCE):
            row = self._rows[group]
            row.reduced_bytes += a
            row.reduce_wire_bytes += ev.wire_bytes(kind, a, b)
            if kind == ev.REDUCE_SCATTER:
                row.reduce_scatters += 1
            else:
                row.all_reduces += 1
        elif kind == ev.STATE and (a == 3 or b) and group not in self._copies:
            self._copies[group] = _Copy(t0, e, True)
            self._hold(e, seq)
        elif kind == ev.STEP:
            self._out.steps += 1
            self._out.past_backward_bytes = c
            self._out.past_backward_peak = max(self._out.past_backward_peak, e)

    def _unshard(self, row: GroupSummary, seq: int, t0: int, pass_: int, size: int, world: int, how: int) -> None:
        if how % 4:
            row.noops += 1
            return
        if pass_ == ev.PASS_FORWARD:
            row.gathers_forward += 1
        elif pass_ == ev.PASS_BACKWARD:
            row.gathers_backward += 1
        elif pass_ == ev.PASS_RECOMPUTE:
            row.gathers_recompute += 1
        else:
            row.gathers_other += 1
        row.prefetched += how >= 4 and how // ev.MODE_UNIT != 3
        row.gathered_bytes += size
        row.wire_bytes += ev.wire_bytes(ev.UNSHARD, size, world)
        self._copies[row.group] = _Copy(t0, size)
        self._hold(size, seq)

    def _hold(self, size: int, seq: int) -> None:
        self._held += size
        if self._held > self._out.unsharded_peak:
            self._out.unsharded_peak = self._held
            self._out.peak_seq = seq
            self._peak_open = tuple(self._copies)

    def _wait(self, row: GroupSummary, t0: int) -> None:
        copy = self._copies.get(row.group)
        if copy is not None:
            row.waits += 1
            row.distance_ns += t0 - copy.issued
            row.distance_max_ns = max(row.distance_max_ns, t0 - copy.issued)

    def _free(self, group: int, t0: int, discarded: bool) -> None:
        copy = self._copies.pop(group, None)
        if copy is None:
            return
        row = self._rows[group]
        row.lifetime_ns += t0 - copy.issued
        row.wasted += discarded or not copy.used
        self._held -= copy.size

    def result(self) -> Summary:
        """The sums so far."""
        out = self._out
        out.unsharded_bytes = self._held
        out.duration_ns = self._last - self._first
        out.counts = {ev.KINDS[kind]: number for kind, number in enumerate(self._counts) if number}
        sizes = [(self._rows[group].fqn, self._rows[group].bytes) for group in self._peak_open]
        out.peak_groups = sorted(sizes, key=lambda item: -item[1])
        return out


def summarise(model_map: ModelMap, records: Iterable[Sequence[int]]) -> Summary:
    """The summary of ``records`` of one model, in order of recording."""
    summariser = Summariser(model_map)
    for record in records:
        summariser.feed(record)
    return summariser.result()


def rows_of(flat: Sequence[int]) -> Iterable[Sequence[int]]:
    """The records of a flat list."""
    return (flat[i : i + ev.WIDTH] for i in range(0, len(flat), ev.WIDTH))
