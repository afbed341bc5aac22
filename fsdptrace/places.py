"""Where ranks stand, in words, grouped so that 512 of them are a few lines. For ``rank-stall``, live, and ``postmortem``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from fsdptrace.checks.text import count
from fsdptrace.model_map import ModelMap, show_name
from fsdptrace.parting import collective_name, which_names

SHOWN: Final = 8  # spans of ranks that are listed

_AFTER: Final[Mapping[str, str]] = {
    "pre_forward": "in the forward of", "post_forward": "after the forward of", "pre_backward": "in the backward of",
    "post_backward": "after the backward of", "unshard": "after the all-gather of", "wait": "after the all-gather of",
    "reshard": "after the reshard of", "reduce_scatter": "after the reduce-scatter of", "all_reduce": "after the all-reduce of",
    "discard": "after a gather was thrown away of", "prefetch": "after a prefetch by",
}  # fmt: skip
_BETWEEN: Final[Mapping[str, str]] = {
    "forward": "after the forward", "backward": "after the backward", "optimizer_step": "after the optimizer's step",
    "step": "between two steps", "param_change": "after the parameters changed", "exception": "after an exception",
    "state": "at the start of the recording", "region": "in a checkpointed region", "recompute": "in a recomputation",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Standing:
    """One rank.

    Attributes:
        rank, step: which, and the step of its first model that was running.
        place: where it is or was, as words.
        inside: it is in a collective that it has not left.
        seconds: since when, before the newest sign of life of any rank; negative where that is not known.
        end: how it ended, as words; empty while it runs or is thought to.
        code: the program's own line that its training thread was in; empty where not known.
        bytes: unsharded bytes of parameters that it held; -1 where not known.
    """

    rank: int
    step: int
    place: str
    inside: bool = False
    seconds: float = -1.0
    end: str = ""
    code: str = ""
    bytes: int = -1

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def place_of(
    collective: Mapping[str, Any] | None, at: Mapping[str, Any] | None, maps: Mapping[int, ModelMap]
) -> tuple[str, bool]:
    """Words for the collective that was entered, else for the newest event; and whether it is a collective."""
    if collective is not None:
        name, params = _group(collective, maps)
        text = f"in the {collective_name(str(collective.get('kind')))} of {name}"
        which = str(collective.get("which") or "")
        return (f"{text} with gradients of {which_names(which, params)}" if which else text), True
    if at is None:
        return "before the first event of the step", False
    kind = str(at.get("kind"))
    if kind in _AFTER:
        return f"{_AFTER[kind]} {_group(at, maps)[0]}", False
    return _BETWEEN.get(kind, f"after {kind}"), False


def _group(data: Mapping[str, Any], maps: Mapping[int, ModelMap]) -> tuple[str, list[str]]:
    model, number = maps.get(data.get("model", 0)), data.get("group")
    if model is None or not isinstance(number, int) or not 0 <= number < len(model.groups):
        return "a unit without parameters", []
    group = model.groups[number]
    return show_name(group.fqn), [param.name for param in group.params]


def ranks_text(ranks: Iterable[int], limit: int = SHOWN) -> str:
    """``rank 3``, ``ranks 0-6, 8-31``: at most ``limit`` parts, then how many more."""
    ordered = sorted(set(ranks))
    parts: list[list[int]] = []
    for rank in ordered:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    shown = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts[:limit])
    left = sum(high - low + 1 for low, high in parts[limit:])
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {shown}" + (f" and {left} more" if left else "")


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that stand at one place: ``text`` says where, ``ranks`` who."""

    ranks: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        who = ranks_text(self.ranks)
        many = f"{count(len(self.ranks), 'rank')} ({who[6:]})"
        return f"{who if len(self.ranks) == 1 else many} {self.text}"


def grouped(standings: Sequence[Standing]) -> list[Group]:
    """The ranks by place: those that are inside a collective first, the most first."""
    by_place: dict[tuple[str, bool, int, str, str], list[Standing]] = {}
    for standing in standings:
        # The program's own line tells places apart outside collectives; inside one the module does.
        code = "" if standing.inside else standing.code
        by_place.setdefault((standing.end, standing.inside, standing.step, standing.place, code), []).append(standing)
    groups = []
    for (end, inside, step, place, code), members in by_place.items():
        known = [member.seconds for member in members if member.seconds >= 0]
        since = f" since {seconds(min(known), max(known))}" if known and (not end or max(known) >= 1) else ""
        where = f"{place}, step {step}" + (f", at {code}" if code else "")
        text = f"{end}; last {where}{since}" if end else f"{where}{since}"
        groups.append((bool(end), not inside, -len(members), Group(tuple(member.rank for member in members), text)))
    return [group for *_, group in sorted(groups, key=lambda item: (*item[:3], item[3].ranks))]


def seconds(low: float, high: float) -> str:
    """``94 s``, ``90 to 94 s``, ``0.4 s``."""
    a, b = (f"{value:.0f}" if value >= 10 else f"{value:.1f}" for value in (low, high))
    return f"{a} s" if a == b else f"{a} to {b} s"
