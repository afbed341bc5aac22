"""A run: all its processes together, and what is to say about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fsdptrace.analysis import notes, ranks, workers
from fsdptrace.analysis.device import DeviceSums
from fsdptrace.analysis.findings import Collector, Finding
from fsdptrace.analysis.lines import read_process
from fsdptrace.analysis.process import ProcessTrace, StepPart
from fsdptrace.analysis.ranks import Arrivals, Ranks
from fsdptrace.analysis.rows import Peak, UnitRow, Units, UnitSums, add_fields, merge, peak_json
from fsdptrace.analysis.sources import Problem, RunSources, Source, choose, find_runs
from fsdptrace.analysis.stages import Stage, stages
from fsdptrace.analysis.steplines import StepLine
from fsdptrace.analysis.traffic import Traffic, traffic
from fsdptrace.checks.text import count
from fsdptrace.model_map import ModelMap
from fsdptrace.summary import Prefetches, RegionSums

SCHEMA = "fsdptrace-report/1"
KEPT_VIOLATIONS = 1000  # per process, as they were written; findings are of all of them


@dataclass(slots=True)
class ModelReport:
    """One recorded model over all ranks that have it alike.

    Attributes:
        model, root: its number in the process and its class.
        rows: one per param group, in the model's order.
        steps: steps behind the rows, summed over ranks; ``unfinished`` says that none of them ended.
        now, past_backward: bytes open or pending at the end of what was read, and those although the backward was over:
            largest over ranks, with that rank.
        peak: most bytes open or pending at one time.
        past_backward_peak: largest ``past_backward_peak`` of any step: held at one time although the backward was over.
        traffic: bytes on the wire beside the closed form; ``prefetches`` by direction and mode, summed over steps and ranks.
        device: what the device did in timed steps, summed over ranks; empty without device timing.
        regions: checkpointed regions by name, summed over steps and ranks.
        stage: the ranks that it is of, and whether others have it in another way, as other stages of a pipeline do.
    """

    model: int
    root: str
    map: ModelMap
    rows: list[UnitRow]
    steps: int
    unfinished: bool
    now: tuple[int, int]
    past_backward: tuple[int, int]
    peak: Peak
    past_backward_peak: int
    traffic: Traffic
    prefetches: dict[tuple[str, str], Prefetches]
    device: DeviceSums = field(default_factory=DeviceSums)
    regions: dict[str, RegionSums] = field(default_factory=dict)
    stage: Stage = field(default_factory=lambda: Stage(ModelMap(0, "", (), ())))

    def called(self, several: bool) -> str:
        """Its class, with its number where there are ``several`` models, and its ranks and units where others have it in
        another way."""
        number = f" (model {self.model})" if several else ""
        if self.stage.alone:
            return self.root + number
        return f"{self.root}{number} on {notes.ranks_text(self.stage.ranks)} ({self.stage.names})"

    @property
    def behind(self) -> str:
        """What its rows are of, for a reader."""
        if self.unfinished:
            return "of a step that did not end"
        return f"mean of {count(self.steps, 'step')} over {'all' if self.stage.alone else 'these'} ranks"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "model": self.model, "root": self.root, "ranks": self.stage.ranks, "rank_steps": self.steps,
            "unfinished": self.unfinished,
            "unsharded_bytes": self.now[0], "unsharded_bytes_rank": self.now[1],
            "past_backward_bytes": self.past_backward[0], "past_backward_bytes_rank": self.past_backward[1],
            "past_backward_peak_bytes": self.past_backward_peak, "peak": peak_json(self.peak),
            "communication": self.traffic.to_json(),
            "prefetches": [
                {"direction": direction, "mode": mode, **asdict(entry)} for (direction, mode), entry in self.prefetches.items()
            ],
            "regions": [{"name": name, **asdict(entry)} for name, entry in self.regions.items()],
            "device": self.device.to_json(self.map) if self.device.units else None,
            "uncovered_parameters": list(self.map.uncovered), "units": [row.to_json() for row in self.rows],
        }  # fmt: skip


@dataclass(slots=True)
class Run:
    """What was read of one run.

    Attributes:
        id, label, attempt: its name; ``label`` is what ``--run`` takes.
        folder: where it lies.
        processes: by rank.
        findings: what was found while it ran.
        models: one per recorded model.
        basis: what "nothing found" would be based on: rules, steps, ranks.
        coverage: what this run cannot show.
        notes: ranks that are missing, died, stand elsewhere; detail that is missing; damaged files.
        others: labels of other runs in the same folder, newest first.
        side_by_side: the ranks beside each other.
    """

    id: str
    label: str
    attempt: int
    folder: Path
    processes: list[ProcessTrace]
    findings: list[Finding]
    models: list[ModelReport]
    basis: notes.Basis
    coverage: list[str]
    notes: list[str]
    others: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    side_by_side: Ranks = field(default_factory=lambda: Ranks([]))

    @property
    def several_models(self) -> bool:
        """Whether a process recorded more than one model; stages of one are not meant."""
        return len({model.model for model in self.models}) > 1

    @property
    def worst(self) -> str:
        """The worst severity that was found; empty when nothing was."""
        return self.findings[0].severity if self.findings else ""

    @property
    def ranks(self) -> list[int]:
        """Ranks of which there is a file."""
        return sorted({process.rank for process in self.processes})

    def step_lines(self) -> list[tuple[int, StepLine]]:
        """``(rank, step)`` in the order of steps, models and ranks."""
        lines = [(process.rank, line) for process in self.processes for line in process.steps]
        return sorted(lines, key=lambda item: (item[1].step, item[1].model, item[0]))

    def to_json(self, steps: bool = False) -> dict[str, Any]:
        """Plain data, as ``report --json`` prints it; ``steps`` adds one entry per rank and step."""
        data: dict[str, Any] = {
            "schema": SCHEMA, "run": self.id, "attempt": self.attempt, "folder": str(self.folder),
            "ranks": self.ranks, "findings": [finding.to_json() for finding in self.findings],
            "models": [model.to_json() for model in self.models], "basis": asdict(self.basis),
            "coverage": self.coverage, "notes": self.notes, "problems": [str(problem) for problem in self.problems],
            "processes": [_process_json(process) for process in self.processes], "ranks_compared": self.side_by_side.to_json(),
            "other_runs": self.others,
        }  # fmt: skip
        if steps:
            data["steps"] = [{"rank": rank, **line.to_json()} for rank, line in self.step_lines()]
        return data


def _process_json(process: ProcessTrace) -> dict[str, Any]:
    header = process.header
    return {
        "rank": header.rank, "world_size": header.world_size, "role": header.role, "host": header.host, "pid": header.pid,
        "versions": dict(header.versions), "file": str(process.source.path), "complete": process.end is not None,
        "events": process.events, "dropped": process.dropped, "violations": process.violation_count,
        "lost_violations": process.lost_violations, "steps": len(process.steps),
        "full_steps": process.steps.full, "last_seq": process.last_seq,
        "entered": process.entered if process.end is None else None, "damaged_lines": process.damaged,
    }  # fmt: skip


def load(folder: str | Path, run: str | None = None, jobs: int | None = 1, progress: workers.Progress | None = None) -> Run:
    """Reads a run: a run's folder, the out folder (the newest run in it, or the one named ``run``), or one file.

    Damaged, cut off and foreign files are named in ``problems`` and ``notes``; what is left is used. ``jobs`` and
    ``progress`` as for :func:`fsdptrace.analysis.workers.each`.

    Raises:
        NotATrace: there is nothing to read, or no run of that name.
    """
    runs, problems = find_runs(folder)
    chosen = choose(runs, run)
    others = [other.label for other in runs if other is not chosen]
    return read_run(chosen, problems, others, jobs, progress)


@dataclass(slots=True)
class _Read:
    """What a worker makes of one process's files."""

    process: ProcessTrace
    units: dict[int, Units]
    arrivals: Arrivals
    found: Collector


