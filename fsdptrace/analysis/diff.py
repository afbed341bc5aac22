"""What differs between two runs, times apart: the model, findings, counts, bytes, memory, and where sequences part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fsdptrace.analysis import workers
from fsdptrace.analysis.findings import Collector, Finding
from fsdptrace.analysis.lines import read_process
from fsdptrace.analysis.prints import COUNTED, WHOLE_MODEL, Counts, Prints, StepPrint
from fsdptrace.analysis.process import ProcessTrace
from fsdptrace.analysis.sources import Problem, Source, choose, find_runs
from fsdptrace.checks.text import count
from fsdptrace.model_map import GroupInfo

SCHEMA = "fsdptrace-diff/1"
_TOLD = 60  # units whose first difference is looked up in the files
_GROUP_FIELDS = (
    "bytes", "dtype", "reduce_dtype", "world", "post_forward_world", "replicate_world", "mesh", "reshard_after_forward",
    "tensors", "trainable", "offload",
)  # fmt: skip

Where = tuple[str, int, int]
"""Role, rank and model."""


@dataclass(slots=True)
class Side:
    """One of the two runs."""

    label: str
    folder: Path
    torch: list[str]
    ranks: int
    steps: int
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Changed:
    """Something of a unit (or of a whole model, for memory) that has another value: ``a`` and ``b``."""

    unit: str
    what: str
    a: Any
    b: Any
    model: int = 0


@dataclass(slots=True)
class Parting:
    """Where the events of a unit begin to differ.

    Attributes:
        unit: its name; None for the events that belong to no unit.
        role, rank, model, step: the first step in which they do, on the lowest rank.
        steps: in how many steps, summed over ranks.
        place: which event of the unit in that step, from 1; 0 where it was not looked up.
        a, b: that event on either side, empty where there is none; ``a_seq`` and ``b_seq`` its number in the file.
        before: the event before it, which both have.
    """

    unit: str | None
    role: str
    rank: int
    model: int
    step: int
    steps: int
    place: int = 0
    a: str = ""
    b: str = ""
    a_seq: int = 0
    b_seq: int = 0
    before: str = ""


@dataclass(slots=True)
class Diff:
    """What differs between runs ``a`` and ``b``.

    Attributes:
        steps: steps that were compared event by event, summed over ranks; ``line_steps`` those of which both have the line.
        model: units that only one has, and properties of units.
        findings_a, findings_b: findings that only one has.
        memory: most bytes gathered, and held past the backward, over the steps that both have.
        counts: per unit and :class:`~fsdptrace.summary.GroupSummary` field, sums over the steps compared.
        partings: per unit, earliest first.
        notes: what could not be compared.
    """

    a: Side
    b: Side
    steps: int = 0
    line_steps: int = 0
    model: list[Changed] = field(default_factory=list)
    findings_a: list[Finding] = field(default_factory=list)
    findings_b: list[Finding] = field(default_factory=list)
    memory: list[Changed] = field(default_factory=list)
    counts: list[Changed] = field(default_factory=list)
    partings: list[Parting] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether nothing differs in what could be compared."""
        return not (self.model or self.findings_a or self.findings_b or self.memory or self.counts or self.partings)

    def to_json(self) -> dict[str, Any]:
        """Plain data, as ``diff --json`` prints it."""
        data = asdict(self)
        for name in ("a", "b"):
            side = getattr(self, name)
            data[name] |= {"folder": str(side.folder), "problems": [str(problem) for problem in side.problems]}
        return {"schema": SCHEMA, "same": self.same, **data}


@dataclass(slots=True)
class _Read:
    process: ProcessTrace
    prints: Prints
    found: Collector


def _read(source: Source, advance: workers.Advance) -> _Read:
    prints, found = Prints(), Collector()
    process = read_process(source, prints, advance)
    roots = {number: model.root for number, model in process.models.items()}
    found.add(process.violations, process.rank, roots, str(source.path))
    process.violations = []
    return _Read(process, prints.finish(), found)


