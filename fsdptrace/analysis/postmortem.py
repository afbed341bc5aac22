"""Where each rank of a run stood when its file ended, who left the common order first, and what had been found by then."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from fsdptrace import events as ev
from fsdptrace.analysis import notes, workers
from fsdptrace.analysis.common_order import Difference, Issued, compare
from fsdptrace.analysis.findings import Collector, Finding
from fsdptrace.analysis.lines import read_process
from fsdptrace.analysis.process import ProcessTrace, StepPart
from fsdptrace.analysis.sources import Problem, RunSources, Source, choose, find_runs
from fsdptrace.checks.base import Violation
from fsdptrace.places import Group, Standing, grouped, place_of

SCHEMA: Final = "fsdptrace-postmortem/1"


@dataclass(slots=True)
class Postmortem:
    """What is left of a run.

    Attributes:
        run, folder, world: which run; ranks of the job.
        ranks: where each rank stood; ``groups`` the same by place.
        missing: ranks of which there is no file.
        parted: who left the common order first, per process group and model, earliest step first.
        findings: what had been found while it ran.
        holding: bytes of gathered parameters at the end: ``(bytes, rank, units that held most)``, most first.
        running: ranks whose files grew in the last seconds: the run may not be over.
        notes, problems: as in a report; ``others`` further runs in the folder.
    """

    run: str
    folder: Path
    world: int
    ranks: list[Standing]
    missing: list[int]
    parted: list[Violation]
    differences: list[Difference]
    findings: list[Finding]
    holding: list[tuple[int, int, list[tuple[str, int]]]]
    running: list[int]
    notes: list[str]
    problems: list[Problem]
    others: list[str] = field(default_factory=list)

    @property
    def groups(self) -> list[Group]:
        """The ranks by place."""
        return grouped(self.ranks)

    def to_json(self) -> dict[str, Any]:
        """Plain data, as ``postmortem --json`` prints it."""
        return {
            "schema": SCHEMA, "run": self.run, "folder": str(self.folder), "world_size": self.world,
            "groups": [{"ranks": list(group.ranks), "text": group.text} for group in self.groups],
            "ranks": [standing.to_json() for standing in self.ranks], "missing": self.missing, "running": self.running,
            "parted": [
                {
                    **violation.to_json(), "process_group": difference.place[0],
                    "sides": [side.to_json() for side in difference.sides],
                }
                for violation, difference in zip(self.parted, self.differences, strict=True)
            ],
            "findings": [finding.to_json() for finding in self.findings],
            "holding": [
                {"bytes": size, "rank": rank, "units": [{"name": name, "bytes": own} for name, own in units]}
                for size, rank, units in self.holding
            ],
            "notes": self.notes, "problems": [str(problem) for problem in self.problems], "other_runs": self.others,
        }  # fmt: skip


@dataclass(slots=True)
class _Ending:
    """What one process held and did last. A sink for the reader.

    Attributes:
        open: bytes of the groups that are gathered, by model and group; ``unnamed`` bytes by model that a step line speaks of
            where the events of the step are not there.
        newest: the newest event, as a heartbeat has it.
    """

    open: dict[int, dict[int, int]] = field(default_factory=dict)
    unnamed: dict[int, int] = field(default_factory=dict)
    newest: dict[str, Any] = field(default_factory=dict)
    _t: int = 0

    def __call__(self, part: StepPart) -> None:
        """One step, from the reader."""
        model = part.map.model
        held = self.open.setdefault(model, {})
        if part.line is not None and not part.full:
            held.clear()
            self.unnamed[model] = part.line.unsharded_bytes
        else:
            if part.line is not None:
                self.unnamed[model] = 0
            for kind, _, _, _, group, _, _, a, b, _, _, e in zip(*[iter(part.records)] * ev.WIDTH, strict=True):
                if kind == ev.UNSHARD and e % 4 == 0:
                    held[group] = a
                elif kind in (ev.RESHARD, ev.DISCARD):
                    held.pop(group, None)
                elif kind == ev.STATE and (a == 3 or b):
                    held[group] = e
        if part.records and (last := part.records[-ev.WIDTH :])[ev.T1] >= self._t:
            self._t = last[ev.T1]
            self.newest = {"kind": ev.KINDS[last[ev.KIND]], "seq": last[ev.SEQ], "model": model}
            if last[ev.GROUP] >= 0:
                self.newest["group"] = last[ev.GROUP]

    def held(self, process: ProcessTrace) -> tuple[int, list[tuple[str, int]]]:
        """Bytes that were gathered at the end, and by whom as far as names are known, most first."""
        said = process.stands.get("held")
        if process.end is None and isinstance(said, list) and process.stands.get("last") == process.last_seq:
            entries = [entry for entry in said if isinstance(entry, dict)]
            named = [
                (model.groups[number].fqn, model.groups[number].bytes)
                for entry in entries
                if (model := process.models.get(entry.get("model", 0))) is not None
                for number in entry.get("groups", ())
                if isinstance(number, int) and 0 <= number < len(model.groups)
            ]
            return sum(int(entry.get("bytes", 0)) for entry in entries), sorted(named, key=lambda pair: -pair[1])
        named = [
            (process.models[model].groups[group].fqn, size) for model, own in self.open.items() for group, size in own.items()
        ]
        total = sum(size for _, size in named) + sum(self.unnamed.values())
        return total, sorted(named, key=lambda pair: -pair[1])


@dataclass(slots=True)
class _Read:
    process: ProcessTrace
    ending: _Ending
    issued: Issued
    found: Collector


def _read(source: Source, advance: workers.Advance) -> _Read:
    ending, issued, found = _Ending(), Issued(), Collector()

    def sink(part: StepPart) -> None:
        ending(part)
        issued(part)

    process = read_process(source, sink, advance)
    if process.apart:
        ending = _Ending()
    issued.inside(process)
    roots = {number: model.root for number, model in process.models.items()}
    found.add(process.violations, process.rank, roots, str(source.path))
    process.violations.clear()
    return _Read(process, ending, issued, found)


def postmortem(
    folder: str | Path, run: str | None = None, jobs: int | None = 1, progress: workers.Progress | None = None
) -> Postmortem:
    """Reads what a run left; ``folder`` and ``run`` as for :func:`fsdptrace.analysis.load`.

    Raises:
        NotATrace: there is nothing to read, or no run of that name.
    """
    runs, problems = find_runs(folder)
    chosen = choose(runs, run)
    return of_run(chosen, problems, [other.label for other in runs if other is not chosen], jobs, progress)


def of_run(
    sources: RunSources,
    problems: Sequence[Problem] = (),
    others: Sequence[str] = (),
    jobs: int | None = 1,
    progress: workers.Progress | None = None,
) -> Postmortem:
    """The same of a run that has been chosen."""
    done = workers.each(sources.sources, partial(_read), jobs, progress)
    processes = [item.process for item in done]
    collector = Collector()
    for item in done:
        collector.merge(item.found)
    newest = max((_unix(process, process.last_t) for process in processes), default=0)
    running = [process.rank for process in processes if process.end is None and process.signal is None and notes.fresh(process)]
    ranks = [_standing(item, time.time_ns() if running else newest, item.process.rank in running) for item in done]
    differences = compare(processes, {i: item.issued for i, item in enumerate(done)})
    world = max(process.header.world_size for process in processes)
    return Postmortem(
        sources.label, sources.sources[0].path.parent, world, ranks,
        sorted(set(range(world)) - {process.rank for process in processes}),
        [difference.violation() for difference in differences], differences, collector.findings(), _holding(done),
        sorted(running), notes.files(processes), [*problems, *(problem for p in processes for problem in p.problems)],
        list(others),
    )  # fmt: skip


def _unix(process: ProcessTrace, t: int) -> int:
    """A time of a process's own clock as Unix ns."""
    return t - process.header.perf_counter_ns + process.header.unix_ns if t else 0


