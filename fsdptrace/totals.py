"""Gathers and reductions of every step by mesh, for the step lines: what metrics need of steps that are not written in full.

Runs on the drain thread, about 0.15 µs an event.
"""

from __future__ import annotations

from collections.abc import Sequence

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


class Totals:
    """Adds up one model's records; what is open stays known from step to step."""

    def __init__(self) -> None:
        self._rows: list[list[int]] = []
        self._meshes: dict[str, list[int]] = {}
        self._used: dict[int, bool] = {}

    def use(self, model_map: ModelMap) -> None:
        """Takes the groups of ``model_map`` from now on."""
        self._rows = [self._meshes.setdefault(mesh_name(group), [0] * len(NAMES)) for group in model_map.groups]

    def feed(self, records: Sequence[int]) -> None:
        """Whole records, in order."""
        rows, used = self._rows, self._used
        columns = (records[at :: ev.WIDTH] for at in (ev.KIND, ev.GROUP, ev.CONTEXT, ev.A, ev.A + 1, ev.A + 4))
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
            elif kind == ev.ALL_REDUCE:
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
