"""Gathers and reductions of every step by mesh, for the step lines: what metrics need of steps that are not written in full.

Runs on the drain thread, which shares the GIL with training. Steps of a run are mostly alike: what a stretch of records adds
up to is remembered, and one like the stretch at this place of an earlier step costs a comparison, some 0.15 µs an event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from fsdptrace import events as ev
from fsdptrace.model_map import GroupInfo, ModelMap

_GATHERS = ("gathers_other", "gathers_forward", "gathers_backward", "gathers_recompute")
NAMES = (
    *_GATHERS, "noops", "wasted", "gathered_bytes", "gather_wire_bytes", "reduce_scatters", "reduce_scatter_wire_bytes",
    "all_reduces", "all_reduce_wire_bytes",
)  # fmt: skip
"""What is counted per mesh; zeros are left out. Gathers by pass, no-ops apart; ``wasted`` were freed or thrown away unused."""

_NOOPS, _WASTED, _GATHERED, _GATHER_WIRE, _SCATTERS, _SCATTER_WIRE, _ALL_REDUCES, _ALL_REDUCE_WIRE = range(4, 12)


def mesh_name(group: GroupInfo) -> str:
    """The device mesh of a group as text: ``dp_shard=8``, ``replicate=2,shard=4``."""
    return ",".join(f"{name}={size}" for name, size in group.mesh.items())


_COUNTED = frozenset(
    (ev.UNSHARD, ev.PRE_FORWARD, ev.PRE_BACKWARD, ev.RESHARD, ev.DISCARD, ev.REDUCE_SCATTER, ev.ALL_REDUCE)
)  # fmt: skip
_COLUMNS = (ev.KIND, ev.GROUP, ev.CONTEXT, ev.A, ev.A + 1, ev.A + 4)
_KEPT = 64  # places and lengths that are remembered

_Columns = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Records that were added up: what of them counts, which groups were open before, what came to each mesh, and which groups
    are open after."""

    columns: _Columns
    before: dict[int, bool]
    added: list[list[int]]
    after: dict[int, bool]


class Totals:
    """Adds up one model's records; what is open stays known from step to step."""

    def __init__(self) -> None:
        self._rows: list[list[int]] = []
        self._meshes: dict[str, list[int]] = {}
        self._used: dict[int, bool] = {}
        self._map: ModelMap | None = None
        self._seen: dict[tuple[int, int], _Stretch] = {}

    def use(self, model_map: ModelMap) -> None:
        """Takes the groups of ``model_map`` from now on."""
        if model_map is not self._map:
            self._map = model_map
            self._rows = [self._meshes.setdefault(mesh_name(group), [0] * len(NAMES)) for group in model_map.groups]
            self._seen.clear()

    def feed(self, records: Sequence[int], place: int = 0) -> None:
        """Whole records, in order; they begin ``place`` integers after their step does."""
        mask = list(map(_COUNTED.__contains__, records[ev.KIND :: ev.WIDTH]))
        columns = [tuple(compress(records[at :: ev.WIDTH], mask)) for at in _COLUMNS]
        stretch = self._seen.get((place, len(mask)))
        if stretch is None or stretch.columns != columns or stretch.before != self._used:
            stretch = self._learn(columns)
            if len(self._seen) >= _KEPT:
                self._seen.clear()
            self._seen[place, len(mask)] = stretch
        for row, added in zip(self._meshes.values(), stretch.added, strict=True):
            row[:] = map(int.__add__, row, added)
        self._used = stretch.after.copy()

    def _learn(self, columns: _Columns) -> _Stretch:
        """What the records of ``columns`` add up to; the sums stay as they are."""
        sums = [row[:] for row in self._meshes.values()]
        before = self._used.copy()
        for row in self._meshes.values():
            row[:] = [0] * len(NAMES)
        self._add(columns)
        added = [row[:] for row in self._meshes.values()]
        for row, kept in zip(self._meshes.values(), sums, strict=True):
            row[:] = kept
        return _Stretch(columns, before, added, self._used)

    def _add(self, columns: _Columns) -> None:
        rows, used = self._rows, self._used
        for kind, group, context, size, world, how in zip(*columns, strict=True):
            if kind == ev.UNSHARD:
                row = rows[group]
                if how % 4:
                    row[_NOOPS] += 1
                    continue
                row[context % 4] += 1
                row[_GATHERED] += size
                row[_GATHER_WIRE] += ev.wire_bytes(kind, size, world)
                used[group] = False
            elif kind in (ev.PRE_FORWARD, ev.PRE_BACKWARD):
                if group in used:
                    used[group] = True
            elif kind in (ev.RESHARD, ev.DISCARD):
                was = used.pop(group, None)
                if was is not None and (kind == ev.DISCARD or not was):
                    rows[group][_WASTED] += 1
            elif kind == ev.REDUCE_SCATTER:
                rows[group][_SCATTERS] += 1
                rows[group][_SCATTER_WIRE] += ev.wire_bytes(kind, size, world)
            else:
                rows[group][_ALL_REDUCES] += 1
                rows[group][_ALL_REDUCE_WIRE] += ev.wire_bytes(kind, size, world)

    def take(self) -> dict[str, dict[str, int]]:
        """The sums by mesh since the last call."""
        out = {}
        for mesh, row in self._meshes.items():
            sums = {name: value for name, value in zip(NAMES, row, strict=True) if value}
            if sums:
                out[mesh] = sums
                row[:] = [0] * len(NAMES)
        return out
