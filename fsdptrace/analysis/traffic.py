"""Bytes on the wire, by mesh and dtype, beside what this wrap cannot do without.

The closed form. A unit of ``b`` gathered bytes over ``w`` ranks receives ``b / w * (w - 1)`` bytes per all-gather. Each forward
of it (recomputations apart) needs one, and so does each backward, unless ``reshard_after_forward`` leaves it open, or over the
smaller mesh that it names. Each backward of a unit with trainable parameters reduces their gradients, ``g`` bytes in the
dtype of the reduction, once: ``g / w * (w - 1)`` bytes received; and, replicated ``r`` times, all-reduces ``g / w`` bytes:
twice ``g / w / r * (r - 1)``. How often each unit ran is counted from the hooks, so the form fits any number of micro-batches.

More than the form: gathers for nothing, or again. Less: units that were open already, gradients that were held back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fsdptrace import events as ev
from fsdptrace.analysis.rows import UnitRow, Units
from fsdptrace.model_map import GroupInfo, ModelMap

COLLECTIVES: Mapping[int, str] = {ev.UNSHARD: "all-gather", ev.REDUCE_SCATTER: "reduce-scatter", ev.ALL_REDUCE: "all-reduce"}
_ITEMSIZE = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1, "int8": 1,
    "complex64": 8, "complex128": 16, "int32": 4, "int64": 8, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip

Key = tuple[int, int, int, int]
"""Kind, group, world, dtype."""


@dataclass(slots=True)
class TrafficRow:
    """Collectives of one kind, mesh and dtype: sums over steps and ranks. ``wire_bytes`` is what ranks received;
    ``expected_calls`` and ``expected_wire_bytes`` are the closed form's."""

    collective: str
    mesh: str
    world: int
    dtype: str
    calls: int = 0
    bytes: int = 0
    wire_bytes: int = 0
    expected_calls: int = 0
    expected_wire_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """A unit whose collectives of one kind are not those of the closed form: sums over steps and ranks."""

    unit: str
    collective: str
    calls: int
    expected_calls: int
    wire_bytes: int
    expected_wire_bytes: int


@dataclass(slots=True)
class Traffic:
    """Communication of one model. ``steps`` are those behind the sums, added up over ranks; ``unknown`` are units whose
    dtypes the model line does not tell, so that the form leaves their reductions out."""

    steps: int
    rows: list[TrafficRow] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def wire_bytes(self) -> int:
        """Bytes received, over all steps and ranks."""
        return sum(row.wire_bytes for row in self.rows)

    @property
    def expected_wire_bytes(self) -> int:
        """The same by the closed form."""
        return sum(row.expected_wire_bytes for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "rank_steps": self.steps, "wire_bytes": self.wire_bytes, "expected_wire_bytes": self.expected_wire_bytes,
            "rows": [asdict(row) for row in self.rows], "differences": [asdict(item) for item in self.differences],
            "not_in_the_form": self.unknown,
        }  # fmt: skip


def mesh_name(info: GroupInfo, kind: int, world: int) -> str:
    """The mesh dimension that a collective runs over, with its size: ``dp_shard (8)``."""
    dims = list(info.mesh)
    replicated = info.replicate_world > 1 and len(dims) > 1
    own = dims[:1] if kind == ev.ALL_REDUCE else dims[1:] if replicated else dims
    size = info.replicate_world if kind == ev.ALL_REDUCE else info.world
    name = "+".join(f"dim {dim}" if dim.isdigit() else dim for dim in own) or "?"
    return f"{name} ({size})" if world == size else f"{world} ranks of {name} ({size})"


def gradient_bytes(info: GroupInfo) -> int | None:
    """Bytes of the unit's gradients as they are reduced, padding included; ``None`` where the model line does not tell."""
    reduced = _ITEMSIZE.get(info.reduce_dtype)
    if reduced is None:
        return None
    if not info.params:  # a map without parameters: all of them are taken to be trainable
        gathered = _ITEMSIZE.get(info.dtype)
        return None if gathered is None or info.dtype == "uint8" else info.bytes // gathered * reduced
    total = 0
    for param in info.params:
        if param.trainable:
            gathered = _ITEMSIZE.get(param.dtype if info.dtype == "uint8" else info.dtype)
            if gathered is None:
                return None
            total += param.bytes // gathered * reduced
    return total


