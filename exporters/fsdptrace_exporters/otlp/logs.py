"""The sink for logs: one record per violation, and one for a process that died."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry import _logs as api
from opentelemetry._logs import SeverityNumber
from opentelemetry.sdk import _logs as sdk
from opentelemetry.sdk.resources import Resource

from fsdptrace.analysis.follow import FEW_LINES, FollowedStep, Follower
from fsdptrace_exporters import identity
from fsdptrace_exporters.otlp import build
from fsdptrace_exporters.otlp.delivery import Delivery, NotDelivered
from fsdptrace_exporters.otlp.traces import last_words
from fsdptrace_exporters.sinks import Settings

_SEVERITIES = {"error": SeverityNumber.ERROR, "warning": SeverityNumber.WARN, "info": SeverityNumber.INFO}
_BATCH = 256


class LogSink:
    """Delivers violations as log records that belong to the span of their rank in the step's trace."""

    linger = 2.0
    lines = FEW_LINES

    def __init__(self, name: str, delivery: Delivery, settings: Settings) -> None:
        self.name = name
        self._delivery = delivery
        self._settings = settings
        self._resources: dict[Any, Resource] = {}
        self._waiting: list[Any] = []

    def begin(self, process: Follower, state: Mapping[str, Any]) -> None:
        """See :class:`~fsdptrace_exporters.sinks.Sink`; so are the methods below."""
        self._resources[process.path] = build.resource(process.header)

    def step(self, process: Follower, step: FollowedStep) -> None:
        header, part = process.header, step.part
        for data in step.violations:
            t = data.get("t1")
            known = t if isinstance(t, int) else part.line.t if part.line is not None else process.trace.last_t
            text = f"{data['rule']}: {data['message']}" + (f" {data['hint']}" if data["hint"] else "")
            attributes = {**build.violation_attributes(data), "fsdp.step": part.step, "dl.rank": header.rank,
                          "fsdptrace.run.id": header.run_id}  # fmt: skip
            at = identity.unix_ns(header, known)
            self._add(process, part.map.model, part.step, at, data["severity"], text, attributes, "fsdp.violation")

    def round(self, process: Follower, caught_up: bool) -> None:
        pass

    def end(self, process: Follower) -> None:
        if process.ended == "died":
            header = process.header
            step = max((step for step, _ in process.position.taken.values()), default=0)
            attributes = {"fsdp.step": step, "dl.rank": header.rank, "fsdptrace.run.id": header.run_id}
            at = identity.unix_ns(header, process.trace.last_t or header.perf_counter_ns)
            self._add(process, 0, step, at, "error", last_words(process), attributes, "fsdptrace.process.died")

    def _add(
        self,
        process: Follower,
        model: int,
        step: int,
        at: int,
        severity: str,
        text: str,
        attributes: dict[str, Any],
        event: str,
    ) -> None:
        header = process.header
        trace = identity.step_trace(header, model, step)
        rank = identity.span_id(trace, "rank", header.rank)
        number = _SEVERITIES.get(severity, SeverityNumber.INFO)
        of = self._resources[process.path]
        self._waiting.append(_record(of, at, trace, rank, severity, number, text, {**attributes, "event.name": event}))

    def flush(self, due: bool) -> bool:
        while self._waiting:
            try:
                self._delivery.send(self._waiting[:_BATCH])
            except NotDelivered:
                return False
            del self._waiting[:_BATCH]
        return True

    def state(self, process: Follower) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def _record(
    of: Resource, at: int, trace: int, span: int, severity: str, number: SeverityNumber, text: str, attributes: dict[str, Any]
) -> Any:
    """A record as the installed SDK's exporters take it; their classes changed in 1.35 and 1.39."""
    common: dict[str, Any] = {
        "timestamp": at, "observed_timestamp": at, "severity_text": severity.upper(), "severity_number": number, "body": text,
        "attributes": attributes,
    }  # fmt: skip
    readable = getattr(sdk, "ReadableLogRecord", None)
    if readable is not None:
        from opentelemetry.trace import NonRecordingSpan, SpanContext, set_span_in_context

        context = set_span_in_context(NonRecordingSpan(SpanContext(trace, span, False, build.SAMPLED)))
        return readable(api.LogRecord(**common, context=context), of, build.scope())
    old: Any = sdk
    record = old.LogRecord(**common, trace_id=trace, span_id=span, trace_flags=build.SAMPLED, resource=of)
    return old.LogData(record, build.scope())
