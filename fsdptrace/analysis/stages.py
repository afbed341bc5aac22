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
    parts: dict[tuple[int, int], int] = {}
    for number, stage in enumerate(found):
        leaders = _leaders(processes, stage)
        for place in stage.places:
            leader = leaders.get(processes[place].rank, -1)
            out[place, stage.map.model] = parts.setdefault((number, leader), len(parts))
    return out


def _leaders(processes: Sequence[ProcessTrace], stage: Stage) -> dict[int, int]:
    """By rank, one rank that stands for all that it shares process groups with, directly or over others; empty where the files
    do not say."""
    leader: dict[int, int] = {}

    def find(rank: int) -> int:
        while leader.setdefault(rank, rank) != rank:
            leader[rank] = rank = leader[leader[rank]]
        return rank

    seen: set[str] = set()  # each group once, however many ranks name it
    for place in stage.places:
        texts = {
            text for group in processes[place].models[stage.map.model] for text in (group.shard_group, group.replicate_group)
        }
        texts.discard("")
        if not texts:
            return {}
        for text in texts - seen:
            try:
                first, *others = ranks_of(text)
            except ValueError:  # damaged
                return {}
            for rank in others:
                leader[find(rank)] = find(first)
        seen |= texts
    return {rank: find(rank) for rank in list(leader)}
