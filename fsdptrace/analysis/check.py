"""The rules again, over files: the verdicts that the run gave, or those of other rules.

A step can be judged when its events and those of every step before it are there; rules remember what is open and which
switches are set. For other steps the answer is "incomplete", and what was found while they ran is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fsdptrace.adapters.compat import release_of
from fsdptrace.analysis import notes, workers
from fsdptrace.analysis.common_order import Issued, compare
from fsdptrace.analysis.findings import Collector, Finding
from fsdptrace.analysis.lines import read_process
from fsdptrace.analysis.process import ProcessTrace, StepPart
from fsdptrace.analysis.records import PARSE_ERRORS, parse
from fsdptrace.analysis.sources import Problem, Source, choose, find_runs
from fsdptrace.checks import registry
from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.engine import Engine
from fsdptrace.checks.text import count
from fsdptrace.model_map import ModelMap

SCHEMA = "fsdptrace-check/1"


@dataclass(slots=True)
class CheckResult:
    """What the rules say over the files of one run.

    Attributes:
        run, folder: which run; ``others`` are further ones in the same folder.
        rules: names of the rules that were run.
        findings: all of them; ``source`` says whether a rule found it in the files or it repeats what was found online.
        judged, incomplete: steps (of ranks and models) that could and could not be judged.
        new, gone: how many violations were found only now, and only while recording, in steps that could be judged.
        missing: why "nothing found" would not be the whole truth: ranks without a file, processes that died, lines that are
            damaged, rules of which nothing is known for some steps. Empty when the verdict is whole.
        known: findings of ``findings`` that are in the baseline, as ``(rule, pattern, root)``.
        compared: whether any of the rules ran while recording.
        notes, problems: as in a report.
    """

    run: str
    folder: Path
    rules: tuple[str, ...]
    findings: list[Finding]
    judged: int
    incomplete: int
    new: int
    gone: int
    notes: list[str]
    problems: list[Problem]
    others: list[str] = field(default_factory=list)
    ranks: int = 0
    compared: bool = True
    missing: list[str] = field(default_factory=list)
    known: set[Known] = field(default_factory=set)

    @property
    def errors(self) -> list[Finding]:
        """Findings of severity ``error`` that are not in the baseline."""
        return [finding for finding in self.findings if finding.severity == "error" and known_as(finding) not in self.known]

    @property
    def failed(self) -> bool:
        """Whether a violation of severity ``error`` was found that is not in the baseline."""
        return bool(self.errors)

    @property
    def verdict(self) -> str:
        """``failed``, ``incomplete`` (nothing that fails it was found, but not everything could be judged) or ``passed``."""
        return "failed" if self.failed else "incomplete" if self.missing else "passed"

    def to_json(self) -> dict[str, Any]:
        """Plain data, as ``check --json`` prints it."""
        return {
            "schema": SCHEMA, "run": self.run, "folder": str(self.folder), "rules": list(self.rules),
            "verdict": self.verdict, "failed": self.failed, "missing": self.missing,
            "findings": [{**finding.to_json(), "known": known_as(finding) in self.known} for finding in self.findings],
            "judged_steps": self.judged,
            "incomplete_steps": self.incomplete, "found_only_now": self.new, "found_only_online": self.gone,
            "notes": self.notes, "problems": [str(problem) for problem in self.problems], "other_runs": self.others,
            "ranks": self.ranks,
        }  # fmt: skip


NO_BASELINE: tuple[type[Exception], ...] = (*PARSE_ERRORS, KeyError, TypeError)
Known = tuple[str, str, str, str]


def known_as(finding: Finding) -> Known:
    """What a finding is known by in a baseline: rule, severity, name pattern, the model's class."""
    return finding.rule, finding.severity, finding.pattern, finding.root


def read_baseline(path: str | Path) -> set[Known]:
    """The findings of a baseline: what ``fsdptrace check DIR --json`` printed.

    Raises:
        ValueError: it is something else; the message says how to make one.
        OSError: it cannot be read.
    """
    try:
        data = parse(Path(path).read_bytes())
        if data["schema"] != SCHEMA:
            raise KeyError
        found = [tuple(str(item[key]) for key in ("rule", "severity", "pattern", "root")) for item in data["findings"]]
    except NO_BASELINE:
        raise ValueError(f"{path}: no baseline; make one with `fsdptrace check DIR --json > {path}`") from None
    return {(rule, severity, name, root) for rule, severity, name, root in found}