def _read(source: Source, advance: workers.Advance, limit: int) -> _Read:
    sums, arrivals, found = UnitSums(source.header.rank), Arrivals(limit), Collector()

    def sink(part: StepPart) -> None:
        sums(part)
        arrivals(part)

    process = read_process(source, sink, advance)
    roots = {number: model.root for number, model in process.models.items()}
    found.add(process.violations, process.rank, roots, str(source.path))
    del process.violations[KEPT_VIOLATIONS:]  # they can be very many, and what a report says of them is in `found`
    return _Read(process, sums.result(), arrivals, found)


def read_run(
    sources: RunSources,
    problems: Sequence[Problem] = (),
    others: Sequence[str] = (),
    jobs: int | None = 1,
    progress: workers.Progress | None = None,
) -> Run:
    """Reads the files of one run."""
    count = len(sources.sources)
    done = workers.each(sources.sources, partial(_read, limit=ranks.limit(count) if count > 1 else 0), jobs, progress)
    processes = [item.process for item in done]
    collector = Collector()
    for item in done:
        collector.merge(item.found)
    units = [item.units for item in done]
    all_problems = [*problems, *(problem for process in processes for problem in process.problems)]
    found = stages(processes)
    return Run(
        sources.id, sources.label, sources.attempt, _folder(sources), processes, collector.findings(),
        _models(found, list(zip(processes, units, strict=True))),
        notes.basis(processes), notes.coverage(processes), notes.about(processes), list(others), all_problems,
        ranks.ranks(processes, units, [item.arrivals for item in done], workers.sizes(sources.sources), found),
    )  # fmt: skip


