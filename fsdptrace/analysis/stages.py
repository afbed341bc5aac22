"""Ranks whose models are not the same: the stages of a pipeline, or a rank that was wrapped in another way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from fsdptrace.analysis.process import ProcessTrace
from fsdptrace.model_map import GroupInfo, ModelMap, ranks_of, show_name

#: What of a group is each rank's own although the model is the same.
OWN = frozenset(("sharded_bytes", "shard_group", "replicate_group"))
_COMPARED = tuple(item.name for item in fields(GroupInfo) if item.name not in OWN)


@dataclass(slots=True)
class Stage:
    """One model on the ranks that have it alike.

    Attributes:
        map: the model, as the first of its ranks has it.
        places: positions of the processes that have it; ``ranks`` their ranks.
        alone: every process that has this model has it alike, as is usual.
    """

    map: ModelMap
    places: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    alone: bool = True

    @property
    def units(self) -> tuple[str, ...]:
        """Names of its units' groups, the root's empty."""
        return tuple(group.fqn for group in self.map.groups)

    @property
    def names(self) -> str:
        """The modules that are its units: ``layers.0 to layers.3``."""
        names = [name for name in self.units if name] or [show_name("")]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def alike(a: ModelMap, b: ModelMap) -> bool:
    """Whether two ranks have the same model: units, sizes, dtypes, meshes, policies."""
    if a is b:
        return True
    if (a.root, len(a.groups), a.units, a.uncovered) != (b.root, len(b.groups), b.units, b.uncovered):
        return False
    return a.groups == b.groups or first_difference(a, b) is None


def first_difference(a: ModelMap, b: ModelMap) -> tuple[str, str] | None:
    """The first unit and field in which two models of the same units differ; None where there is none."""
    for one, other in zip(a, b, strict=False):
        for name in _COMPARED:
            if getattr(one, name) != getattr(other, name):
                return one.fqn, name
    return None


def stages(processes: Sequence[ProcessTrace]) -> list[Stage]:
    """The models of all processes, those that are alike together: by number, class and lowest position."""
    found: dict[tuple[int, str], list[Stage]] = {}
    for place, process in enumerate(processes):
        for number, model in process.models.items():
            known = found.setdefault((number, model.root), [])
            stage = next((item for item in known if alike(item.map, model)), None)
            if stage is None:
                stage = Stage(model)
                known.append(stage)
            stage.places.append(place)
            stage.ranks.append(process.rank)
    for known in found.values():
        for stage in known:
            stage.alone = len(known) == 1
    return [stage for _, known in sorted(found.items()) for stage in known]


def together(processes: Sequence[ProcessTrace], found: Sequence[Stage]) -> dict[tuple[int, int], int]:
    """By position and model number, which processes issue collectives together: of one stage, and connected by its process
    groups (two stages can have units of the same names and sizes)."""
    out: dict[tuple[int, int], int] = {}
    number = 0
    for stage in found:
        groups = [_connected(processes[place].models[stage.map.model]) for place in stage.places]
        parts = _components(groups) if all(groups) else [0] * len(groups)
        for place, part in zip(stage.places, parts, strict=True):
            out[place, stage.map.model] = number + part
        number += len(groups) + 1
    return out


def _connected(model: ModelMap) -> set[int]:
    """The ranks that this one shares a process group of a unit with; empty where the files do not say."""
    ranks: set[int] = set()
    for text in {text for group in model for text in (group.shard_group, group.replicate_group)}:
        try:
            ranks.update(ranks_of(text))
        except ValueError:  # damaged
            return set()
    return ranks


def _components(groups: Sequence[set[int]]) -> list[int]:
    """For each set, a number that sets with a common member, or with a chain of such sets between them, share."""
    parts: list[tuple[set[int], list[int]]] = []
    for place, ranks in enumerate(groups):
        touching = [part for part in parts if not part[0].isdisjoint(ranks)]
        if len(touching) == 1 and ranks <= touching[0][0]:
            touching[0][1].append(place)
            continue
        parts = [part for part in parts if part not in touching]
        parts.append((ranks.union(*(part[0] for part in touching)), [place, *(i for part in touching for i in part[1])]))
    of = {place: number for number, (_, places) in enumerate(parts) for place in places}
    return [of[place] for place in range(len(groups))]