def check(
    folder: str | Path,
    run: str | None = None,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] = (),
    baseline: str | Path | None = None,
    jobs: int | None = 1,
    progress: workers.Progress | None = None,
) -> CheckResult:
    """Runs rules over a run's files.

    Args:
        folder: as for :func:`fsdptrace.analysis.load`, and so are ``run``, ``jobs`` and ``progress``.
        select: rules to run, by name (``"all"`` is every one); those that ran while recording when not given.
        ignore: rules to leave out.
        baseline: what ``check --json`` printed once: its findings are known and fail no more.

    Raises:
        NotATrace: there is nothing to read.
        ValueError: a name is no rule's, or ``baseline`` is none.
        OSError: ``baseline`` cannot be read.
    """
    known = read_baseline(baseline) if baseline is not None else set()
    registry.check_names(ignore, "--ignore")
    if select is not None:
        registry.check_names([name for name in select if name != "all"], "--select")
    runs, problems = find_runs(folder)
    chosen = choose(runs, run)
    judges = workers.each(chosen.sources, partial(_judge, select=select, ignore=tuple(ignore)), jobs, progress)
    collectors = Collectors()
    for judge in judges:
        for collector, theirs in zip(collectors, judge.found, strict=True):
            collector.merge(theirs)
    processes = [judge.trace for judge in judges]
    names = {name for judge in judges for name in judge.names}
    if "rank-order" in names:
        _parted(judges, collectors.file)
    findings = [finding for collector in collectors for finding in collector.findings()]
    return CheckResult(
        chosen.label, chosen.sources[0].path.parent, tuple(name for name in registry.RULES if name in names),
        sorted(findings, key=lambda f: ("error", "warning", "info").index(f.severity) if f.severity in _KNOWN else 3),
        sum(judge.judged for judge in judges), sum(judge.incomplete for judge in judges),
        sum(judge.new for judge in judges), sum(judge.gone for judge in judges),
        [*_notes(judges), *notes.about(processes)],
        [*problems, *(problem for judge in judges for problem in judge.problems)],
        [other.label for other in runs if other is not chosen], len(processes),
        any(judge.names & judge.online_names for judge in judges), _missing(judges, alone=Path(folder).is_file()), known,
    )  # fmt: skip


class Collectors:
    """Violations by where they were found: in the files only, in both, or while recording only."""

    def __init__(self) -> None:
        self.file, self.both, self.online = Collector("file"), Collector("both"), Collector("online")

    def __iter__(self) -> Iterator[Collector]:
        return iter((self.file, self.both, self.online))


_KNOWN = ("error", "warning", "info")
ACROSS = frozenset(("rank-order", "rank-stall"))
"""Rules that compare ranks: no step of one rank is judged by them."""


def _parted(judges: Sequence[_Judge], into: Collector) -> None:
    """Ranks that issued different collectives, where nobody said so while recording."""
    processes = [judge.trace for judge in judges]
    said = {cause for judge in judges for cause in judge.parted}
    for difference in compare(processes, {index: judge.issued for index, judge in enumerate(judges)}):
        if difference.place[0] in said:
            continue
        violation = difference.violation()
        rank = next(side.ranks[0] for side in difference.sides if side.item.fqn == violation.fqn)
        trace = next(process for process in processes if process.rank == rank)
        data = {**violation.to_json(), "seq": violation.seq, "evidence": list(violation.evidence)}
        roots = {number: model.root for number, model in trace.models.items()}
        into.add([data], rank, roots, str(trace.source.path))


def _rules_for(source: Source, select: Sequence[str] | None, ignore: Sequence[str]) -> tuple[type[Rule], ...]:
    if select is None:
        rules = tuple(registry.RULES[name] for name in notes.rules_of(source.header.options))
    else:
        rules = registry.select(list(select), source.header.options.get("budget_bytes") is not None)
    return tuple(rule for rule in rules if rule.name not in ignore)


def _notes(judges: Sequence[_Judge]) -> list[str]:
    incomplete = sum(judge.incomplete for judge in judges)
    if not incomplete:
        return []
    return [
        f"{count(incomplete, 'step')} (summed over ranks) cannot be judged again, since not all events of them and of the "
        "steps before them are in the files; what was found while they ran is repeated"
    ]


def _missing(judges: Sequence[_Judge], alone: bool) -> list[str]:
    """What keeps the verdict from being whole; ``alone``: one file was asked for, so that other ranks are not missing."""
    processes = [judge.trace for judge in judges]
    lines = [] if alone else notes.missing_ranks(processes)
    unended = [process.rank for process in processes if process.end is None]
    if unended:
        lines.append(f"{notes.ranks_text(unended)}: no end line, so that what came last may be missing")
    damaged = [process.rank for process in processes if process.damaged]
    if damaged:
        lines.append(f"{notes.ranks_text(damaged)}: lines that cannot be read")
    lost = sum(process.lost_violations for process in processes)
    if lost:
        lines.append(f"{count(lost, 'violation')} were found of which no line was kept")
    silent = sorted({name for judge in judges if judge.incomplete for name in judge.names - judge.online_names})
    if silent:
        steps = sum(judge.incomplete for judge in judges if judge.names - judge.online_names)
        lines.append(
            f"{', '.join(silent)} did not run while recording, so nothing is known of the {count(steps, 'step')} that cannot "
            'be judged from the files (record with detail="full")'
        )
    broken = sum(judge.broken for judge in judges)
    if broken:
        lines.append(f"{count(broken, 'step')} on which a rule failed")
    if not any(process.steps or process.running_step for process in processes):
        lines.append("there is no step in the files")
    return lines


