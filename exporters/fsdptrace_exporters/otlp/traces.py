"""The sink for traces: every step's, and the units' of the ranks that matter."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import Decision, Sampler

from fsdptrace.analysis.device import StepOnDevice
from fsdptrace.analysis.follow import FollowedStep, Follower, Position
from fsdptrace.analysis.process import StepPart
from fsdptrace.events import Texts
from fsdptrace_exporters import identity
from fsdptrace_exporters.otlp import build
from fsdptrace_exporters.otlp.delivery import Delivery, NotDelivered
from fsdptrace_exporters.otlp.holding import Held
from fsdptrace_exporters.otlp.step_trace import Extent, step_spans, worst
from fsdptrace_exporters.otlp.unit_trace import UnitTrace
from fsdptrace_exporters.sinks import Settings

DELAY = 1.0  # seconds that spans wait for company


class TraceSink:
    """Turns steps into spans and delivers them in batches.

    Args:
        name: see :class:`~fsdptrace_exporters.sinks.Sink`.
        delivery: takes batches of spans.
        sampler: decides by the trace id alone, and so by the step alone: all ranks of a step are there, or none.
        batch: spans of one request.
    """

    linger = 2.0

    def __init__(self, name: str, delivery: Delivery, sampler: Sampler, batch: int, settings: Settings) -> None:
        self.name = name
        self._delivery = delivery
        self._sampler = sampler
        self._batch = max(1, batch)
        self._settings = settings
        self._scope = build.scope()
        self._resources: dict[Any, Resource] = {}
        self._waiting: list[ReadableSpan] = []
        self._since = 0.0
        self._unmade = 0
        self._told: set[Any] = set()
        self._held: dict[Any, Held] = {}

    def begin(self, process: Follower, state: Mapping[str, Any]) -> None:
        """See :class:`~fsdptrace_exporters.sinks.Sink`; so are the methods below."""
        self._resources[process.path] = build.resource(process.header)
        self._held[process.path] = Held()

    def step(self, process: Follower, step: FollowedStep) -> None:
        self._held[process.path].add(step)
        self._let_go(process, ended=bool(process.ended))

    def _let_go(self, process: Follower, ended: bool) -> None:
        """Makes spans of the steps that wait for nothing more."""
        held = self._held.get(process.path)
        if held is None:  # it is over, and what it left waits for the back end
            return
        for known in process.take_device():
            held.times(known)
        for step, times in held.ready(all_of_them=ended):
            died = ""
            if step.part.line is None and process.ended == "died":
                died = last_words(process)
                self._told.add(process.path)
            self._take(process, step, died, on_device=times)

    def reached(self, process: Follower) -> Position | None:
        """Up to where its steps are made spans of; None when that is not known."""
        held = self._held.get(process.path)
        return held.reached if held else process.position

    def _take(
        self, process: Follower, step: FollowedStep, died: str, since: int = 0, on_device: StepOnDevice | None = None
    ) -> None:
        header, part = process.header, step.part
        trace = identity.step_trace(header, part.map.model, part.step)
        if self._sampler.should_sample(None, trace, "fsdp.step").decision != Decision.RECORD_AND_SAMPLE:
            return
        if not self._waiting:
            self._since = time.monotonic()
        of = self._resources[process.path]
        extent = Extent.of(step, process.trace.last_t if died else 0, since, on_device)
        ranks = self._settings.detail_ranks
        wanted = ranks is None or header.rank in ranks or bool(died) or worst(step.violations)
        detail = wanted and len(part.records) > 0 and (part.full or part.line is None)
        self._waiting += step_spans(header, of, self._scope, step, extent, detail, died)
        if detail:
            try:
                self._waiting += UnitTrace(header, of, self._scope, step, extent).spans()
            except Exception as error:  # a file can hold what no recorder of this version writes
                self._unmade += 1
                if self._unmade == 1:
                    self._settings.say(
                        f"{process.path.name}: the units of step {part.step} cannot be made spans of "
                        f"({type(error).__name__}: {error}); they are left out and counted"
                    )

    def round(self, process: Follower, caught_up: bool) -> None:
        # Of a finished run nothing more will come once its file is read to the end.
        self._let_go(process, ended=bool(process.ended) or (caught_up and not self._settings.live))

    def end(self, process: Follower) -> None:
        self._let_go(process, ended=True)
        if process.ended == "died" and process.path not in self._told:
            # It went between two steps: the step that was to come says so.
            for number, model in process.trace.models.items():
                last, since = process.position.taken.get(number, (-1, process.header.perf_counter_ns))
                part = StepPart(model, last + 1, _NOTHING, Texts(), None, False, False, True)
                step = FollowedStep(part, [], [], {}, process.position)
                self._take(process, step, last_words(process), since)
        self._told.discard(process.path)
        del self._held[process.path]
        self._resources.pop(process.path, None) if not self._waiting else None

    def flush(self, due: bool) -> bool:
        full = len(self._waiting) >= self._batch
        if self._waiting and (full or due or time.monotonic() - self._since >= DELAY):
            while self._waiting:
                try:
                    self._delivery.send(self._waiting[: self._batch])
                except NotDelivered:
                    return False
                del self._waiting[: self._batch]
        return not self._waiting

    def state(self, process: Follower) -> dict[str, Any]:
        return {}

    @property
    def dropped(self) -> int:
        """Spans that the back end refused, and unit traces that could not be made."""
        return self._delivery.dropped + self._unmade

    def close(self) -> None:
        pass


def last_words(process: Follower) -> str:
    """What is known of the end of a process that left no word of its own."""
    trace = process.trace
    header = process.header
    text = f"the process ended without a word (rank {header.rank}, pid {header.pid} on {header.host}): killed, or out of memory"
    entered = trace.entered
    if entered is not None:
        model = trace.models.get(entered.get("model", 0))
        group = entered.get("group")
        where = model.fqn(group) if model is not None and isinstance(group, int) and group < len(model.groups) else "?"
        text += f"; it had entered {entered['kind']} of {where or '(root)'} and not left it"
    return f"{text}; last event {trace.last_seq}"


def _nothing() -> Any:
    from array import array

    return array("q")


_NOTHING = _nothing()
