"""Violations, put together by what they have in common: rule, name pattern, severity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fsdptrace.checks.base import SEVERITIES
from fsdptrace.checks.text import pattern

KEPT_NAMES = 200  # names and steps of one finding that are listed; all are counted


@dataclass(frozen=True, slots=True)
class Seen:
    """One violation, where it was seen: ``seq`` is the event that broke the rule, ``evidence`` what proves it, both in that
    rank's ``file``."""

    rank: int
    step: int
    seq: int
    fqn: str
    message: str
    hint: str
    evidence: tuple[int, ...]
    bytes: int
    file: str


@dataclass(slots=True)
class Finding:
    """All violations of one rule, name pattern and severity.

    Attributes:
        rule, severity, pattern: ``layers.*.moe.experts`` stands for all layers; empty for the root or the whole model.
        model, root: number and class name of the model.
        times: how often it was seen, over ranks and steps.
        units: names of the modules concerned, ranks and steps where it was seen (the first 200 of each).
        unit_count, step_count: how many there are.
        bytes: largest of one violation.
        step_bytes: largest sum over the violations of one step on one rank.
        first: the earliest.
        source: ``online`` (found while it ran), ``file`` (found by ``check`` in the files only) or ``both``.
    """

    rule: str
    severity: str
    pattern: str
    model: int
    root: str
    times: int
    units: list[str]
    unit_count: int
    ranks: list[int]
    steps: list[int]
    step_count: int
    bytes: int
    step_bytes: int
    first: Seen
    source: str = "online"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(slots=True)
class _Group:
    model: int
    root: str
    times: int = 0
    units: dict[str, None] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    steps: set[int] = field(default_factory=set)
    bytes: int = 0
    per_step: dict[tuple[int, int], int] = field(default_factory=dict)
    first: Seen | None = None


class Collector:
    """Adds violations up; take :meth:`findings` when done."""

    def __init__(self, source: str = "online") -> None:
        self._source = source
        self._groups: dict[tuple[str, str, str, int, str], _Group] = {}

    def add(self, violations: Iterable[Mapping[str, Any]], rank: int, roots: Mapping[int, str], file: str) -> None:
        """Violations of one process, as read by :mod:`fsdptrace.analysis.lines`; ``roots`` are its models' classes."""
        for data in violations:
            model = data["model"]
            root = roots.get(model, "")
            key = (data["rule"], pattern(data["fqn"]), data["severity"], model, root)
            group = self._groups.get(key)
            if group is None:
                group = self._groups[key] = _Group(model, root)
            step, size = data["step"], data["bytes"]
            at = data["evidence"][-1] if data["evidence"] else data["seq"]
            group.times += 1
            group.units[data["fqn"]] = None
            group.ranks.add(rank)
            group.steps.add(step)
            group.bytes = max(group.bytes, size)
            group.per_step[rank, step] = group.per_step.get((rank, step), 0) + size
            if group.first is None or (step, rank, at) < (group.first.step, group.first.rank, group.first.seq):
                group.first = Seen(
                    rank, step, at, data["fqn"], data["message"], data["hint"], tuple(data["evidence"]), size, file
                )  # fmt: skip

    def merge(self, other: Collector) -> None:
        """Adds what another one, of other processes, has."""
        for key, theirs in other._groups.items():
            group = self._groups.get(key)
            if group is None:
                self._groups[key] = theirs
                continue
            group.times += theirs.times
            group.units.update(theirs.units)
            group.ranks |= theirs.ranks
            group.steps |= theirs.steps
            group.bytes = max(group.bytes, theirs.bytes)
            for at, size in theirs.per_step.items():
                group.per_step[at] = group.per_step.get(at, 0) + size
            if group.first is None or (theirs.first is not None and _at(theirs.first) < _at(group.first)):
                group.first = theirs.first

    def findings(self) -> list[Finding]:
        """Worst severity first, then in the order of appearance."""
        made = []
        for (rule, name, severity, model, root), group in self._groups.items():
            assert group.first is not None
            steps = sorted(group.steps)
            made.append(
                Finding(
                    rule, severity, name, model, root, group.times, list(group.units)[:KEPT_NAMES], len(group.units),
                    sorted(group.ranks)[:KEPT_NAMES], steps[:KEPT_NAMES], len(steps), group.bytes,
                    max(group.per_step.values()), group.first, self._source,
                )
            )  # fmt: skip
        return sorted(made, key=_order)


def _at(seen: Seen) -> tuple[int, int, int]:
    return seen.step, seen.rank, seen.seq


def _order(finding: Finding) -> tuple[int, int, int, int]:
    severity = SEVERITIES.index(finding.severity) if finding.severity in SEVERITIES else len(SEVERITIES)
    return severity, finding.first.step, finding.first.seq, finding.first.rank