def _judge(source: Source, advance: workers.Advance, select: Sequence[str] | None, ignore: Sequence[str]) -> _Judge:
    judge = _Judge(source, _rules_for(source, select, ignore))
    judge.run(advance)
    return judge


class _Judge:
    """Runs the rules over the files of one process."""

    def __init__(self, source: Source, rules: tuple[type[Rule], ...]) -> None:
        self._source = source
        self._rules = rules
        self.names = {rule.name for rule in rules}
        self.issued = Issued()
        self.online_names = set(notes.rules_of(source.header.options))
        self.judged = self.incomplete = self.new = self.gone = self.broken = 0
        self.problems: list[Problem] = []
        self.trace: ProcessTrace
        self.found = Collectors()
        self._engines: dict[int, Engine | None] = {}
        self._maps: dict[int, ModelMap] = {}
        self._found: list[dict[str, Any]] = []
        self._judged: set[tuple[int, int]] = set()
        self._step = 0
        self.parted: set[str] = set()

    def run(self, advance: workers.Advance) -> None:
        """Reads the files; what was found is in ``found`` then, and little else is kept."""
        self.trace = trace = read_process(self._source, self, advance)
        self.problems += trace.problems
        roots = {number: model.root for number, model in trace.models.items()}
        path = str(self._source.path)
        self.issued.inside(trace)
        # Rules that this version does not have (an older or newer one's, somebody's own) cannot be run again.
        wanted = [data for data in trace.violations if data["rule"] in self.names or data["rule"] not in registry.RULES]
        repeated: list[dict[str, Any]] = []
        judged: list[dict[str, Any]] = []
        for data in wanted:
            again = (data["model"], data["step"]) in self._judged and data["rule"] in self.names - ACROSS
            if data["rule"] == "rank-order":
                self.parted.add(data["cause"])
            (judged if again else repeated).append(data)
        self.found.online.add(repeated, trace.rank, roots, path)
        now, then = {_key(data) for data in self._found}, {_key(data) for data in judged}
        self.found.file.add([data for data in self._found if _key(data) not in then], trace.rank, roots, path)
        self.found.both.add([data for data in self._found if _key(data) in then], trace.rank, roots, path)
        self.new = sum(key not in then and key[0] in self.online_names for key in now)
        self.gone = len(then - now)
        self._engines, self._found, trace.violations = {}, [], []

    def __call__(self, part: StepPart) -> None:
        """One step, from the reader."""
        number = part.map.model
        self.issued(part)
        engine = self._engine(part)
        if engine is None or not _judgeable(part, self._source):
            self._engines[number] = None
            self.incomplete += 1
            return
        self._step = part.step
        try:
            engine.feed_all(part.records)
        except Exception as error:  # a file can hold what no recorder writes
            self._engines[number] = None
            self.incomplete += 1
            self.broken += 1
            self.problems.append(
                Problem(self._source.path, f"step {part.step} cannot be judged: {type(error).__name__}: {error}")
            )
            return
        self.judged += 1
        self._judged.add((number, part.step))

    def _engine(self, part: StepPart) -> Engine | None:
        """The model's engine; None once a step was missing."""
        number = part.map.model
        if number in self._engines and (self._maps[number] == part.map or self._engines[number] is None):
            return self._engines[number] if part.contiguous else None
        if not part.contiguous or number in self._engines:  # a new map in the middle: what is open is not known
            self._maps[number] = part.map
            return None
        header = self._source.header
        budget, given = header.options.get("budget_bytes"), header.options.get("rule_options")
        options = registry.options_of(given if isinstance(given, dict) else None, budget if isinstance(budget, int) else None)
        engine = Engine(
            part.map, self._rules, lambda violation: self._report(violation, number),
            release_of(header.versions.get("torch", "")), options, part.texts,
        )  # fmt: skip
        self._engines[number] = engine
        self._maps[number] = part.map
        return engine

    def _report(self, violation: Violation, model: int) -> None:
        data = replace(violation, model=model, step=self._step).to_json()
        data["seq"] = violation.seq
        data["evidence"] = list(violation.evidence)
        self._found.append(data)


def _judgeable(part: StepPart, source: Source) -> bool:
    """Whether every event of the step is there; of one that did not end, as far as it got."""
    if part.full:
        return True
    # An unfinished step lies in the file itself from its first event on, unless its detail was not wanted.
    return part.intact and source.tail is None and source.header.options.get("detail") != "summary"


def _key(data: Mapping[str, Any]) -> tuple[Any, ...]:
    seen_at = data["evidence"][-1] if data["evidence"] else None
    return (data["rule"], data["model"], data.get("group"), data["cause"], data["step"], seen_at)
