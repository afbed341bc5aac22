"""The trace of a step: the same for all ranks, a few spans for each, so that it loads however many ranks there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from fsdptrace import events as ev
from fsdptrace.analysis.device import StepOnDevice
from fsdptrace.analysis.follow import FollowedStep
from fsdptrace.analysis.sources import Header
from fsdptrace.summary import rows_of
from fsdptrace_exporters import identity
from fsdptrace_exporters.metrics import memory_peaks
from fsdptrace_exporters.otlp import build

_PARTS = {
    ev.FORWARD: "fsdp.forward",
    ev.BACKWARD: "fsdp.backward",
    ev.RECOMPUTE: "fsdp.recompute",
    ev.OPTIMIZER_STEP: "fsdp.optimizer_step",
}


@dataclass(slots=True)
class Extent:
    """When a step ran on one rank, ns of the process's clock, and what its events say of it in all; ``on_device``: what is
    known of it there."""

    start: int = 0
    end: int = 0
    parts: dict[int, tuple[int, int, int, int]] | None = None  # by kind: how many, first begin, last end, ns in them
    exceptions: tuple[tuple[int, str], ...] = ()
    on_device: StepOnDevice | None = None

    @classmethod
    def of(cls, step: FollowedStep, last_t: int, since: int = 0, on_device: StepOnDevice | None = None) -> Extent:
        """Of a step; ``last_t`` is the process's last sign of life, for one that did not end, and ``since`` when it began
        where it has no events."""
        records, line = step.part.records, step.part.line
        parts: dict[int, tuple[int, int, int, int]] = {}
        exceptions = []
        for kind, _seq, t0, t1, _g, _p, _c, a, *_rest in rows_of(records):
            if kind in _PARTS:
                count, first, last, busy = parts.get(kind, (0, t0, t1, 0))
                parts[kind] = (count + 1, min(first, t0), max(last, t1), busy + t1 - t0)
            elif kind == ev.EXCEPTION:
                exceptions.append((t0, step.part.texts.get(a)))
        begins, ends = records[ev.T0 :: ev.WIDTH], records[ev.T1 :: ev.WIDTH]
        end = line.t if line is not None else max(last_t, max(ends, default=0))
        start = end - line.duration_ns if line is not None and line.duration_ns else since or end
        return cls(min([start, *begins]), max([end, *ends]), parts, tuple(exceptions), on_device)

    def device_seconds(self, what: str) -> float | None:
        """How long the passes ``what`` (``forward`` or ``backward``) ran on the device in all; None where it is not known."""
        found = [span.t1 - span.t0 for span in self.on_device.spans if span.what == what] if self.on_device else []
        return sum(found) / 1e9 if found else None


def step_spans(
    header: Header,
    of: Resource,
    in_scope: InstrumentationScope,
    step: FollowedStep,
    extent: Extent,
    detail: bool,
    died: str,
) -> list[ReadableSpan]:
    """The spans of one rank in the step's trace; rank 0 has the trace's root.

    Args:
        detail: whether the rank's units have a trace of their own, to link to.
        died: what to say of a process that ended in this step without a word, else empty.
    """
    part, line = step.part, step.part.line
    model, number = part.map.model, part.step
    trace = identity.step_trace(header, model, number)
    spans = build.Spans(trace, of, in_scope)
    root = identity.span_id(trace, "step")
    rank = identity.span_id(trace, "rank", header.rank)

    def at(t: int) -> int:
        return identity.unix_ns(header, t)

    common: dict[str, Any] = {"fsdp.step": number, "fsdp.model": part.map.root, "fsdptrace.run.id": header.run_id}
    links = [made for text in step.spans if (made := build.traceparent_link(text)) is not None]
    attributes = {**common, "dl.rank": header.rank, "fsdp.detail": "full" if part.full else "summary"}
    if line is not None:
        attributes |= {
            "fsdp.events": line.events, "fsdp.unsharded.memory": line.unsharded_bytes,
            "fsdp.unsharded.memory.peak": line.unsharded_peak, "fsdp.unsharded.past_backward": line.past_backward_bytes,
            "fsdp.unsharded.past_backward.peak": line.past_backward_peak, "fsdptrace.dropped": line.dropped,
            "fsdp.gathers": sum(v for sums in step.comm.values() for k, v in sums.items() if k.startswith("gathers_")),
        }  # fmt: skip
    else:
        attributes["fsdp.step.unfinished"] = True
    attributes |= on_device(extent, part.records)
    events = [build.violation_event(data, at(when(data, extent.end))) for data in step.violations]
    events += [Event("exception", {"exception.type": name}, timestamp=at(t)) for t, name in extent.exceptions]
    if len(step.violations) > build.EVENTS:
        attributes["fsdp.violations"] = len(step.violations)
    status = None
    wrong = [data["message"] for data in step.violations if data["severity"] == "error"]
    if died or wrong or extent.exceptions:
        status = build.error(died or (wrong[0] if wrong else f"{extent.exceptions[0][1]} left the model"))
        attributes |= {"fsdptrace.process.died": True} if died else {}
    own = list(links)
    if detail:
        units = identity.unit_trace(header, model, number)
        own.append(build.link(units, identity.span_id(units, "units"), {"fsdp.link": "units"}))
    if header.rank == 0:
        spans.add("fsdp.step", root, None, at(extent.start), at(extent.end), common, links=links, status=status)
    spans.add("fsdp.rank", rank, root, at(extent.start), at(extent.end), attributes, events, own, status)
    _parts(spans, trace, rank, header, extent, at)
    return spans.made


def on_device(extent: Extent, records: Sequence[int]) -> dict[str, Any]:
    """What is said of a rank's step where its device was timed."""
    attributes: dict[str, Any] = {}
    times = extent.on_device
    if times is not None:
        attributes["fsdp.exposed"] = times.exposed_ns / 1e9
        if times.span_ns is not None:
            attributes["fsdp.device.duration"] = times.span_ns / 1e9
        if times.missing:
            attributes["fsdp.device.missing"] = times.missing
    allocated, reserved = memory_peaks(records)
    if reserved:
        attributes |= {"fsdp.allocated.memory.peak": allocated, "fsdp.reserved.memory.peak": reserved}
    return attributes


def _parts(spans: build.Spans, trace: int, rank: int, header: Header, extent: Extent, at: Any) -> None:
    """One span per kind; of several forwards (accumulation) or recomputations it runs from the first to the last."""
    ids = {kind: identity.span_id(trace, "rank", header.rank, ev.KINDS[kind]) for kind in _PARTS}
    parts = extent.parts or {}
    for kind, name in _PARTS.items():
        if kind not in parts:
            continue
        count, first, last, busy = parts[kind]
        parent = rank
        backward = parts.get(ev.BACKWARD)
        if kind == ev.RECOMPUTE and backward is not None and backward[1] <= first and last <= backward[2]:
            parent = ids[ev.BACKWARD]
        attributes = {"dl.rank": header.rank, "fsdp.count": count, "fsdp.busy": busy / 1e9}
        if (seconds := extent.device_seconds(ev.KINDS[kind])) is not None:
            attributes["fsdp.device.duration"] = seconds
        spans.add(name, ids[kind], parent, at(first), at(last), attributes)


def when(data: Mapping[str, Any], default: int) -> int:
    """When a violation was found, ns of the process's clock."""
    t = data.get("t1")
    return t if isinstance(t, int) else default


def worst(violations: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one of them is an error or a warning."""
    return any(data["severity"] in ("error", "warning") for data in violations)
