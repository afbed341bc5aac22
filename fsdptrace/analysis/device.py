"""What the device did, from ``device_times`` lines: how long gathers and reductions ran, how long compute waited for them,
and what prefetching further ahead would hide and cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from fsdptrace.checks.text import pattern
from fsdptrace.model_map import ModelMap

_PASSES = ("none", "forward", "backward", "recompute")
MATTERS = 0.02
"""Exposed time below this share of the steps' device time is not worth advice."""
STALLS = "compute stands still"
#: On which line of a picture a timed call is shown.
STREAMS = {
    "unshard": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce", "wait": STALLS,
    "forward": "compute", "backward": "compute",
}  # fmt: skip
SETTERS = {"forward": "set_modules_to_forward_prefetch", "backward": "set_modules_to_backward_prefetch"}


class DeviceSpan(NamedTuple):
    """Something that the device did: on which of :data:`STREAMS`, from when to when on the host's clock (ns), in which pass and
    for which group by number (-1 for none), for the host's event ``seq``; ``exposed``: ns that compute stood still for it, -1
    where that is not asked."""

    stream: str
    what: str
    t0: int
    t1: int
    pass_: int
    group: int
    seq: int
    exposed: int


def device_spans(data: Mapping[str, Any]) -> Iterator[DeviceSpan]:
    """What a ``device_times`` line says, waits that took no time left out.

    Raises:
        KeyError, ValueError, TypeError, IndexError: the line is not of the form.
    """
    base = int(data["base"])
    rows = zip(data["seq"], data["what"], data["pass"], data["group"], data["t0"], data["ns"], data["exposed"], strict=True)
    for seq, what, pass_, group, t0, ns, exposed in rows:
        if not 0 <= pass_ < len(_PASSES) or exposed < -1 or ns < 0:
            raise ValueError("no such pass, or less than no time")
        if what in STREAMS and (ns or what != "wait"):
            pass_ = pass_ or (_PASSES.index(what) if what in _PASSES else 0)  # a forward is in no pass, it is one
            yield DeviceSpan(STREAMS[what], what, base + t0, base + t0 + ns, pass_, group, seq, exposed)


@dataclass(frozen=True, slots=True)
class StepOnDevice:
    """What a ``device_times`` line says of one step.

    Attributes:
        model, step: of which it speaks.
        span_ns: device time of the step; None when its events never completed.
        missing: timings that never completed.
        spans: what the device did, in the order of ``seq``.
    """

    model: int
    step: int
    span_ns: int | None
    missing: int
    spans: tuple[DeviceSpan, ...]

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> StepOnDevice:
        """Of a line.

        Raises:
            KeyError, ValueError, TypeError: it is not of the form.
        """
        span = None if data["span"] is None else int(data["span"])
        return cls(int(data["model"]), int(data["step"]), span, int(data["missing"]), tuple(device_spans(data)))

    @property
    def exposed_ns(self) -> int:
        """ns that compute waited for gathers and reductions."""
        return sum(span.exposed for span in self.spans if span.exposed > 0)