def traffic(model: ModelMap, rows: Iterable[UnitRow], of_ranks: Iterable[Units]) -> Traffic:
    """What the units' rows and the ranks' collectives add up to, beside the closed form."""
    of_ranks = list(of_ranks)
    measured: dict[Key, list[int]] = {}
    for units in of_ranks:
        for key, entry in units.traffic.items():
            into = measured.setdefault(key, [0, 0, 0])
            for i, value in enumerate((entry.calls, entry.bytes, entry.wire_bytes)):
                into[i] += value
    out = Traffic(sum(units.steps for units in of_ranks))
    roots = set().union(*(units.outermost for units in of_ranks))
    expected: dict[Key, list[int]] = {}
    by_name = {row.name: row for row in rows}
    for info in model.groups:
        row = by_name.get(info.fqn)
        if row is not None and not _form(info, row, info.unit in roots, expected):
            out.unknown.append(info.fqn)
    out.rows = _rows(model, measured, expected)
    out.differences = _differences(model, measured, expected)
    return out


def _form(info: GroupInfo, row: UnitRow, outermost: bool, expected: dict[Key, list[int]]) -> bool:
    """Adds what the closed form says of one unit; whether its reductions are among it."""

    def add(kind: int, world: int, dtype: str, calls: int, size: int) -> None:
        if calls:
            into = expected.setdefault((kind, info.id, world, ev.DTYPE_NUMBER.get(dtype, 0)), [0, 0])
            into[0] += calls
            into[1] += calls * ev.wire_bytes(kind, size, world)

    forwards, backwards = row.sums.forwards, row.sums.backwards
    add(ev.UNSHARD, info.world, info.dtype, forwards, info.bytes)
    # By default a root stays open after its forward; before torch 2.8, which does not tell (None), whatever its policy.
    if info.post_forward_world > 1 and not (outermost and info.auto_policy is not False):
        add(ev.UNSHARD, info.post_forward_world, info.dtype, backwards, info.bytes)
    elif info.world == 1 and info.reshard_after_forward:
        add(ev.UNSHARD, 1, info.dtype, backwards, info.bytes)
    if not info.trainable or not backwards:
        return True
    size = gradient_bytes(info)
    if size is None:
        return False
    if info.world > 1:
        add(ev.REDUCE_SCATTER, info.world, info.reduce_dtype, backwards, size)
    if info.replicate_world > 1:
        add(ev.ALL_REDUCE, info.replicate_world, info.reduce_dtype, backwards, size // info.world)
    return True


def _rows(model: ModelMap, measured: Mapping[Key, list[int]], expected: Mapping[Key, list[int]]) -> list[TrafficRow]:
    made: dict[tuple[int, str, int, int], TrafficRow] = {}
    for key in sorted({*measured, *expected}):
        kind, group, world, dtype = key
        if world <= 1:  # nothing travels
            continue
        mesh = mesh_name(model.groups[group], kind, world)
        row = made.get((kind, mesh, world, dtype))
        if row is None:
            row = made[kind, mesh, world, dtype] = TrafficRow(COLLECTIVES[kind], mesh, world, ev.DTYPES[dtype])
        calls, size, wire = measured.get(key, (0, 0, 0))
        row.calls += calls
        row.bytes += size
        row.wire_bytes += wire
        expected_calls, expected_wire = expected.get(key, (0, 0))
        row.expected_calls += expected_calls
        row.expected_wire_bytes += expected_wire
    return list(made.values())


def _differences(model: ModelMap, measured: Mapping[Key, list[int]], expected: Mapping[Key, list[int]]) -> list[Difference]:
    """Units that do more or less than the form, those with most bytes first."""
    sums: dict[tuple[int, int], list[int]] = {}
    for (kind, group, world, _dtype), (calls, _size, wire) in measured.items():
        if world > 1:
            into = sums.setdefault((kind, group), [0, 0, 0, 0])
            into[0] += calls
            into[2] += wire
    for (kind, group, world, _dtype), (calls, wire) in expected.items():
        if world > 1:
            into = sums.setdefault((kind, group), [0, 0, 0, 0])
            into[1] += calls
            into[3] += wire
    found = [
        Difference(model.groups[group].fqn, COLLECTIVES[kind], *values)
        for (kind, group), values in sorted(sums.items())
        if values[0] != values[1] or values[2] != values[3]
    ]
    return sorted(found, key=lambda item: -abs(item.wire_bytes - item.expected_wire_bytes))
