"""The rules again, over files: the verdicts that the run gave, or those of other rules.

A step can be judged when its events and those of every step before it are there; rules remember what is open and which
switches are set. For other steps the answer is "incomplete", and what was found while they ran is repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdptrace.adapters.compat import release_of
from fsdptrace.analysis import notes
from fsdptrace.analysis.findings import Collector, Finding
from fsdptrace.analysis.process import ProcessTrace, StepPart, read_process
from fsdptrace.analysis.sources import Problem, Source, choose, find_runs
from fsdptrace.checks import registry
from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.engine import Engine
from fsdptrace.checks.text import count
from fsdptrace.model_map import ModelMap
from fsdptrace.summary import rows_of

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

    @property
    def failed(self) -> bool:
        """Whether a violation of severity ``error`` was found."""
        return any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Plain data, as ``check --json`` prints it."""
        return {
            "schema": SCHEMA, "run": self.run, "folder": str(self.folder), "rules": list(self.rules), "failed": self.failed,
            "findings": [finding.to_json() for finding in self.findings], "judged_steps": self.judged,
            "incomplete_steps": self.incomplete, "found_only_now": self.new, "found_only_online": self.gone,
            "notes": self.notes, "problems": [str(problem) for problem in self.problems], "other_runs": self.others,
            "ranks": self.ranks,
        }  # fmt: skip


def check(
    folder: str | Path, run: str | None = None, select: Sequence[str] | None = None, ignore: Sequence[str] = ()
) -> CheckResult:
    """Runs rules over a run's files.

    Args:
        folder: as for :func:`fsdptrace.analysis.load`, and so is ``run``.
        select: rules to run, by name (``"all"`` is every one); those that ran while recording when not given.
        ignore: rules to leave out.

    Raises:
        NotATrace: there is nothing to read.
        ValueError: a name is no rule's.
    """
    registry.check_names(ignore, "--ignore")
    if select is not None:
        registry.check_names([name for name in select if name != "all"], "--select")
    runs, problems = find_runs(folder)
    chosen = choose(runs, run)
    judges = [_Judge(source, _rules_for(source, select, ignore)) for source in chosen.sources]
    online, file = Collector("online"), Collector("file")
    for judge in judges:
        judge.run(online, file)
    processes = [judge.trace for judge in judges]
    names = {name for judge in judges for name in judge.names}
    findings = [*file.findings(), *online.findings()]
    return CheckResult(
        chosen.label, chosen.sources[0].path.parent, tuple(name for name in registry.RULES if name in names),
        sorted(findings, key=lambda f: ("error", "warning", "info").index(f.severity) if f.severity in _KNOWN else 3),
        sum(judge.judged for judge in judges), sum(judge.incomplete for judge in judges),
        sum(judge.new for judge in judges), sum(judge.gone for judge in judges),
        [*_notes(judges), *notes.about(processes)],
        [*problems, *(problem for judge in judges for problem in judge.problems)],
        [other.label for other in runs if other is not chosen], len(processes),
        any(judge.names & judge.online_names for judge in judges),
    )  # fmt: skip


_KNOWN = ("error", "warning", "info")


def _rules_for(source: Source, select: Sequence[str] | None, ignore: Sequence[str]) -> tuple[type[Rule], ...]:
    if select is None:
        rules = tuple(registry.RULES[name] for name in notes.rules_of(source.header.options))
    else:
        rules = registry.select(list(select), source.header.options.get("budget_bytes") is not None)
    return tuple(rule for rule in rules if rule.name not in ignore)


def _notes(judges: Sequence[_Judge]) -> list[str]:
    lines = []
    incomplete = sum(judge.incomplete for judge in judges)
    if incomplete:
        lines.append(
            f"incomplete: {count(incomplete, 'step')} (summed over ranks) cannot be judged, since not all events of them "
            "and of the steps before them are in the files; what was found while they ran is repeated"
        )
        silent = sorted({name for judge in judges if judge.incomplete for name in judge.names - judge.online_names})
        if silent:
            lines.append(f"incomplete: {', '.join(silent)} did not run while recording, so nothing is known of those steps")
    return lines


class _Judge:
    """Runs the rules over the files of one process."""

    def __init__(self, source: Source, rules: tuple[type[Rule], ...]) -> None:
        self._source = source
        self._rules = rules
        self.names = {rule.name for rule in rules}
        self.online_names = set(notes.rules_of(source.header.options))
        self.judged = self.incomplete = self.new = self.gone = 0
        self.problems: list[Problem] = []
        self.trace: ProcessTrace
        self._engines: dict[int, Engine | None] = {}
        self._maps: dict[int, ModelMap] = {}
        self._found: list[dict[str, Any]] = []
        self._judged: set[tuple[int, int]] = set()
        self._step = 0

    def run(self, online: Collector, file: Collector) -> None:
        """Reads the files; what was found goes to the collectors."""
        self.trace = trace = read_process(self._source, self)
        self.problems += trace.problems
        roots = {number: model.root for number, model in trace.models.items()}
        path = str(self._source.path)
        file.add(self._found, trace.rank, roots, path)
        # Rules that this version does not have (an older or newer one's, somebody's own) cannot be run again.
        wanted = [data for data in trace.violations if data["rule"] in self.names or data["rule"] not in registry.RULES]
        repeated: list[dict[str, Any]] = []
        judged: list[dict[str, Any]] = []
        for data in wanted:
            again = (data["model"], data["step"]) in self._judged and data["rule"] in self.names
            (judged if again else repeated).append(data)
        online.add(repeated, trace.rank, roots, path)
        now, then = {_key(data) for data in self._found}, {_key(data) for data in judged}
        self.new = sum(key not in then and key[0] in self.online_names for key in now)
        self.gone = len(then - now)

    def __call__(self, part: StepPart) -> None:
        """One step, from the reader."""
        number = part.map.model
        engine = self._engine(part)
        if engine is None or not _judgeable(part, self._source):
            self._engines[number] = None
            self.incomplete += 1
            return
        self._step = part.step
        try:
            for record in rows_of(part.records):
                engine.feed(record)
        except Exception as error:  # a file can hold what no recorder writes
            self._engines[number] = None
            self.incomplete += 1
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
        budget = header.options.get("budget_bytes")
        options: Mapping[str, Mapping[str, Any]] = (
            {"unsharded-budget": {"budget_bytes": budget}} if isinstance(budget, int) else {}
        )
        engine = Engine(
            part.map, self._rules, lambda violation: self._report(violation, number),
            release_of(header.versions.get("torch", "")), options,
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