def _standing(item: _Read, now: int, running: bool) -> Standing:
    process = item.process
    stands = process.stands
    collective = process.entered
    if collective is None and process.failed is not None and process.failed.get("about") in ("all_gather", "reduction"):
        kind = "unshard" if process.failed["about"] == "all_gather" else "post_backward"
        collective = {"kind": kind, "model": process.failed.get("model", 0), "group": process.failed.get("group")}
    place, inside = place_of(collective, _at(item), process.models)
    stack = stands.get("stack")
    code = str(stack[-1]) if isinstance(stack, list) and stack and stands.get("last") == process.last_seq else ""
    moved = stands.get("moved") if stands.get("last") == process.last_seq else None
    since = moved if isinstance(moved, int) else process.last_event
    model = (collective or item.ending.newest).get("model", 0)
    return Standing(
        process.rank, max(process.last_step(model), 0), place, inside,
        max(0.0, (now - _unix(process, since)) / 1e9) if since else -1.0, _end(item, running), code,
        item.ending.held(process)[0],
    )  # fmt: skip


def _at(item: _Read) -> Any:
    """The newest event that is known: of the files, or of what the process last said of itself."""
    said, read = item.process.stands.get("at"), item.ending.newest
    if isinstance(said, dict) and isinstance(said.get("seq"), int) and said["seq"] >= read.get("seq", -1):
        return said
    return read or None


def _end(item: _Read, running: bool) -> str:
    """How it ended, as words; empty while it runs."""
    process, model = item.process, item.ending.newest.get("model", 0)
    if process.signal is not None:
        return f"ended by {process.signal.get('signal')}"
    if process.end is None:
        return "" if running else "ended by SIGKILL, abort() or without a word"
    if process.end.get("exception"):
        return f"ended by {process.end['exception']}"
    failed = process.failed
    if failed is not None and (failed.get("model", 0), failed.get("step")) == (model, process.last_step(model)):
        return f"ended after {failed.get('type')}"
    return "ended in order"


def _holding(done: Sequence[_Read]) -> list[tuple[int, int, list[tuple[str, int]]]]:
    out = []
    for item in done:
        size, named = item.ending.held(item.process)
        if size:
            out.append((size, item.process.rank, named))
    return sorted(out, key=lambda entry: (-entry[0], entry[1]))
