"""What one process's files say: of the process, and, step by step, of its events."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from fsdptrace import events as ev
from fsdptrace.analysis.device import DeviceSums
from fsdptrace.analysis.sources import Header, Problem, Source
from fsdptrace.analysis.steplines import StepLine, StepLines
from fsdptrace.model_map import ModelMap


@dataclass(frozen=True, slots=True)
class StepPart:
    """The events of one step of one model that were read, violations apart.

    Attributes:
        map: the model.
        step: its number; ``line`` is None when it was not finished or its line was lost.
        records: integers, :data:`fsdptrace.events.WIDTH` per event, in the order of recording.
        texts: the strings that records refer to.
        full: it ended and all its events were read.
        intact: all its events were read as far as it got: a step that did not end, at the end of the files.
        contiguous: this is the first step, or the one after the step handed on before.
    """

    map: ModelMap
    step: int
    records: array[int]
    texts: ev.Texts
    line: StepLine | None
    full: bool
    intact: bool
    contiguous: bool


@dataclass(slots=True)
class ProcessTrace:
    """What one process's files say, but for the events themselves.

    Attributes:
        events: event lines read, violations and step lines included.
        violations: violation lines as written (``model``, ``group``, ``step``, ``seq`` among them).
        violation_count: how many violation lines there are.
        lost_violations: violations of finished steps of which no line was written or kept.
        steps: finished steps; ``first_step`` and ``last_step`` per model are known from events too.
        end: the last line; None when the process died or is still running.
        dropped: events that did not fit in memory, as last reported.
        last_seq, last_t: the last sign of life.
        device: what the device did in timed steps, by model.
        entered: the collective that was entered and not left, as far as the file says.
        exceptions: ``(step, type, fqn)`` of the last few exceptions; ``failed`` the fields of the last one's line.
        last_event: when the newest event ended; ``last_entered`` the newest line of a collective that was entered, left or not.
        stands: what the newest heartbeat or signal says of where the process stands; ``signal`` the line of the signal that
            ended it.
        apart: events of a step came after others of a later one, as no recorder writes them: what it held and did last is
            not known.
        coverage: what it found out that it cannot show, beside what the header says.
    """

    source: Source
    models: dict[int, ModelMap] = field(default_factory=dict)
    events: int = 0
    violations: list[dict[str, Any]] = field(default_factory=list)
    violation_count: int = 0
    lost_violations: int = 0
    steps: StepLines = field(default_factory=StepLines)
    running_step: dict[int, int] = field(default_factory=dict)
    device: dict[int, DeviceSums] = field(default_factory=dict)
    running_events: dict[int, int] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    dropped: int = 0
    last_seq: int = 0
    last_t: int = 0
    entered: dict[str, Any] | None = None
    exceptions: list[tuple[int, str, str]] = field(default_factory=list)
    coverage: list[str] = field(default_factory=list)
    failed: dict[str, Any] | None = None
    last_event: int = 0
    last_entered: dict[str, Any] | None = None
    stands: dict[str, Any] = field(default_factory=dict)
    signal: dict[str, Any] | None = None
    damaged: int = 0
    apart: bool = False
    problems: list[Problem] = field(default_factory=list)

    @property
    def header(self) -> Header:
        """The header of its files."""
        return self.source.header

    @property
    def rank(self) -> int:
        """Its global rank."""
        return self.header.rank

    def last_step(self, model: int = 0) -> int:
        """The newest step of ``model`` of which anything is known, -1 before any."""
        return max(self.steps.last(model), self.running_step.get(model, -1))
