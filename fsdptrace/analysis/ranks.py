"""Which rank differs: time per step and in waits, and who comes last to each collective.

Times are host times. A collective of one place in the order of a step is the same one on every rank that has the model alike
and shares a process group with it, directly or over others; a step in which such ranks issue different ones is left out and
counted. Processes of one host share its clock; between hosts the hosts'
own clocks (NTP, PTP) decide how far a comparison holds.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fsdptrace import events as ev
from fsdptrace.analysis.process import ProcessTrace, StepPart
from fsdptrace.analysis.rows import Units
from fsdptrace.analysis.stages import Stage, together
from fsdptrace.analysis.timeline import clock_offsets
from fsdptrace.analysis.traffic import COLLECTIVES
from fsdptrace.model_map import ModelMap

KEPT = 4_000_000  # collectives of all ranks together whose times are looked at, the first ones
LEAST = 2_000  # of one rank, however many ranks there are
_KINDS = tuple(COLLECTIVES)


@dataclass(slots=True)
class Arrivals:
    """When one rank issued its collectives: per ``(model, step)`` what they were (kind + 32 * group) and the host time, ns."""

    limit: int
    steps: dict[tuple[int, int], tuple[array[int], array[int]]] = field(default_factory=dict)
    _kept: int = 0

    def __call__(self, part: StepPart) -> None:
        """One step, from the reader: those with all their events, until ``limit`` is reached."""
        if not part.full or self._kept >= self.limit:
            return
        what, when = array("q"), array("q")
        for kind, _, t0, _, group, _, _, _, world, _, _, how in zip(*[iter(part.records)] * ev.WIDTH, strict=True):
            if kind in _KINDS and world > 1 and not (kind == ev.UNSHARD and how % 4):
                what.append(kind + 32 * group)
                when.append(t0)
        if what:
            self.steps[part.map.model, part.step] = what, when
            self._kept += len(what)


@dataclass(slots=True)
class RankRow:
    """One rank.

    Attributes:
        steps, step_ns: finished steps whose time is known, and their mean.
        wait_ns: mean per step of host time in waits for gathers, over steps with all events.
        last: in how many of the compared collectives it came last.
        behind_ns: mean time behind the first rank.
        events, dropped, bytes: events, those that did not fit, and bytes on disk.
        drain_ns: CPU time of the drain thread; 0 where the file has no end line.
    """

    rank: int
    host: str
    steps: int = 0
    step_ns: float = 0.0
    wait_ns: float = 0.0
    last: int = 0
    behind_ns: float = 0.0
    events: int = 0
    dropped: int = 0
    bytes: int = 0
    drain_ns: int = 0


@dataclass(slots=True)
class Slowest:
    """One collective of one unit over ranks and steps: how far the last rank was behind the first, and who that was most
    often. ``times`` of ``calls`` it was ``rank``."""

    collective: str
    unit: str
    model: int
    calls: int
    rank: int
    times: int
    mean_ns: float
    max_ns: int


@dataclass(slots=True)
class Ranks:
    """All ranks beside each other.

    Attributes:
        rows: by rank.
        compared: collectives that were compared, in ``steps`` steps; ``different`` steps in which ranks issued other ones.
        hosts: on how many hosts the ranks ran.
        slowest: by collective and unit, largest mean first.
    """

    rows: list[RankRow]
    compared: int = 0
    steps: int = 0
    different: int = 0
    hosts: int = 1
    slowest: list[Slowest] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def limit(ranks: int) -> int:
    """How many collectives of each of ``ranks`` ranks are kept."""
    return max(LEAST, KEPT // max(1, ranks))


def ranks(
    processes: Sequence[ProcessTrace],
    units: Sequence[Mapping[int, Units]],
    arrivals: Sequence[Arrivals],
    sizes: Sequence[int],
    found: Sequence[Stage],
) -> Ranks:
    """All of a run's processes beside each other; ``sizes`` are their files' bytes, ``found`` their models."""
    out = Ranks([_row(*item) for item in zip(processes, units, sizes, strict=True)])
    out.hosts = len({process.header.host for process in processes})
    _compare(out, processes, arrivals, found)
    return out


def _row(process: ProcessTrace, units: Mapping[int, Units], size: int) -> RankRow:
    timed = [line.duration_ns for line in process.steps if line.duration_ns]
    full = sum(item.steps for item in units.values())
    waits = sum(group.wait_ns for item in units.values() for group in item.groups.values())
    drain = process.end.get("drain_ns") if process.end else 0
    return RankRow(
        process.rank, process.header.host, len(timed), sum(timed) / len(timed) if timed else 0.0, waits / full if full else 0.0,
        events=process.events, dropped=process.dropped, bytes=size, drain_ns=drain if isinstance(drain, int) else 0,
    )  # fmt: skip


@dataclass(slots=True)
class _Sum:
    calls: int = 0
    total: int = 0
    most: int = 0
    last: Counter[int] = field(default_factory=Counter)


def _compare(out: Ranks, processes: Sequence[ProcessTrace], arrivals: Sequence[Arrivals], found: Sequence[Stage]) -> None:
    offsets = clock_offsets(processes)
    sums: dict[tuple[int, int], _Sum] = {}
    behind = [0] * len(processes)
    seen = [0] * len(processes)
    maps: dict[int, ModelMap] = {}
    places: dict[tuple[int, int, int], list[int]] = {}  # who has the step of the model, by who issues it together
    for (place, model), part in together(processes, found).items():
        maps[part] = processes[place].models[model]
        for number, step in arrivals[place].steps:
            if number == model:
                places.setdefault((model, step, part), []).append(place)
    compared: set[tuple[int, int]] = set()
    different: set[tuple[int, int]] = set()
    for (model, step, part), there in sorted(places.items()):
        if len(there) < 2:
            continue
        own = [arrivals[i].steps[model, step] for i in there]
        what = own[0][0]
        if any(other != what for other, _ in own[1:]):
            different.add((model, step))
            continue
        compared.add((model, step))
        out.compared += len(what)
        for place, key in enumerate(what):
            times = [when[place] + offsets[i] for i, (_, when) in zip(there, own, strict=True)]
            first, last = min(times), max(times)
            entry = sums.setdefault((part, key), _Sum())
            entry.calls += 1
            entry.total += last - first
            entry.most = max(entry.most, last - first)
            slowest = there[times.index(last)]
            if last > first:
                entry.last[slowest] += 1
                out.rows[slowest].last += 1
            for i, at in zip(there, times, strict=True):
                behind[i] += at - first
        for i in there:
            seen[i] += len(what)
    out.steps, out.different = len(compared), len(different)
    for row, total, count in zip(out.rows, behind, seen, strict=True):
        row.behind_ns = total / count if count else 0.0
    out.slowest = _slowest(sums, maps, processes)


def _slowest(
    sums: Mapping[tuple[int, int], _Sum], maps: Mapping[int, ModelMap], processes: Sequence[ProcessTrace]
) -> list[Slowest]:
    made = []
    for (part, key), entry in sums.items():
        model = maps[part]
        if not entry.last:  # all came at once
            continue
        index, times = entry.last.most_common(1)[0]
        made.append(
            Slowest(
                COLLECTIVES[key % 32], model.groups[key // 32].fqn, model.model, entry.calls, processes[index].rank, times,
                entry.total / entry.calls, entry.most,
            )
        )  # fmt: skip
    return sorted(made, key=lambda item: (-item.mean_ns, item.collective, item.unit))
