"""The static picture of a model: units, param groups, module and parameter names, tensors, bytes, dtypes, mesh.

Built by the adapters when recording starts, written as the ``model`` line of a file and read back from it. A *unit* is
what one ``fully_shard`` call made (one or several modules); it has one param group, several (per-parameter meshes, torch
2.12 and newer) or none (a root whose parameters all belong to children). The recorded module itself is always unit 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

_WRAPPER_PARTS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")


def clean_name(name: str) -> str:
    """``name`` without the parts that wrappers add (checkpoint_wrapper, torch.compile, FSDP1)."""
    if "_" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def show_name(fqn: str) -> str:
    """How a unit is called in a message: the root has no name of its own."""
    return fqn or "(root)"


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """One parameter of a group: name in the recorded model, full shape, dtype as stored, bytes when gathered (padded)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    bytes: int


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """One ``FSDPParamGroup``.

    Attributes:
        id: number of the group in its model.
        fqn: name of its (first) module; ``#1``, ``#2`` is appended for further groups of one module.
        unit: id of its unit.
        modules: names of all modules of the unit.
        params: its parameters.
        tensors: number of parameters.
        bytes: bytes of the gathered parameters in ``dtype``, padding of uneven shards included.
        sharded_bytes: bytes of this rank's shards as stored.
        dtype: dtype that is gathered (``uint8`` where dtypes are mixed).
        reduce_dtype: dtype of the gradient reduction.
        world: ranks that the parameters are sharded over.
        post_forward_world: ranks after the forward: ``world``, a smaller mesh, or 1 when it stays open.
        replicate_world: ranks that hold replicas (HSDP, replicate); 1 without.
        mesh: dimension names (or positions) and sizes of the device mesh.
        reshard_after_forward: ``True``, ``False`` or the size of the smaller mesh.
        auto_policy: the user gave no ``reshard_after_forward``, so a root stays open after its forward (torch 2.8 and
            newer); ``None`` where the release does not say.
        trainable: parameters that require grad.
        offload: shards live on the CPU.
        named_dtype, named_reduce_dtype: what the mixed-precision policy names for gathers and reductions; empty where it names
            none, or where parameters bring an all-gather of their own (``fsdp_pre_all_gather``, as float8 does).
        shard_group, replicate_group: process group of the shards and of the replicas, as ``name:ranks`` (``0:0-7``).
    """

    id: int
    fqn: str
    unit: int
    modules: tuple[str, ...]
    params: tuple[ParamInfo, ...]
    tensors: int
    bytes: int
    sharded_bytes: int
    dtype: str
    reduce_dtype: str
    world: int
    post_forward_world: int
    replicate_world: int
    mesh: Mapping[str, int]
    reshard_after_forward: bool | int
    auto_policy: bool | None
    trainable: int
    offload: bool
    named_dtype: str = ""
    named_reduce_dtype: str = ""
    shard_group: str = ""
    replicate_group: str = ""


def spans(ranks: Sequence[int]) -> str:
    """``0-7``, ``3-67/8`` (every eighth), ``0,3,4`` for what is in no such order."""
    if len(ranks) < 3:
        return ",".join(map(str, ranks))
    stride = ranks[1] - ranks[0]
    if stride < 1 or list(ranks) != list(range(ranks[0], ranks[-1] + 1, stride)):
        return ",".join(map(str, ranks))
    return f"{ranks[0]}-{ranks[-1]}" + (f"/{stride}" if stride > 1 else "")


def ranks_of(process_group: str) -> list[int]:
    """The ranks in a ``shard_group`` or ``replicate_group``; none where it does not say.

    Raises:
        ValueError: the text is none of ours.
    """
    out: list[int] = []
    for part in process_group.rpartition(":")[2].split(","):
        span, _, stride = part.partition("/")
        first, _, last = span.partition("-")
        if first:
            out += range(int(first), int(last or first) + 1, int(stride or 1))
    return out


def usual_flags(group: GroupInfo) -> int:
    """The switches of a group that nobody has touched, as bits in the order of :data:`fsdptrace.events.FLAGS`."""
    return 1 | 2 | 4 | (8 if group.reshard_after_forward else 0) | 16


@dataclass(frozen=True, slots=True)
class UnitInfo:
    """One ``fully_shard`` call, or the recorded module itself where it was not wrapped (``sharded`` is False)."""

    id: int
    fqn: str
    modules: tuple[str, ...]
    groups: tuple[int, ...]
    sharded: bool


@dataclass(frozen=True, slots=True)
class ModelMap:
    """A recorded model: ``model`` is its number in the process, ``root`` the class name of the recorded module.

    ``uncovered`` names parameters that belong to no group.
    """

    model: int
    root: str
    units: tuple[UnitInfo, ...]
    groups: tuple[GroupInfo, ...]
    uncovered: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[GroupInfo]:
        return iter(self.groups)

    def fqn(self, group: int | None) -> str:
        """Name of ``group``; empty for the root and for no group."""
        return "" if group is None or group < 0 else self.groups[group].fqn

    @property
    def tensors(self) -> tuple[int, ...]:
        """Parameters per group, by id."""
        return tuple(group.tensors for group in self.groups)

    def to_json(self) -> dict[str, Any]:
        """The ``model`` line of a file."""
        return {"kind": "model", **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelMap:
        """Reads a ``model`` line; unknown keys (of a newer version) are ignored.

        Raises:
            KeyError, TypeError: a field that is needed is missing or of another type.
        """
        groups = []
        for item in data["groups"]:
            params = tuple(_from(ParamInfo, {**param, "shape": tuple(param["shape"])}) for param in item.get("params", ()))
            groups.append(_from(GroupInfo, {**item, "params": params, "modules": tuple(item["modules"])}))
        units = tuple(
            _from(UnitInfo, {**item, "modules": tuple(item["modules"]), "groups": tuple(item["groups"])})
            for item in data["units"]
        )
        return cls(int(data["model"]), str(data["root"]), units, tuple(groups), tuple(data.get("uncovered", ())))


T = TypeVar("T")


def _from(cls: type[T], data: Mapping[str, Any]) -> T:
    names = _NAMES[cls]
    return cls(**{key: value for key, value in data.items() if key in names})


_NAMES: Mapping[type, frozenset[str]] = {
    cls: frozenset(field.name for field in fields(cls)) for cls in (ParamInfo, GroupInfo, UnitInfo)
}
