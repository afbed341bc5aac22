"""``rank-order`` over files: the first place where ranks of a process group issued different collectives, step by step.

Steps whose events are all there are compared by count and checksum; what differs is looked up in what is kept of the last
steps, else read again. Of a step that did not end, what there is of it must agree with the others' begin.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fsdptrace import events as ev
from fsdptrace.analysis.lines import read_process
from fsdptrace.analysis.process import ProcessTrace, StepPart
from fsdptrace.checks.base import Violation
from fsdptrace.checks.rank_order import Side, parted
from fsdptrace.model_map import ModelMap
from fsdptrace.rank_order import COLLECTIVES, Item, groups_of

KEPT_STEPS: Final = 3  # newest steps of a process group and model whose collectives are kept; of others a checksum
STEP_END: Final = Item("step", "", "")

Place = tuple[str, int, str]
"""Process group, number and class of a model."""


@dataclass(slots=True)
class _Step:
    """The collectives of one step: ``codes`` are kind + 32 * (group + 2**16 * which)."""

    step: int
    whole: bool
    codes: list[int]
    seqs: list[int]


@dataclass(slots=True)
class Issued:
    """What one rank issued, by process group, model and step. A sink for :func:`~fsdptrace.analysis.lines.read_process`.

    ``only`` keeps that step of that place and nothing else.
    """

    only: tuple[Place, int] | None = None
    sums: dict[Place, dict[int, tuple[int, int]]] = field(default_factory=dict)
    last: dict[Place, deque[_Step]] = field(default_factory=dict)
    maps: dict[int, ModelMap] = field(default_factory=dict)

    def __call__(self, part: StepPart) -> None:
        """One step, from the reader."""
        self.maps[part.map.model] = part.map
        if not (part.full or part.intact):
            return
        # A step that an exception left was closed where it was, not where the program ends it.
        whole = part.full and ev.EXCEPTION not in part.records[ev.KIND :: ev.WIDTH]
        found: dict[Place, _Step] = {}
        for seq, code, name in _collectives(part.map, part.records):
            place = (name, part.map.model, part.map.root)
            step = found.get(place)
            if step is None:
                step = found[place] = _Step(part.step, whole, [], [])
            step.codes.append(code)
            step.seqs.append(seq)
        for place, step in found.items():
            self._add(place, step)

    def _add(self, place: Place, step: _Step) -> None:
        if self.only is not None and (place, step.step) != self.only:
            return
        if step.whole:
            names = "\n".join(map(str, (_item(self.maps[place[1]], code).digest.hex() for code in step.codes)))
            self.sums.setdefault(place, {})[step.step] = (len(step.codes), zlib.crc32(names.encode()))
        self.last.setdefault(place, deque(maxlen=KEPT_STEPS)).append(step)

    def inside(self, trace: ProcessTrace) -> None:
        """Adds the collective that the process was in when it ended, or that failed."""
        entered, failed = trace.entered, trace.failed
        if entered is None and failed is not None and failed.get("about") in ("all_gather", "reduction"):
            what = "unshard" if failed["about"] == "all_gather" else "post_backward"
            entered = {"kind": what, "model": failed.get("model", 0), "group": failed.get("group")}
            last = trace.last_entered
            if last is not None and all(last.get(name, 0) == entered[name] for name in ("kind", "model", "group")):
                entered = last
        if entered is None or not isinstance(number := entered.get("group"), int):
            return
        model = self.maps.get(entered.get("model", 0)) or trace.models.get(entered.get("model", 0))
        if model is None or not 0 <= number < len(model.groups) or entered.get("kind") not in ("unshard", "post_backward"):
            return
        self.maps[model.model] = model
        shard, replicate = groups_of(model.groups[number])
        if entered["kind"] == "unshard":
            kind, name = ev.UNSHARD, shard
        else:
            kind, name = (ev.REDUCE_SCATTER, shard) if shard else (ev.ALL_REDUCE, replicate)
        if not name:
            return
        place = (name, model.model, model.root)
        running = trace.running_step.get(model.model, trace.steps.last(model.model) + (failed is None or trace.end is None))
        kept = self.last.get(place)
        step = next((kept_step for kept_step in kept or () if kept_step.step == running), None)
        if step is None:
            step = _Step(running, False, [], [])
            self._add(place, step)
        try:
            which = ev.read_which(str(entered.get("which", "")))
        except ValueError:
            which = 0
        step.codes.append(kind + 32 * (number + (which << 16)))
        step.seqs.append(0)
        step.whole = False
        self.sums.get(place, {}).pop(running, None)

    def items(self, place: Place, step: int) -> tuple[list[Item], list[int]] | None:
        """The collectives of a step and their ``seq``, where they are kept."""
        for kept in self.last.get(place, ()):
            if kept.step == step:
                return [_item(self.maps[place[1]], code) for code in kept.codes], kept.seqs
        return None


def _collectives(model: ModelMap, records: array[int]) -> Iterator[tuple[int, int, str]]:
    """``(seq, code, process group)`` of the collectives among ``records``."""
    groups = [groups_of(group) for group in model.groups]
    for i, kind in enumerate(records[ev.KIND :: ev.WIDTH]):
        if kind not in COLLECTIVES:
            continue
        at = i * ev.WIDTH
        group, world, last = records[at + ev.GROUP], records[at + ev.A + 1], records[at + ev.A + 4]
        shard, replicate = groups[group]
        if kind == ev.UNSHARD:
            if last % 4 == 0 and world == model.groups[group].world and shard:
                yield records[at + ev.SEQ], kind + 32 * group, shard
        elif name := shard if kind == ev.REDUCE_SCATTER else replicate:
            yield records[at + ev.SEQ], kind + 32 * (group + ((last // ev.OP_UNIT) << 16)), name


def _item(model: ModelMap, code: int) -> Item:
    group = code // 32 & 0xFFFF
    return Item(ev.KINDS[code % 32], model.root, model.groups[group].fqn, ev.which_text(code // 32 >> 16))


@dataclass(frozen=True, slots=True)
class Difference:
    """Where ranks of one place first differ: the step, and what either side issued."""

    place: Place
    step: int
    sides: tuple[Side, Side]

    def violation(self) -> Violation:
        """As ``rank-order`` says it, for the first rank of the first side."""
        side = self.sides[0] if self.sides[0].item != STEP_END else self.sides[1]
        mine = self.sides.index(side)
        return parted(self.sides, self.place[0], mine, self.place[1], None)


def compare(processes: Sequence[ProcessTrace], issued: Mapping[int, Issued]) -> list[Difference]:
    """The first difference of each process group and model, earliest step first. ``issued`` is by position in ``processes``."""
    places: dict[Place, list[int]] = {}
    for index, own in issued.items():
        for place in {*own.sums, *own.last}:
            places.setdefault(place, []).append(index)
    found = []
    for place, indexes in places.items():
        if len(indexes) > 1:
            difference = _first(place, indexes, processes, issued)
            if difference is not None:
                found.append(difference)
    return sorted(found, key=lambda difference: (difference.step, difference.place))


def _first(
    place: Place, indexes: Sequence[int], processes: Sequence[ProcessTrace], issued: Mapping[int, Issued]
) -> Difference | None:
    steps = {step for index in indexes for step in issued[index].sums.get(place, {})}
    steps |= {kept.step for index in indexes for kept in issued[index].last.get(place, ()) if not kept.whole}
    for step in sorted(steps):
        sums = {index: total for index in indexes if (total := issued[index].sums.get(place, {}).get(step)) is not None}
        whole = sorted(sums, key=lambda index: processes[index].rank)
        partial = [index for index in indexes if index not in sums and issued[index].items(place, step) is not None]
        by_total: dict[Any, list[int]] = {}
        for index in whole:
            by_total.setdefault(sums[index], []).append(index)
        candidates = [members[0] for members in by_total.values()] + partial
        if len(candidates) < 2:
            continue
        known = {index: _fetch(place, step, index, processes, issued) for index in candidates}
        # The last step of a rank may be the one in which its recording ended.
        over = {index for index in whole if max(issued[index].sums[place]) > step}
        sides = _apart(candidates, known, over)
        if sides is not None:
            a, b, at = sides
            return Difference(place, step, (
                _side(a, at, place, step, known, by_total, sums, processes, issued),
                _side(b, at, place, step, known, by_total, sums, processes, issued),
            ))  # fmt: skip
    return None


_Known = Mapping[int, "tuple[list[Item], list[int]] | None"]


def _fetch(
    place: Place, step: int, index: int, processes: Sequence[ProcessTrace], issued: Mapping[int, Issued]
) -> tuple[list[Item], list[int]] | None:
    kept = issued[index].items(place, step)
    if kept is not None:
        return kept
    again = Issued(only=(place, step))
    read_process(processes[index].source, again)
    return again.items(place, step)


def _apart(candidates: Sequence[int], known: _Known, over: set[int]) -> tuple[int, int, int] | None:
    """The earliest place where two of ``candidates`` differ, with them. Only a sequence of ``over`` has a known end."""
    best: tuple[int, int, int] | None = None
    first = known[candidates[0]]
    for other in candidates[1:]:
        second = known[other]
        if first is None or second is None:
            continue
        a, b = first[0], second[0]
        at = next((i for i, (mine, its) in enumerate(zip(a, b, strict=False)) if mine != its), None)
        if at is None and len(a) != len(b):
            shorter = candidates[0] if len(a) < len(b) else other
            at = min(len(a), len(b)) if shorter in over else None
        if at is not None and (best is None or at < best[2]):
            best = (candidates[0], other, at)
    return best


def _side(
    index: int, at: int, place: Place, step: int, known: _Known, by_total: Mapping[Any, list[int]], sums: Mapping[int, Any],
    processes: Sequence[ProcessTrace], issued: Mapping[int, Issued],
) -> Side:  # fmt: skip
    items, seqs = known[index] or ([], [])
    item, seq = (items[at], seqs[at]) if at < len(items) else (STEP_END, 0)
    like = by_total[sums[index]] if index in sums else [index]
    params: tuple[str, ...] = ()
    for group in issued[index].maps[place[1]].groups:
        if group.fqn == item.fqn and item.which:
            params = tuple(param.name for param in group.params)
    ranks = (processes[index].rank, *sorted(processes[other].rank for other in like if other != index))
    return Side(ranks, item, params, step, seq)