@dataclass(slots=True)
class UnitDevice:
    """One param group (or several of one name pattern) over timed steps and ranks; sums, times in ns.

    Attributes:
        bytes: of one gather, the largest.
        gathers, gather_ns, gather_exposed_ns: all-gathers, how long they ran on their stream, how long compute waited for them.
        unwaited, unwaited_ns: those of them that nobody waited for.
        reductions, reduce_ns, reduce_exposed_ns: the same of reduce-scatters and all-reduces.
    """

    name: str
    units: int = 1
    bytes: int = 0
    gathers: int = 0
    gather_ns: int = 0
    gather_exposed_ns: int = 0
    unwaited: int = 0
    unwaited_ns: int = 0
    reductions: int = 0
    reduce_ns: int = 0
    reduce_exposed_ns: int = 0

    def add(self, other: UnitDevice) -> None:
        """Adds what another row has."""
        self.units += other.units
        self.bytes = max(self.bytes, other.bytes)
        for name in (
            "gathers", "gather_ns", "gather_exposed_ns", "unwaited", "unwaited_ns", "reductions", "reduce_ns",
            "reduce_exposed_ns",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class _Pass:
    """Gathers of one pass in the order in which compute waited for them: sums per position in that order."""

    groups: list[int] = field(default_factory=list)
    gather: list[int] = field(default_factory=list)
    compute: list[int] = field(default_factory=list)  # from the end of this wait to the next one
    exposed: list[int] = field(default_factory=list)
    steps: int = 0


@dataclass(slots=True)
class DeviceSums:
    """Sums of one model on one rank (or, merged, on several) over timed steps.

    Attributes:
        steps: timed steps whose device time is known; ``span_ns`` that time, summed.
        missing: timings that never completed.
        allocated, reserved: most bytes of the allocator that were seen at a unit's boundaries.
        units: by group id.
    """

    steps: int = 0
    span_ns: int = 0
    missing: int = 0
    allocated: int = 0
    reserved: int = 0
    units: dict[int, UnitDevice] = field(default_factory=dict)
    passes: dict[str, _Pass] = field(default_factory=dict)

    def take(self, data: Mapping[str, Any], model: ModelMap) -> None:
        """Adds one line.

        Raises:
            KeyError, ValueError, TypeError, IndexError: the line is not of the form.
        """
        rows = list(
            zip(
                data["seq"], data["what"], data["pass"], data["group"], data["t0"], data["ns"], data["exposed"], strict=True
            )
        )  # fmt: skip
        if any(not -1 <= group < len(model.groups) for group in data["group"]):
            raise IndexError("no such group")
        if data["span"] is not None:
            self.steps += 1
            self.span_ns += int(data["span"])
        self.missing += int(data["missing"])
        open_gather: dict[int, int] = {}
        waits: dict[str, list[tuple[int, int, int, int]]] = {}
        for _, what, pass_, group, t0, ns, exposed in rows:
            if group < 0:
                continue
            unit = self.units.get(group)
            if unit is None:
                info = model.groups[group]
                unit = self.units[group] = UnitDevice(info.fqn, bytes=info.bytes)
            if what == "unshard":
                if group in open_gather:
                    _unwaited(unit, open_gather[group])
                open_gather[group] = ns
                unit.gathers += 1
                unit.gather_ns += ns
                unit.gather_exposed_ns += max(0, exposed)
            elif what == "wait":
                waits.setdefault(_PASSES[pass_], []).append((t0, ns, group, open_gather.pop(group, 0)))
            elif what in ("reduce_scatter", "all_reduce"):
                unit.reductions += 1
                unit.reduce_ns += ns
                unit.reduce_exposed_ns += max(0, exposed)
        for group, ns in open_gather.items():
            _unwaited(self.units[group], ns)
        for name, found in waits.items():
            self._order(name, sorted(found))

    def _order(self, name: str, waits: Sequence[tuple[int, int, int, int]]) -> None:
        groups = [group for _, _, group, _ in waits]
        known = self.passes.setdefault(name, _Pass())
        if known.groups != groups:
            if known.groups:
                return  # another order than the first step's: not averaged with it
            known.groups = groups
            known.gather, known.compute, known.exposed = ([0] * len(groups) for _ in range(3))
        known.steps += 1
        for i, (t0, waited, _, gather) in enumerate(waits):
            known.gather[i] += gather
            known.exposed[i] += waited
            if i + 1 < len(waits):
                known.compute[i] += max(0, waits[i + 1][0] - t0 - waited)

    def memory(self, allocated: int, reserved: int) -> None:
        """Takes what the allocator held at most in a step."""
        self.allocated, self.reserved = max(self.allocated, allocated), max(self.reserved, reserved)

    def merge(self, other: DeviceSums) -> None:
        """Adds another rank's sums."""
        self.steps += other.steps
        self.span_ns += other.span_ns
        self.missing += other.missing
        self.allocated, self.reserved = max(self.allocated, other.allocated), max(self.reserved, other.reserved)
        for group, unit in other.units.items():
            mine = self.units.get(group)
            if mine is None:
                self.units[group] = unit
            else:
                mine.add(unit)
                mine.units -= unit.units
        for name, entry in other.passes.items():
            known = self.passes.get(name)
            if known is None:
                self.passes[name] = entry
            elif known.groups == entry.groups:
                known.steps += entry.steps
                for sums, more in (
                    (known.gather, entry.gather),
                    (known.compute, entry.compute),
                    (known.exposed, entry.exposed),
                ):
                    sums[:] = [a + b for a, b in zip(sums, more, strict=True)]

    def rows(self, grouped: bool) -> list[UnitDevice]:
        """One row per group in the model's order, or per name pattern."""
        rows = [self.units[group] for group in sorted(self.units)]
        if not grouped:
            return rows
        out: dict[str, UnitDevice] = {}
        for row in rows:
            name = pattern(row.name)
            if name in out:
                out[name].add(row)
            else:
                out[name] = UnitDevice(name, 0)
                out[name].add(row)
        return list(out.values())

    def advice(self, model: ModelMap) -> list[Advice]:
        """What to change about gathers that compute waits for, per pass; empty where they matter little."""
        found = []
        for name, entry in self.passes.items():
            exposed = sum(entry.exposed)
            if name in SETTERS and entry.steps and self.span_ns and exposed > MATTERS * self.span_ns:
                found.append(_advice(name, entry, model))
        return found

    def to_json(self, model: ModelMap) -> dict[str, Any]:
        """Plain data."""
        return {
            "rank_steps": self.steps, "span_ns": self.span_ns, "missing": self.missing, "allocated_bytes": self.allocated,
            "reserved_bytes": self.reserved, "units": [asdict(row) for row in self.rows(grouped=False)],
            "advice": [asdict(item) for item in self.advice(model)],
        }  # fmt: skip


def _unwaited(unit: UnitDevice, ns: int) -> None:
    unit.unwaited += 1
    unit.unwaited_ns += ns


@dataclass(frozen=True, slots=True)
class Advice:
    """What would hide the gathers of one pass.

    Attributes:
        name: ``forward`` or ``backward``.
        exposed_ns, gather_ns, compute_ns: per step: what compute waits for gathers, how long they run, how long compute runs
            between them.
        ahead: how many units ahead to prefetch (FSDP2 does one by itself, as soon as the host gets there); 0 where that cannot
            help, since gathers take longer than compute.
        bytes: what so many units in flight, instead of one, cost at most, unsharded.
        least_ns: what stays exposed whatever is prefetched: gathers run one after the other on one stream.
    """

    name: str
    exposed_ns: int
    gather_ns: int
    compute_ns: int
    ahead: int
    bytes: int
    least_ns: int

    @property
    def call(self) -> str:
        """The PyTorch call to use."""
        return SETTERS[self.name]


def _advice(name: str, entry: _Pass, model: ModelMap) -> Advice:
    steps = entry.steps
    gather = [value / steps for value in entry.gather]
    compute = [value / steps for value in entry.compute]
    sizes = [model.groups[group].bytes for group in entry.groups]
    first = gather[0] if gather else 0.0  # the first has nothing before it to hide behind
    least = max(first, sum(gather) - sum(compute))
    ahead = 0
    if sum(gather) <= sum(compute) + first:
        ahead = next((k for k in range(1, len(gather)) if _hidden(gather, compute, k)), 0)
    windows = [sum(sizes[i : i + ahead]) for i in range(len(sizes))]
    return Advice(
        name, round(sum(entry.exposed) / steps), round(sum(gather)), round(sum(compute)), ahead,
        max(windows, default=0) - max(sizes, default=0) if ahead else 0, round(least),
    )  # fmt: skip


def _hidden(gather: Sequence[float], compute: Sequence[float], k: int) -> bool:
    """Whether every gather but the first ``k`` fits behind compute when it is issued ``k`` units ahead: at the begin of that
    unit's compute, gathers running one after the other on their stream."""
    free = 0.0
    now = 0.0
    ends: list[float] = []
    starts: list[float] = []
    for i in range(len(gather)):
        issued = starts[i - k] if i >= k else 0.0
        free = max(free, issued) + gather[i]
        ends.append(free)
        waited = max(0.0, ends[i] - now)
        if i >= k and waited > 0.05 * gather[i]:
            return False
        now = max(now, ends[i])
        starts.append(now)
        now += compute[i]
    return True
