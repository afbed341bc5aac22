"""``fsdptrace.inspect``: what can be said of a wrapped model before it trains."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch.nn as nn

from fsdptrace import events as ev
from fsdptrace.adapters import compat
from fsdptrace.adapters.describe import Described, describe
from fsdptrace.adapters.facts import DTYPE, IGNORED_AT_WRAP, OUTSIDE_AT_WRAP, TIED, kinds, some
from fsdptrace.adapters.wrap import cut_ties, mixed_dtypes, outside
from fsdptrace.checks.base import Violation
from fsdptrace.checks.engine import Engine
from fsdptrace.checks.registry import RULES
from fsdptrace.checks.text import count, size
from fsdptrace.model_map import GroupInfo, ModelMap, show_name
from fsdptrace.peak import Peak, predict

WRAP_RULES = ("uncovered-parameter", "mixed-dtype-unit", "split-tie")


@dataclass(frozen=True, slots=True)
class Inspection:
    """A wrap, looked at. ``str()`` of it is a short text.

    Attributes:
        map: units, groups, parameters, dtypes, meshes.
        peak: bytes of gathered parameters that a training step will hold at most, on each rank.
        violations: what the rules find that need no training: ``uncovered-parameter``, ``mixed-dtype-unit``, ``split-tie``.
        sharded_bytes: bytes of this rank's shards; ``gathered_bytes`` of all groups gathered; ``outside_bytes`` of parameters
            in no group.
        largest_gather, largest_reduction: ``(name, bytes)`` of the group whose all-gather (its output) and whose
            reduce-scatter (its input) is the largest.
    """

    map: ModelMap
    peak: Peak
    violations: tuple[Violation, ...]
    sharded_bytes: int
    gathered_bytes: int
    outside_bytes: int
    largest_gather: tuple[str, int]
    largest_reduction: tuple[str, int]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        data = asdict(self)
        data["map"] = self.map.to_json()
        data["violations"] = [violation.to_json() for violation in self.violations]
        return data

    def __str__(self) -> str:
        lines = [
            f"{self.map.root}: {count(len(self.map.groups), 'unit')} with {size(self.gathered_bytes)} of parameters, "
            f"{size(self.sharded_bytes)} on this rank",
            f"gathered at most {size(self.peak.bytes)}: {self.when}",
            f"largest gather {size(self.largest_gather[1])} ({show_name(self.largest_gather[0])}), largest reduction "
            f"{size(self.largest_reduction[1])} ({show_name(self.largest_reduction[0])})",
        ]
        return "\n".join([*lines, *(f"{violation.severity}: {violation}" for violation in self.violations)])

    @property
    def when(self) -> str:
        """When the peak is reached and what is open then."""
        if not self.peak.bytes:
            return "nothing is gathered"
        names = [f"{show_name(fqn)} {size(number)}" for fqn, number in self.peak.groups[:4]]
        more = f" and {len(self.peak.groups) - 4} more" if len(self.peak.groups) > 4 else ""
        return f"in the {self.peak.pass_} of {show_name(self.peak.unit)}, {', '.join(names)}{more}"


def inspect(model: nn.Module) -> Inspection:
    """Looks at ``model``, wrapped by ``fully_shard`` or containing wrapped modules; runs nothing and changes nothing.

    Parameters may be on the meta device and the process group a fake one, so that a wrap for many ranks is looked at on one
    machine (``fsdptrace inspect SCRIPT:FUNCTION --world-size 64``).

    Raises:
        UnsupportedTorch: this PyTorch lacks a name that is needed.
        TypeError: ``model`` is not a module.
        ValueError: no module of it was wrapped.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"inspect(): a module is needed, not {type(model).__name__}")
    report = compat.require()
    described = describe(model, 0)
    model_map = described.map
    if not model_map.groups:
        raise ValueError(
            f"inspect({model_map.root}): no module of it was wrapped by fully_shard; call inspect after fully_shard"
        )
    found, outside_bytes = _violations(model, described, report.release)
    groups = model_map.groups
    gather = max(groups, key=lambda group: group.bytes)
    reduction = max(groups, key=reduction_bytes)
    return Inspection(
        model_map, predict(model_map), tuple(found), sum(group.sharded_bytes for group in groups),
        sum(group.bytes for group in groups), outside_bytes, (gather.fqn, gather.bytes),
        (reduction.fqn, reduction_bytes(reduction)),
    )  # fmt: skip


def reduction_bytes(group: GroupInfo) -> int:
    """Bytes of the input of the group's reduce-scatter when every trainable parameter has a gradient, padding included."""
    itemsize = _ITEMSIZE.get(group.reduce_dtype, 4)
    return (
        sum(param.bytes // _ITEMSIZE.get(gathered_dtype(group, param.dtype), 4) for param in group.params if param.trainable)
        * itemsize
    )


def gathered_dtype(group: GroupInfo, stored: str) -> str:
    """The dtype in which a parameter stored as ``stored`` is gathered."""
    return group.dtype if group.dtype != "uint8" else stored


_ITEMSIZE = {
    "float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2,
    "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip


def _violations(model: nn.Module, described: Described, release: tuple[int, int]) -> tuple[list[Violation], int]:
    """What the wrap-time rules find, and the bytes of parameters in no group."""
    found: list[Violation] = []
    texts = ev.Texts()
    engine = Engine(described.map, [RULES[name] for name in WRAP_RULES], found.append, release, None, texts)

    def tell(fact: int, group: int, name: str, other: int = ev.NONE, detail: str = "", number: int = 0) -> None:
        engine.feed((ev.PARAM, 0, 0, 0, group, 0, 0, fact, texts.put(name), other, texts.put(detail), number))

    outer = outside(model, described)
    if any(group.world * group.replicate_world > 1 for group in described.map.groups):
        for ignored, fact in ((False, OUTSIDE_AT_WRAP), (True, IGNORED_AT_WRAP)):
            items = [item for item in outer if item.ignored is ignored]
            if items:
                total = sum(item.param.numel() * item.param.element_size() for item in items)
                tell(fact, ev.NONE, some([item.name for item in items]), detail=str(len(items)), number=total)
    for group, named in mixed_dtypes(described):
        tell(DTYPE, group, some([f"{name} ({dtype})" for name, dtype in named]), detail=kinds(named))
    for tie in cut_ties(described):
        tell(TIED, tie.group, tie.name, tie.other, tie.other_name)
    return found, sum(item.param.numel() * item.param.element_size() for item in outer)