def _again(source: Source, advance: workers.Advance, wanted: Mapping[str, frozenset[tuple[int, int, str]]]) -> Prints:
    prints = Prints(wanted[str(source.path)])
    read_process(source, prints, advance)
    return prints.finish()


def diff(
    a: str | Path,
    b: str | Path,
    run_a: str | None = None,
    run_b: str | None = None,
    jobs: int | None = 1,
    progress: workers.Progress | None = None,
) -> Diff:
    """Compares the runs in ``a`` and ``b``: rank by rank, step by step, unit by unit; the times never.

    Args:
        a, b: as for :func:`fsdptrace.analysis.load`, and so are ``run_a``, ``run_b``, ``jobs`` and ``progress``.

    Raises:
        NotATrace: there is nothing to read in one of them.
    """
    chosen, problems = [], []
    for folder, run in ((a, run_a), (b, run_b)):
        runs, found = find_runs(folder)
        chosen.append(choose(runs, run))
        problems.append(found)
    sources = [source for run in chosen for source in run.sources]
    read = workers.each(sources, _read, jobs, progress)
    middle = len(chosen[0].sources)
    halves = (read[:middle], read[middle:])
    first, second = [
        Side(
            run.label, run.sources[0].path.parent,
            sorted({item.process.header.versions.get("torch", "?") for item in half}), len(half),
            max((len(item.process.steps.numbers) for item in half), default=0),
            [*found, *(problem for item in half for problem in item.process.problems)],
        )
        for run, half, found in zip(chosen, halves, problems, strict=True)
    ]  # fmt: skip
    out = Diff(first, second)
    _compare(out, *halves)
    _look_up(out, *halves, jobs=jobs)
    return out


def _by_place(read: Iterable[_Read]) -> dict[tuple[str, int], _Read]:
    return {(item.process.header.role, item.process.rank): item for item in read}


def _compare(out: Diff, a: Sequence[_Read], b: Sequence[_Read]) -> None:
    left, right = _by_place(a), _by_place(b)
    common = sorted(left.keys() & right.keys())
    for name, only in (("A", left.keys() - right.keys()), ("B", right.keys() - left.keys())):
        if only:
            out.notes.append(f"{count(len(only), 'rank')} only in {name}: not compared")
    if not common:
        out.notes.append("no rank is in both: nothing was compared event by event")
    _models(out, a, b)
    _findings(out, a, b)
    pairs = [(place, left[place], right[place]) for place in common]
    _memory(out, pairs)
    _steps(out, pairs)
    if common and not out.steps:
        out.notes.append('no step with all its events is in both (record with detail="full"): sequences were not compared')


def _models(out: Diff, a: Sequence[_Read], b: Sequence[_Read]) -> None:
    left, right = _groups(a), _groups(b)
    for key in [*left, *(key for key in right if key not in left)]:
        model, unit = key
        one, other = left.get(key), right.get(key)
        if one is None or other is None:
            out.model.append(Changed(unit, "unit", one is not None, other is not None, model))
            continue
        for name in _GROUP_FIELDS:
            values = getattr(one, name), getattr(other, name)
            if values[0] != values[1]:
                out.model.append(Changed(unit, name, values[0], values[1], model))


def _groups(read: Sequence[_Read]) -> dict[tuple[int, str], GroupInfo]:
    groups: dict[tuple[int, str], GroupInfo] = {}
    for item in read:
        for number, model in item.process.models.items():
            for group in model.groups:
                groups.setdefault((number, group.fqn), group)
    return groups


def _findings(out: Diff, a: Sequence[_Read], b: Sequence[_Read]) -> None:
    sides = []
    for read in (a, b):
        collector = Collector()
        for item in read:
            collector.merge(item.found)
        sides.append({(f.rule, f.severity, f.pattern, f.model): f for f in collector.findings()})
    out.findings_a = [finding for key, finding in sides[0].items() if key not in sides[1]]
    out.findings_b = [finding for key, finding in sides[1].items() if key not in sides[0]]


Pairs = Sequence[tuple[tuple[str, int], _Read, _Read]]


