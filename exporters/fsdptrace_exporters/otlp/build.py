"""Spans of the SDK's own class, made from records: no tracer, no processor, no clock of this process in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from fsdptrace.analysis.sources import Header
from fsdptrace_exporters.identity import SCOPE, VERSION, resource_attributes

SAMPLED = TraceFlags(TraceFlags.SAMPLED)
EVENTS = 64  # events of one span; violations beyond are counted
_TEXT = 4000  # characters of a message


def scope() -> InstrumentationScope:
    """The instrumentation scope of everything that we send."""
    return InstrumentationScope(SCOPE, VERSION)


def resource(header: Header) -> Resource:
    """The resource of the process that wrote the files; what ``OTEL_RESOURCE_ATTRIBUTES`` says wins."""
    sdk = {key: value for key, value in Resource.create().attributes.items() if key.startswith("telemetry.")}
    environment = OTELResourceDetector().detect().attributes
    return Resource({**sdk, **resource_attributes(header), **environment})


def error(text: str) -> Status:
    """The status of a span in which something is wrong."""
    return Status(StatusCode.ERROR, text[:_TEXT])


def link(trace: int, span: int, attributes: Mapping[str, Any] | None = None, remote: bool = False) -> Link:
    """A link to a span by its numbers."""
    return Link(SpanContext(trace, span, remote, SAMPLED), _bounded(attributes))


def _bounded(attributes: Mapping[str, Any] | None) -> BoundedAttributes:
    """As the encoder of older SDKs wants the attributes of a link."""
    return BoundedAttributes(attributes=dict(attributes or {}))


def traceparent_link(text: str) -> Link | None:
    """A link to the span of a W3C ``traceparent``; None where that is damaged."""
    try:
        _version, trace, span, flags = text.split("-")
        context = SpanContext(int(trace, 16), int(span, 16), True, TraceFlags(int(flags, 16)))
    except ValueError:
        return None
    return Link(context, _bounded({"fsdp.link": "active_span"})) if context.is_valid else None


def violation_event(data: Mapping[str, Any], at: int) -> Event:
    """A violation as an event of a span, at Unix time ``at`` in ns."""
    return Event("fsdp.violation", violation_attributes(data), timestamp=at)


def violation_attributes(data: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of a violation, in a span's event and in a log record."""
    return {
        "fsdp.rule": data["rule"], "fsdp.severity": data["severity"], "fsdp.module.fqn": data["fqn"],
        "fsdp.message": data["message"][:_TEXT], "fsdp.hint": data["hint"][:_TEXT], "fsdp.bytes": data["bytes"],
        "fsdp.event.seq": data["evidence"][-1] if data["evidence"] else data["seq"],
    }  # fmt: skip


class Spans:
    """Spans of one trace and one process."""

    def __init__(self, trace: int, of: Resource, in_scope: InstrumentationScope) -> None:
        self.trace = trace
        self._resource = of
        self._scope = in_scope
        self.made: list[ReadableSpan] = []

    def add(
        self,
        name: str,
        span: int,
        parent: int | None,
        start: int,
        end: int,
        attributes: Mapping[str, Any],
        events: Sequence[Event] = (),
        links: Sequence[Link] = (),
        status: Status | None = None,
    ) -> None:
        """One span, by its and its parent's id; times in Unix ns."""
        trace = self.trace
        self.made.append(
            ReadableSpan(
                name,
                SpanContext(trace, span, False, SAMPLED),
                None if parent is None else SpanContext(trace, parent, False, SAMPLED),
                self._resource,
                attributes,
                events[:EVENTS],
                links,
                status=status or _UNSET,
                start_time=start,
                end_time=max(start, end),
                instrumentation_scope=self._scope,
            )
        )


_UNSET = Status(StatusCode.UNSET)
