"""The order in which this rank issued collectives, per process group, in a form that ranks can compare at little cost.

All ranks of a process group must issue the same collectives in the same order. Each rank keeps a rolling checksum over what it
issued (kind, module, the parameters that took part in a reduction), and the checksum's values at some positions: the last 32,
and the last two multiples of every power of two. Of two ranks, however far one is ahead, the values at one common position
near the end of the slower one are thus known, and tell whether they ever differed.

Nothing here needs torch; the events are read where they are moved out of the buffer (:meth:`fsdptrace.ring.Ring.pump`).
"""

from __future__ import annotations

import threading
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import compress
from typing import Any, Final

from fsdptrace import events as ev
from fsdptrace.model_map import GroupInfo, ModelMap

COLLECTIVES: Final = frozenset((ev.UNSHARD, ev.REDUCE_SCATTER, ev.ALL_REDUCE))
LAST: Final = 32  # positions at the end whose checksum is kept
KEPT: Final = 16_384  # collectives of a process group that can be named afterwards
ITEMS: Final = 16_384  # different ones; what comes later counts and has no name
_NAMELESS, _START = 0, 1  # places in the table of items


@dataclass(frozen=True, slots=True)
class Item:
    """A collective as all ranks see it: kind, class of the model's root, module, and which parameters took part (empty: all).

    ``kind`` is ``start`` for the place where a recording began. Its checksum takes in the number of collectives that the
    process group had seen by then (in excerpts it stands for ``seq``), so that ranks that do not record the same part of the
    run are told apart from ranks that part ways.
    """

    kind: str
    root: str
    fqn: str
    which: str = ""

    @property
    def digest(self) -> bytes:
        """Eight bytes that are the same on every rank."""
        text = "\0".join((self.kind, self.root, self.fqn, self.which))
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()

    def to_json(self) -> list[str]:
        """Plain data."""
        return [self.kind, self.root, self.fqn, self.which]


NAMELESS: Final = Item("", "", "")
START: Final = Item("start", "", "")


def positions(count: int) -> list[int]:
    """Where the checksum of ``count`` collectives is kept: the last ones, then two multiples of each power of two."""
    out = list(range(count, count - LAST, -1)) if count >= LAST else [max(0, count - back) for back in range(LAST)]
    for scale in range(1, count.bit_length()):
        newest = count >> scale << scale
        out += (newest, max(0, newest - (1 << scale)))
    return out


def common_mark(mine: int, other: int) -> tuple[int, int] | None:
    """Where in :func:`positions` of ``mine`` and of ``other`` (``mine <= other``) the newest position lies that is surely in
    both; None when only 0 is."""
    ahead = other - mine
    if ahead < LAST:
        return 0, ahead
    scale = ahead.bit_length()
    position = mine >> scale << scale
    if not position:
        return None
    at = LAST + 2 * (scale - 1)
    return at, at if other >> scale << scale == position else at + 1


@dataclass(slots=True)
class Issued:
    """What was issued on one process group since recording of its newest model began.

    Attributes:
        label: number of models before, the newest one's class: only sequences of one label are compared.
        count, checksum: how many collectives, and the rolling checksum of all.
    """

    label: str
    count: int = 0
    checksum: int = 0
    marks: dict[int, int] = field(default_factory=lambda: {0: 0})
    items: array[int] = field(default_factory=lambda: array("i"))
    seqs: array[int] = field(default_factory=lambda: array("q"))
    steps: array[int] = field(default_factory=lambda: array("i"))

    def extend(self, items: Sequence[int], seqs: Sequence[int], steps: Sequence[int], digests: Sequence[bytes]) -> None:
        """Adds collectives by their numbers in the table of items."""
        start, count, checksum = self.count, self.count + len(items), self.checksum
        wanted = positions(count)
        marks = {position: self.marks[position] for position in wanted if position <= start}
        at = start
        for position in sorted({position for position in wanted if position > start}):
            checksum = zlib.crc32(b"".join(digests[at - start : position - start]), checksum)
            at = marks[position] = position
            marks[position] = checksum
        self.count, self.checksum, self.marks = count, checksum, marks
        self.items.extend(items)
        self.seqs.extend(seqs)
        self.steps.extend(steps)
        if len(self.items) > 2 * KEPT:
            for kept in (self.items, self.seqs, self.steps):
                del kept[:-KEPT]

    def with_one_more(self, digest: bytes) -> tuple[int, list[int]]:
        """Count and marks as if one more collective had been issued: the one that the rank is in."""
        count = self.count + 1
        marks = {**self.marks, count: zlib.crc32(digest, self.checksum)}
        return count, [marks[position] for position in positions(count)]


