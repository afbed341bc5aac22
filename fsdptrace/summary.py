"""What a step's events add up to: per unit and in all. Works on raw records, in the process and from a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fsdptrace import events as ev
from fsdptrace.model_map import ModelMap

_PRE = (ev.PRE_FORWARD, ev.PRE_BACKWARD)
_HOOKS = (*_PRE, ev.POST_FORWARD, ev.POST_BACKWARD)
_MANUAL = ev.MODES.index("manual")
_IN_FORWARD = ev.TRAINING_STATES.index("forward")


@dataclass(slots=True)
class GroupSummary:
    """One param group over some steps.

    ``gathers_*`` count all-gathers issued in that pass (``gathers_recompute``: inside a recomputation); ``noops`` were
    asked for and not needed; ``wasted`` were freed or thrown away unused. ``gathered_bytes`` and ``wire_bytes`` add up
    over gathers. ``lifetime_ns`` is host time from issue to free, ``distance_ns`` from issue to the wait, ``wait_ns`` in waits.
    ``forwards`` and ``backwards`` count uses: pre-forward hooks outside recomputations, and pre-backward hooks.
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
    wait_ns: int = 0
    forwards: int = 0
    backwards: int = 0

    @property
    def gathers(self) -> int:
        """All-gathers issued, in every pass."""
        return self.gathers_forward + self.gathers_backward + self.gathers_recompute + self.gathers_other


@dataclass(slots=True)
class Prefetches:
    """Prefetches of one direction and mode: gathers that another group's hook asked for.

    ``used`` of the ``issued`` ones served a forward or backward; of these ``late`` had no other group's hook between issue and
    wait, so that there was nothing for the gather to hide behind. ``wasted`` were freed or thrown away unused; the rest is
    still open. ``distance_ns`` is host time from issue to wait, over those that were waited for (``waits``).
    """

    issued: int = 0
    used: int = 0
    late: int = 0
    wasted: int = 0
    waits: int = 0
    distance_ns: int = 0


@dataclass(slots=True)
class RegionSums:
    """Checkpointed regions of one name: ``calls`` in forwards, tensors and bytes that they saved (where PyTorch tells), their
    recomputations, host time in these in ns, and all-gathers that were issued in them."""

    calls: int = 0
    saved: int = 0
    saved_bytes: int = 0
    recomputes: int = 0
    recompute_ns: int = 0
    gathers: int = 0


@dataclass(slots=True)
class Traffic:
    """Collectives of one kind, group, world and dtype: how many, their bytes, and the bytes that this rank received."""

    calls: int = 0
    bytes: int = 0
    wire_bytes: int = 0


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
        prefetches: by ``(direction, mode)``.
        traffic: by ``(kind, group, world, dtype)``, the last as numbers of :mod:`fsdptrace.events`.
        regions: checkpointed regions by name.
        outermost: ids of the units whose forward was an outermost one.
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
    prefetches: dict[tuple[str, str], Prefetches] = field(default_factory=dict)
    traffic: dict[tuple[int, int, int, int], Traffic] = field(default_factory=dict)
    regions: dict[str, RegionSums] = field(default_factory=dict)
    outermost: set[int] = field(default_factory=set)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        data = asdict(self)
        del data["outermost"]
        data["prefetches"] = [
            {"direction": direction, "mode": mode, **asdict(entry)} for (direction, mode), entry in self.prefetches.items()
        ]
        data["traffic"] = [
            {
                "collective": ev.KINDS[kind], "fqn": self.groups[group].fqn, "world": world, "dtype": ev.DTYPES[dtype],
                **asdict(entry),
            }
            for (kind, group, world, dtype), entry in self.traffic.items()
        ]  # fmt: skip
        return data


@dataclass(slots=True)
class _Copy:
    issued: int
    size: int
    used: bool = False
    hooks: int = -1  # hooks of groups that had ended when it was issued
    prefetch: Prefetches | None = None