def _folder(sources: RunSources) -> Path:
    parents = {source.path.parent for source in sources.sources}
    if len(parents) == 1:
        return parents.pop()
    return min(parents, key=lambda path: len(path.parts))


def _models(found: Sequence[Stage], units: Sequence[tuple[ProcessTrace, Mapping[int, Units]]]) -> list[ModelReport]:
    """Models of all ranks; ranks that have one alike are put together."""
    return [_model(stage, [units[place] for place in stage.places]) for stage in found]


def _model(stage: Stage, units: Sequence[tuple[ProcessTrace, Mapping[int, Units]]]) -> ModelReport:
    number = stage.map.model
    device = DeviceSums()
    of_ranks: list[Units] = []
    for process, by_number in units:
        of_ranks.append(by_number.get(number) or Units(process.rank))
        if number in process.device:
            device.merge(process.device[number])
    finished = [item for item in of_ranks if not item.unfinished]
    used = finished if any(item.steps for item in finished) else of_ranks
    rows = merge(used)
    prefetches: dict[tuple[str, str], Prefetches] = {}
    regions: dict[str, RegionSums] = {}
    for item in used:
        for name, entry in item.prefetches.items():
            add_fields(prefetches.setdefault(name, Prefetches()), entry)
        for called, region in item.regions.items():
            add_fields(regions.setdefault(called, RegionSums()), region)
    return ModelReport(
        number, stage.map.root, stage.map, rows, sum(item.steps for item in used), used is not finished,
        _most(of_ranks, "now"), _most(of_ranks, "past_backward"),
        max((item.peak for item in of_ranks), key=lambda peak: (peak.bytes, len(peak.units), -peak.rank)),
        max(item.past_backward_peak for item in of_ranks), traffic(stage.map, rows, used), dict(sorted(prefetches.items())),
        device, regions, stage,
    )  # fmt: skip


def _most(of_ranks: Sequence[Units], what: str) -> tuple[int, int]:
    """The largest ``what`` and its rank, the lowest of several."""
    held, rank = max((getattr(item, what), -item.rank) for item in of_ranks)
    return held, -rank
