"""Which steps of which ranks a page shows: those where something was found, then the end, then the begin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fsdptrace.analysis import ProcessTrace, Run

MAX_EVENTS = 120_000  # events of one page: about 6 MB, drawn at once


@dataclass(slots=True)
class Choice:
    """``(model, step)`` that are shown, by position of the process in the run; ``left_out`` counts steps of processes that
    have events in the files and are not shown."""

    steps: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    left_out: int = 0

    def __contains__(self, place: tuple[int, int, int]) -> bool:
        process, model, step = place
        return (model, step) in self.steps.get(process, ())


def choose(run: Run, limit: int = MAX_EVENTS) -> Choice:
    """Steps in the order of interest until ``limit`` events are reached; the first one always."""
    events = [_events(process) for process in run.processes]
    choice = Choice()
    room = limit
    order = _ranks(run)
    for model, step in _steps(run):
        for place in order:
            number = events[place].get((model, step))
            if number is None or (place, model, step) in choice:
                continue
            if number > room and choice.steps:
                continue
            room -= number
            choice.steps.setdefault(place, set()).add((model, step))
    choice.left_out = sum(len(known) for known in events) - sum(len(chosen) for chosen in choice.steps.values())
    return choice


def _events(process: ProcessTrace) -> dict[tuple[int, int], int]:
    """Events by (model, step), of steps of which more than one line is there."""
    found = {(line.model, line.step): line.events for line in process.steps if line.full}
    for model, step in process.running_step.items():
        found[model, step] = process.running_events.get(model, 0)
    return found


def _ranks(run: Run) -> list[int]:
    """Positions of processes: those with the first violation of a finding, then the rest in order."""
    files = [finding.first.file for finding in run.findings]
    named = [place for file in files for place, process in enumerate(run.processes) if str(process.source.path) == file]
    return list(dict.fromkeys([*named, *range(len(run.processes))]))


def _steps(run: Run) -> Iterator[tuple[int, int]]:
    """``(model, step)``: of findings, unfinished ones, the last and the first full one of each model, then all."""
    for finding in run.findings:
        yield finding.model, finding.first.step
    for process in run.processes:
        if process.end is None:
            yield from process.running_step.items()
    full = sorted({(line.model, line.step) for process in run.processes for line in process.steps if line.full})
    of_model: dict[int, list[tuple[int, int]]] = {}
    for model, step in full:
        of_model.setdefault(model, []).append((model, step))
    for steps in of_model.values():
        yield steps[-1]
        yield steps[0]
    yield from full
    for process in run.processes:
        yield from process.running_step.items()
