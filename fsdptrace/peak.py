"""How many bytes are gathered at most in a training step, predicted from the wrap alone.

Plays one forward and one backward of FSDP2 over the units in the order of ``named_modules``: a unit is gathered when its
forward begins, its inner units run inside it, and it is freed at its end as its policy says. In the backward each unit
prefetches the one whose forward ended before its own (implicit backward prefetch, from FSDP2's order of post-forwards), so that
two are in flight, and is freed by its post-backward; a root that the default policy keeps open stays until the end.
What it does not know: another order of execution, explicit prefetch lists, units that run twice or not at all, activation
checkpointing of older releases (``gather-after-backward``). The copies that a smaller mesh holds are counted apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fsdptrace.model_map import GroupInfo, ModelMap


@dataclass(frozen=True, slots=True)
class Peak:
    """``bytes`` gathered at most, when (``forward`` or ``backward`` of ``unit``), and what was open then: names and bytes,
    largest first. ``smaller`` are the bytes of copies on smaller meshes between forward and backward, at most."""

    bytes: int = 0
    pass_: str = "forward"
    unit: str = ""
    groups: tuple[tuple[str, int], ...] = ()
    smaller: int = 0


@dataclass(slots=True)
class _Run:
    map: ModelMap
    held: dict[int, int] = field(default_factory=dict)  # bytes by group
    left: dict[int, int] = field(default_factory=dict)  # bytes of copies on a smaller mesh
    peak: Peak = field(default_factory=Peak)
    smaller: int = 0

    def open(self, group: GroupInfo, pass_: str, unit: str) -> None:
        if group.id in self.held:
            return
        self.held[group.id] = group.bytes
        self.left.pop(group.id, None)
        total = sum(self.held.values())
        if total > self.peak.bytes:
            names = sorted(((self.map.groups[gid].fqn, size) for gid, size in self.held.items()), key=lambda item: -item[1])
            self.peak = Peak(total, pass_, unit, tuple(names))

    def free(self, group: GroupInfo) -> None:
        self.held.pop(group.id, None)
        self.left.pop(group.id, None)

    def leave(self, group: GroupInfo) -> None:
        """A forward of the group's unit ends."""
        if keeps_open(self.map, group):
            return
        self.held.pop(group.id, None)
        if group.post_forward_world not in (1, group.world):
            self.left[group.id] = group.bytes // group.post_forward_world
            self.smaller = max(self.smaller, sum(self.left.values()))


def keeps_open(model_map: ModelMap, group: GroupInfo) -> bool:
    """Whether a forward leaves the group open: told so, or of the root, whose default policy says so (torch 2.8 and newer;
    before its first forward PyTorch has not applied it yet)."""
    root = model_map.units[group.unit].fqn == ""
    return not group.reshard_after_forward or (root and bool(group.auto_policy))


def predict(model_map: ModelMap) -> Peak:
    """The :class:`Peak` of one training step of ``model_map``."""
    run = _Run(model_map)
    ends: list[int] = []  # units in the order in which their forwards end
    walk = list(_walk(model_map))
    for unit, begins in walk:
        groups = [model_map.groups[gid] for gid in model_map.units[unit].groups]
        for group in groups:
            if begins:
                run.open(group, "forward", model_map.units[unit].fqn)
            else:
                run.leave(group)
        if not begins and groups:
            ends.append(unit)
    place = {unit: index for index, unit in enumerate(ends)}
    for unit, ended in reversed(walk):
        info = model_map.units[unit]
        groups = [model_map.groups[gid] for gid in info.groups]
        if not groups:
            continue
        if ended:  # its forward began here: its post-backward
            for group in groups:
                run.free(group)
            continue
        for group in groups:
            run.open(group, "backward", info.fqn)
        if place[unit]:
            for gid in model_map.units[ends[place[unit] - 1]].groups:
                run.open(model_map.groups[gid], "backward", info.fqn)
    peak = run.peak
    return Peak(peak.bytes, peak.pass_, peak.unit, peak.groups, run.smaller)


def _walk(model_map: ModelMap) -> Iterator[tuple[int, bool]]:
    """Units as their forwards begin (True) and end (False), inner ones inside outer ones."""
    open_: list[int] = []
    for unit in model_map.units:
        if not unit.sharded:
            continue
        while open_ and not _inside(unit.fqn, model_map.units[open_[-1]].modules):
            yield open_.pop(), False
        open_.append(unit.id)
        yield unit.id, True
    while open_:
        yield open_.pop(), False


def _inside(fqn: str, modules: tuple[str, ...]) -> bool:
    return any(not module or fqn.startswith(f"{module}.") for module in modules)