class Order:
    """The sequences of one process, by process group.

    :meth:`take` runs under the ring's lock, mostly on the drain thread; the others on the thread that compares ranks.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now: dict[str, Issued] = {}
        self.before: dict[str, Issued] = {}
        self._table: list[Item] = [NAMELESS, START]
        self._digests: list[bytes] = [NAMELESS.digest, START.digest]
        self._numbers: dict[tuple[int, int, int, int], int] = {}
        self._issued: dict[int, dict[tuple[int, ...], tuple[str, int]]] = {}  # by model: process group and number, as found
        self._maps: dict[int, ModelMap] = {}
        self._models: dict[str, list[int]] = {}

    def start(self, model: ModelMap, issued: Mapping[str, int]) -> None:
        """Recording of ``model`` begins, after everything that was taken so far. ``issued`` counts, by process group, the
        collectives that it has seen, recorded or not."""
        with self.lock:
            if self._maps.get(model.model) != model:
                self._maps[model.model] = model
                self._issued.pop(model.model, None)
                self._numbers = {key: number for key, number in self._numbers.items() if key[1] != model.model}
            for name in dict.fromkeys(name for group in model.groups for name in groups_of(group) if name):
                seen = self._models.setdefault(name, [])
                if model.model not in seen:
                    if name in self.now:
                        self.before[name] = self.now[name]
                    self.now[name] = Issued(f"{len(seen)}:{model.root}")
                    seen.append(model.model)
                number = issued.get(name, -1)
                digest = Item(START.kind, model.root, str(number)).digest
                self.now[name].extend([_START], [number], [0], [digest])

    def take(self, model: int, step: int, records: Sequence[int], kinds: Sequence[int]) -> None:
        """Adds the collectives among ``records`` of ``model``; ``kinds`` are their kinds."""
        mask = list(map(COLLECTIVES.__contains__, kinds))
        columns = (compress(records[at :: ev.WIDTH], mask) for at in (ev.KIND, ev.GROUP, ev.A + 1, ev.A + 4))
        found: dict[str, tuple[list[int], list[int]]] = {}
        with self.lock:
            known = self._issued.setdefault(model, {})
            for key, seq in zip(zip(*columns, strict=True), compress(records[ev.SEQ :: ev.WIDTH], mask), strict=True):
                entry = known.get(key)
                if entry is None:
                    entry = known[key] = self._number(model, *key)
                name, number = entry
                if name:
                    items, seqs = found.setdefault(name, ([], []))
                    items.append(number)
                    seqs.append(seq)
            if len(known) > ITEMS:
                known.clear()
            for name, (items, seqs) in found.items():
                digests = [self._digests[number] for number in items]
                self.now[name].extend(items, seqs, [step] * len(items), digests)

    def _number(self, model: int, kind: int, group: int, world: int, last: int) -> tuple[str, int]:
        """Process group and number of a collective; no name where none was issued, or not on a group that is compared."""
        known = self._maps.get(model)
        if known is None or world <= 1:
            return "", 0
        info = known.groups[group]
        if kind == ev.UNSHARD:
            # A copy that was resharded to a smaller mesh is gathered on that mesh's group, which is not followed.
            if last % 4 or world != info.world:
                return "", 0
            return info.shard_group, self._known(kind, model, group, 0)
        name = info.shard_group if kind == ev.REDUCE_SCATTER else info.replicate_group
        return name, self._known(kind, model, group, last // ev.OP_UNIT)

    def _known(self, kind: int, model: int, group: int, which: int) -> int:
        key = (kind, model, group, which)
        number = self._numbers.get(key)
        if number is None:
            known = self._maps[model]
            item = Item(ev.KINDS[kind], known.root, known.groups[group].fqn, ev.which_text(which))
            number = self._numbers[key] = self._put(item)
        return number

    def _put(self, item: Item) -> int:
        if len(self._table) >= ITEMS:
            return _NAMELESS
        self._table.append(item)
        self._digests.append(item.digest)
        return len(self._table) - 1

    # -- what other ranks are told -------------------------------------------------------------------------------------
    def entered(self, collective: Mapping[str, Any] | None) -> tuple[str, Item] | None:
        """Process group and item of the collective that a thread is in, as :func:`fsdptrace.standing.entered` has it."""
        if collective is None:
            return None
        known = self._maps.get(collective["model"])
        kind = ev.KIND_NUMBER[collective["kind"]]
        if known is None or kind == ev.WAIT:
            return None
        info = known.groups[collective["group"]]
        if kind == ev.POST_BACKWARD:  # its reduce-scatter comes first, and alone decides whether it ever ends
            kind = ev.REDUCE_SCATTER if info.world > 1 else ev.ALL_REDUCE
        name = info.replicate_group if kind == ev.ALL_REDUCE else info.shard_group
        if not name or (kind != ev.ALL_REDUCE and info.world <= 1):
            return None
        return name, Item(ev.KINDS[kind], known.root, info.fqn, collective.get("which", ""))

    def params(self, table: Sequence[Sequence[str]]) -> dict[str, list[str]]:
        """Names of the parameters of the groups in an excerpt's table of which only some took part, by module."""
        wanted = {(row[1], row[2]) for row in table if row[3]}
        return {
            group.fqn: [param.name for param in group.params]
            for model in list(self._maps.values())
            for group in model.groups
            if (model.root, group.fqn) in wanted
        }

    def newest(self, name: str) -> int:
        """The newest model on process group ``name``."""
        return self._models[name][-1] if self._models.get(name) else max(self._maps, default=0)

    def where(self, name: str, label: str, item: Item) -> tuple[int, int | None]:
        """Model and group of ``item`` in this process, for a sequence of process group ``name``: of the newest model that was
        recorded when the sequence began and has it; the group is None where none has."""
        models = self._models.get(name, [])[: int(label.partition(":")[0]) + 1]
        for model in map(self._maps.__getitem__, reversed(models)):
            for group in model.groups:
                if (model.root, group.fqn) == (item.root, item.fqn):
                    return model.model, group.id
        return max(models, default=0), None

    def state(self, stuck: tuple[str, Item] | None) -> dict[str, list[Any]]:
        """By process group: for the sequence now and the one before, label, count and the marks as hexadecimal text. ``stuck``
        counts as issued: a collective that the rank has been in for a while."""
        with self.lock:
            out: dict[str, list[Any]] = {}
            for name, now in self.now.items():
                if stuck is not None and stuck[0] == name:
                    count, marks = now.with_one_more(stuck[1].digest)
                else:
                    count, marks = now.count, [now.marks[position] for position in positions(now.count)]
                out[name] = [[now.label, count, _hex(marks)]]
                if name in self.before:
                    old = self.before[name]
                    out[name].append([old.label, old.count, _hex([old.marks[position] for position in positions(old.count)])])
            return out

    def excerpt(self, name: str, label: str, start: int, stop: int, stuck: tuple[str, Item] | None) -> dict[str, Any]:
        """The collectives of positions ``start`` to ``stop``, as far as they are still known: ``first`` position, ``items`` as
        numbers into ``table``, ``seqs`` and ``steps``."""
        with self.lock:
            chosen = next((s for s in (self.now.get(name), self.before.get(name)) if s is not None and s.label == label), None)
            if chosen is None:
                return {"first": 0, "items": [], "table": [], "seqs": [], "steps": []}
            base = chosen.count - len(chosen.items)
            low, high = max(0, start - base), max(0, stop - base)
            numbers = list(chosen.items[low:high])
            seqs, steps = list(chosen.seqs[low:high]), list(chosen.steps[low:high])
            table = [self._table[number] for number in numbers]
            if stuck is not None and stuck[0] == name and chosen is self.now.get(name) and stop > chosen.count:
                table.append(stuck[1])
                seqs.append(0)
                steps.append(steps[-1] if steps else 0)
        names = list(dict.fromkeys(table))
        index = {item: number for number, item in enumerate(names)}
        return {
            "first": base + low, "items": [index[item] for item in table], "table": [item.to_json() for item in names],
            "seqs": seqs, "steps": steps,
        }  # fmt: skip


def groups_of(group: GroupInfo) -> tuple[str, str]:
    """The process groups that a param group's collectives run on: of the shards, of the replicas. Empty where there is none, or
    only one rank in it."""
    return group.shard_group if group.world > 1 else "", group.replicate_group if group.replicate_world > 1 else ""


def _hex(marks: Iterable[int]) -> str:
    return "".join(f"{mark:08x}" for mark in marks)