class Summariser:
    """Adds records up; feed it in order and take :meth:`result` when done."""

    def __init__(self, model_map: ModelMap, texts: ev.Texts | None = None) -> None:
        self._map = model_map
        self._texts = texts or ev.Texts()
        self._gathered_again: list[int] = []  # numbers of gathers in a recomputation that has not ended
        self._rows = [GroupSummary(group.id, group.fqn, group.bytes) for group in model_map.groups]
        self._out = Summary(model_map.model, model_map.root, self._rows)
        self._copies: dict[int, _Copy] = {}
        self._held = 0
        self._peak_open: tuple[int, ...] = ()
        self._counts = [0] * len(ev.KINDS)
        self._first = self._last = 0
        self._hooks = 0

    def feed(self, records: Sequence[int]) -> None:
        """Records of the model, flat."""
        if not records:
            return
        for kind, number in Counter(records[ev.KIND :: ev.WIDTH]).items():
            self._counts[kind] += number
        first = min(records[ev.T0 :: ev.WIDTH])
        self._first = min(self._first or first, first)
        self._last = max(self._last, max(records[ev.T1 :: ev.WIDTH]))
        rows = self._rows
        # One iterator twelve times: zip takes a record at a time, without a slice for each.
        for kind, seq, t0, t1, group, _, context, a, b, c, _d, e in zip(*[iter(records)] * ev.WIDTH, strict=True):
            if kind == ev.UNSHARD:
                if e % 4:
                    rows[group].noops += 1
                else:
                    self._unshard(rows[group], seq, t0, context % 4, a, b, c, e)
            elif kind == ev.WAIT:
                self._wait(rows[group], t0, t1)
            elif kind in _HOOKS:
                self._hooks += 1
                if kind in _PRE:
                    self._use(rows[group], kind, context % 4, a)
            elif kind in (ev.RESHARD, ev.DISCARD):
                self._free(group, t0, kind == ev.DISCARD)
            elif kind in (ev.REDUCE_SCATTER, ev.ALL_REDUCE):
                self._reduce(rows[group], kind, a, b, c)
            elif kind == ev.STATE:
                if (a == 3 or b) and group not in self._copies:
                    self._copies[group] = _Copy(t0, e, True)
                    self._hold(e, seq)
            elif kind == ev.REGION:
                if context % 4 == ev.PASS_FORWARD:
                    entry = self._out.regions.setdefault(self._texts.get(e), RegionSums())
                    entry.calls += 1
                    entry.saved += max(b, 0)
                    entry.saved_bytes += max(c, 0)
            elif kind == ev.RECOMPUTE:
                self._recompute(seq, t1 - t0, e)
            elif kind == ev.FORWARD:
                self._out.outermost.add(a)
            elif kind == ev.STEP:
                self._out.steps += 1
                self._out.past_backward_bytes = c
                self._out.past_backward_peak = max(self._out.past_backward_peak, e)

    def _unshard(self, row: GroupSummary, seq: int, t0: int, pass_: int, size: int, world: int, dtype: int, how: int) -> None:
        if pass_ == ev.PASS_FORWARD:
            row.gathers_forward += 1
        elif pass_ == ev.PASS_BACKWARD:
            row.gathers_backward += 1
        elif pass_ == ev.PASS_RECOMPUTE:
            row.gathers_recompute += 1
            self._gathered_again.append(seq)
        else:
            row.gathers_other += 1
        copy = _Copy(t0, size, hooks=self._hooks)
        if how >= ev.DIRECTION_UNIT and how // ev.MODE_UNIT != _MANUAL:
            row.prefetched += 1
            _, direction, mode = ev.unpack_how(how)
            copy.prefetch = self._out.prefetches.setdefault((direction, mode), Prefetches())
            copy.prefetch.issued += 1
        wire = ev.wire_bytes(ev.UNSHARD, size, world)
        row.gathered_bytes += size
        row.wire_bytes += wire
        self._count(ev.UNSHARD, row.group, world, dtype, size, wire)
        self._copies[row.group] = copy
        self._hold(size, seq)

    def _recompute(self, seq: int, took: int, name: int) -> None:
        entry = self._out.regions.setdefault(self._texts.get(name), RegionSums())
        entry.recomputes += 1
        entry.recompute_ns += took
        entry.gathers += sum(gather > seq for gather in self._gathered_again)
        self._gathered_again.clear()

    def _reduce(self, row: GroupSummary, kind: int, size: int, world: int, dtype: int) -> None:
        wire = ev.wire_bytes(kind, size, world)
        row.reduced_bytes += size
        row.reduce_wire_bytes += wire
        if kind == ev.REDUCE_SCATTER:
            row.reduce_scatters += 1
        else:
            row.all_reduces += 1
        self._count(kind, row.group, world, dtype, size, wire)

    def _count(self, kind: int, group: int, world: int, dtype: int, size: int, wire: int) -> None:
        entry = self._out.traffic.get((kind, group, world, dtype))
        if entry is None:
            entry = self._out.traffic[kind, group, world, dtype] = Traffic()
        entry.calls += 1
        entry.bytes += size
        entry.wire_bytes += wire

    def _use(self, row: GroupSummary, kind: int, pass_: int, before: int) -> None:
        if kind == ev.PRE_BACKWARD:
            row.backwards += 1
        elif pass_ != ev.PASS_RECOMPUTE and before != _IN_FORWARD:  # in it already: another module of a grouped unit
            row.forwards += 1
        copy = self._copies.get(row.group)
        if copy is not None and not copy.used:
            copy.used = True
            if copy.prefetch is not None:
                copy.prefetch.used += 1

    def _hold(self, size: int, seq: int) -> None:
        self._held += size
        if self._held > self._out.unsharded_peak:
            self._out.unsharded_peak = self._held
            self._out.peak_seq = seq
            self._peak_open = tuple(self._copies)

    def _wait(self, row: GroupSummary, t0: int, t1: int) -> None:
        row.wait_ns += t1 - t0
        copy = self._copies.get(row.group)
        if copy is None:
            return
        distance = t0 - copy.issued
        row.waits += 1
        row.distance_ns += distance
        row.distance_max_ns = max(row.distance_max_ns, distance)
        if copy.prefetch is not None:
            copy.prefetch.waits += 1
            copy.prefetch.distance_ns += distance
            copy.prefetch.late += copy.hooks == self._hooks

    def _free(self, group: int, t0: int, discarded: bool) -> None:
        copy = self._copies.pop(group, None)
        if copy is None:
            return
        row = self._rows[group]
        row.lifetime_ns += t0 - copy.issued
        wasted = discarded or not copy.used
        row.wasted += wasted
        if copy.prefetch is not None:
            copy.prefetch.wasted += wasted
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


def summarise(model_map: ModelMap, records: Sequence[int], texts: ev.Texts | None = None) -> Summary:
    """The summary of flat ``records`` of one model, in order of recording; ``texts`` has the strings that they refer to."""
    summariser = Summariser(model_map, texts)
    summariser.feed(records)
    return summariser.result()


def rows_of(flat: Sequence[int]) -> Iterable[Sequence[int]]:
    """The records of a flat list."""
    return (flat[i : i + ev.WIDTH] for i in range(0, len(flat), ev.WIDTH))