def _memory(out: Diff, pairs: Pairs) -> None:
    """The most of all steps of which both have the line."""
    names = ("unsharded_peak", "past_backward_peak")
    most: dict[tuple[int, str], list[int]] = {}
    for _, left, right in pairs:
        others = {(line.model, line.step): line for line in right.process.steps}
        for line in left.process.steps:
            other = others.get((line.model, line.step))
            if other is None:
                continue
            out.line_steps += 1
            for name in names:
                values = most.setdefault((line.model, name), [0, 0])
                values[0] = max(values[0], getattr(line, name))
                values[1] = max(values[1], getattr(other, name))
    out.memory = [Changed("", name, a, b, model) for (model, name), (a, b) in sorted(most.items()) if a != b]


def _steps(out: Diff, pairs: Pairs) -> None:
    sums: dict[tuple[int, str], tuple[list[int], list[int]]] = {}
    partings: dict[tuple[int, str], Parting] = {}
    for (role, rank), left, right in pairs:
        for model, step in sorted(left.prints.steps.keys() & right.prints.steps.keys()):
            one, other = left.prints.steps[model, step], right.prints.steps[model, step]
            out.steps += 1
            for unit in one.counts.keys() & other.counts.keys():
                into = sums.setdefault((model, unit), ([0] * len(COUNTED), [0] * len(COUNTED)))
                _add(into[0], one.counts[unit])
                _add(into[1], other.counts[unit])
            if one == other:
                continue
            for unit in _parted(one, other):
                known = partings.get((model, unit))
                if known is None:
                    name = None if unit == WHOLE_MODEL else unit
                    known = partings[model, unit] = Parting(name, role, rank, model, step, 0)
                if (step, role, rank) < (known.step, known.role, known.rank):
                    known.role, known.rank, known.step = role, rank, step
                known.steps += 1
    out.counts = [
        Changed(unit, name, mine, theirs, model)
        for (model, unit), (a, b) in sorted(sums.items())
        for name, mine, theirs in zip(COUNTED, a, b, strict=True)
        if mine != theirs
    ]
    out.partings = sorted(partings.values(), key=lambda item: (item.step, item.rank, item.model, item.unit or ""))


def _add(into: list[int], values: Counts) -> None:
    for i, value in enumerate(values):
        into[i] += value


def _parted(one: StepPrint, other: StepPrint) -> list[str]:
    """Units that both models have and whose sequences are not the same."""
    both = (one.counts.keys() & other.counts.keys()) | {WHOLE_MODEL}
    return [unit for unit in both if one.sequences.get(unit) != other.sequences.get(unit)]


def _look_up(out: Diff, a: Sequence[_Read], b: Sequence[_Read], jobs: int | None) -> None:
    """Reads the files of the ranks concerned once more, for the events themselves."""
    told = out.partings[:_TOLD]
    if not told:
        return
    sides = []
    for read in (a, b):
        by_place = _by_place(read)
        wanted: dict[str, set[tuple[int, int, str]]] = {}
        sources: dict[str, Source] = {}
        for item in told:
            source = by_place[item.role, item.rank].process.source
            sources[str(source.path)] = source
            unit = WHOLE_MODEL if item.unit is None else item.unit
            wanted.setdefault(str(source.path), set()).add((item.model, item.step, unit))
        frozen = {path: frozenset(items) for path, items in wanted.items()}
        prints = workers.each(list(sources.values()), partial(_again, wanted=frozen), jobs)
        sides.append({
            (source.header.role, source.header.rank): print_.told
            for source, print_ in zip(sources.values(), prints, strict=True)
        })  # fmt: skip
    for item in told:
        key = (item.model, item.step, WHOLE_MODEL if item.unit is None else item.unit)
        _place(item, *(side[item.role, item.rank].get(key, []) for side in sides))


def _place(item: Parting, a: Sequence[tuple[int, str]], b: Sequence[tuple[int, str]]) -> None:
    for place in range(max(len(a), len(b))):
        one, other = (side[place] if place < len(side) else (0, "") for side in (a, b))
        if one[1] != other[1]:
            item.place, (item.a_seq, item.a), (item.b_seq, item.b) = place + 1, one, other
            item.before = a[place - 1][1] if place else ""
            return
