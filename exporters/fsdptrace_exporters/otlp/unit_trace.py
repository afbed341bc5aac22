"""The trace of one rank's units in one step: what was gathered when and for how long, by whom, and what it was used for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link
from opentelemetry.trace.status import Status

from fsdptrace import events as ev
from fsdptrace.analysis.follow import FollowedStep
from fsdptrace.analysis.sources import Header
from fsdptrace.summary import rows_of
from fsdptrace.totals import mesh_name
from fsdptrace_exporters import identity
from fsdptrace_exporters.otlp import build
from fsdptrace_exporters.otlp.step_trace import Extent, when

_CONTAINERS = {
    ev.FORWARD: "fsdp.forward",
    ev.BACKWARD: "fsdp.backward",
    ev.REGION: "fsdp.region",
    ev.RECOMPUTE: "fsdp.recompute",
}
_REDUCTIONS = {ev.REDUCE_SCATTER: "fsdp.reduce_scatter", ev.ALL_REDUCE: "fsdp.all_reduce"}

# The id of a span is made of the number of the event that began it and one of these.
_CALL, _LIFETIME, _UNIT = range(3)


@dataclass(slots=True)
class _Open:
    """A span that has begun: a unit's pass, or the time that a group is gathered.

    ``around`` is the forward, backward or recomputation that a unit's forward lies in; ``issued``, ``waits`` (when, event),
    ``waited``, ``prefetched`` and ``gather`` (attributes) are of a gather.
    """

    seq: int
    t0: int
    parent: int
    attributes: dict[str, Any]
    links: list[Link] = field(default_factory=list)
    waited: int = 0
    waits: list[tuple[int, int]] = field(default_factory=list)
    around: int = 0
    issued: int = 0
    prefetched: bool = False
    gather: dict[str, Any] = field(default_factory=dict)


class UnitTrace:
    """Makes the spans of one step of one rank; feed it once."""

    def __init__(
        self, header: Header, of: Resource, in_scope: InstrumentationScope, step: FollowedStep, extent: Extent
    ) -> None:
        self._header = header
        self._step = step
        self._extent = extent
        self._map = step.part.map
        trace = identity.unit_trace(header, self._map.model, step.part.step)
        self._spans = build.Spans(trace, of, in_scope)
        self._ids = identity.SpanIds(trace)
        self._root = identity.span_id(trace, "units")
        self._shift = identity.unix_ns(header, 0)
        self._parents: dict[int, int] = {}
        self._containers: set[int] = set()
        self._stack: list[tuple[int, _Open]] = []  # open forwards of units, outermost first
        self._backward: dict[int, _Open] = {}
        self._gathered: dict[int, _Open] = {}
        self._noops = 0
        self._found: dict[int, list[dict[str, Any]]] = {}
        self._device = {span.seq: span for span in extent.on_device.spans} if extent.on_device is not None else {}
        self._memory: dict[int, dict[str, Any]] = {}  # by the event after which the allocator was read
        self._meshes = [mesh_name(group) for group in self._map.groups]

    def spans(self) -> list[ReadableSpan]:
        """All of them, the root last."""
        records = self._step.part.records
        for kind, seq, _t0, _t1, _g, parent, _c, a, b, *_rest in rows_of(records):
            self._parents[seq] = parent
            if kind == ev.MEMORY and b:
                self._memory[parent] = {"fsdp.allocated.memory": a, "fsdp.reserved.memory": b}
            if kind in _CONTAINERS:
                self._containers.add(seq)
        self._sort_violations()
        for row in rows_of(records):
            handler = _HANDLERS.get(row[0])
            if handler is not None:
                handler(self, *row)
        self._close()
        return self._spans.made

    # -- helpers -------------------------------------------------------------------------------------------------------
    def _id(self, seq: int, part: int = _CALL) -> int:
        return self._ids(4 * seq + part)

    def _within(self, parent: int) -> int:
        """The span of the innermost forward, backward or recomputation around."""
        while parent:
            if parent in self._containers:
                return self._id(parent)
            parent = self._parents.get(parent, 0)
        return self._root

    def _about(self, group: int, context: int) -> dict[str, Any]:
        attributes: dict[str, Any] = {"fsdp.module.fqn": self._map.fqn(group)}
        if context % 4:
            attributes["fsdp.pass"] = ev.PASSES[context % 4]
        return attributes

    def _on_device(self, seq: int) -> dict[str, Any]:
        """What the device did for an event, where that is known: from when (Unix ns), how long, how long compute waited."""
        span = self._device.get(seq)
        if span is None:
            return {}
        attributes = {"fsdp.device.start": span.t0 + self._shift, "fsdp.device.duration": (span.t1 - span.t0) / 1e9}
        return attributes if span.exposed < 0 else {**attributes, "fsdp.exposed": span.exposed / 1e9}

    def _sort_violations(self) -> None:
        """Violations by the event that they are about: the last of the evidence."""
        for data in self._step.violations:
            seq = data["evidence"][-1] if data["evidence"] else data["seq"]
            self._found.setdefault(seq, []).append(data)

    def _violations(self, *seqs: int) -> tuple[list[Event], Status | None]:
        """The violations about these events, as events of a span, and the status that they give it."""
        if not self._found:
            return [], None
        found = [data for seq in seqs for data in self._found.pop(seq, ())]
        wrong = [data["message"] for data in found if data["severity"] == "error"]
        at = [when(data, self._extent.end) + self._shift for data in found]
        events = [build.violation_event(data, t) for data, t in zip(found, at, strict=True)]
        return events, build.error(wrong[0]) if wrong else None

    def _add(self, name: str, span: int, parent: int, t0: int, t1: int, attributes: dict[str, Any], *seqs: int,
             links: list[Link] | None = None, events: list[Event] | None = None) -> None:  # fmt: skip
        found, status = self._violations(*seqs)
        shift = self._shift
        self._spans.add(name, span, parent, t0 + shift, t1 + shift, attributes, [*(events or ()), *found], links or (), status)

    # -- events --------------------------------------------------------------------------------------------------------
    def _container(self, kind: int, seq: int, t0: int, t1: int, group: int, parent: int, _c: int, a: int, b: int, c: int,
                   d: int, e: int) -> None:  # fmt: skip
        attributes: dict[str, Any] = {}
        links: list[Link] = []
        if kind == ev.FORWARD:
            attributes = {"fsdp.module.fqn": self._map.units[a].fqn if a >= 0 else "", "fsdp.grad": bool(b)}
        elif kind != ev.BACKWARD:
            attributes = {"fsdp.module.fqn": self._map.fqn(group), "fsdp.region": a, "fsdp.checkpoint": ev.CHECKPOINTS[d],
                          "fsdp.region.name": self._step.part.texts.get(e)}  # fmt: skip
            if b >= 0:
                attributes["fsdp.saved.tensors"] = b
            if kind == ev.RECOMPUTE:
                attributes["fsdp.recompute.end"] = ev.ENDS[c]
                if a in self._containers:  # of this step: the forward that it repeats
                    links.append(build.link(self._spans.trace, self._id(a), {"fsdp.link": "region"}))
            elif c >= 0:
                attributes["fsdp.saved.bytes"] = c
        attributes |= self._on_device(seq)
        self._add(_CONTAINERS[kind], self._id(seq), self._within(parent), t0, t1, attributes, seq, links=links)

    def _unshard(self, _k: int, seq: int, t0: int, t1: int, group: int, _p: int, context: int, size: int, world: int,
                 dtype: int, issuer: int, how: int) -> None:  # fmt: skip
        noop, direction, mode = ev.unpack_how(how)
        if noop:
            self._noops += 1
            return
        if group in self._gathered:
            self._free(group, t0, seq, "lost")
        about = {**self._about(group, context), "fsdp.bytes": size}
        gather = {
            **about, "fsdp.wire.bytes": ev.wire_bytes(ev.UNSHARD, size, world), "fsdp.dtype": ev.DTYPES[dtype],
            "fsdp.mesh": self._meshes[group], "fsdp.host.duration": (t1 - t0) / 1e9,
        }  # fmt: skip
        if issuer >= 0:
            gather["fsdp.issuer.fqn"] = self._map.fqn(issuer)
        if direction:
            gather["fsdp.prefetch.direction"] = direction
        if mode:
            gather["fsdp.prefetch.mode"] = mode
        gather |= self._on_device(seq)
        self._gathered[group] = _Open(seq, t0, self._root, about, issued=t1, prefetched=bool(direction), gather=gather)

    def _wait(self, _k: int, seq: int, t0: int, t1: int, group: int, *_rest: int) -> None:
        copy = self._gathered.get(group)
        if copy is not None:
            copy.waits.append((t0, seq))
            copy.waited = copy.waited or t1
            if len(copy.waits) == 1:
                copy.gather |= self._memory.get(seq, {})

    def _reshard(self, kind: int, seq: int, t0: int, t1: int, group: int, _p: int, _c: int, _size: int, to: int, cause: int,
                 *_rest: int) -> None:  # fmt: skip
        if group in self._gathered:
            how = "discarded" if kind == ev.DISCARD else ev.RESHARD_CAUSES[cause]
            self._free(group, t1, seq, how, ev.RESHARD_TO[to] if kind == ev.RESHARD and to else "")

    def _free(self, group: int, t1: int, seq: int, how: str, to: str = "") -> None:
        """The time that ``group`` was gathered ends at ``t1``."""
        copy = self._gathered.pop(group)
        attributes = {**copy.attributes, "fsdp.freed.by": how, **({"fsdp.reshard.to": to} if to else {})}
        lifetime = self._id(copy.seq, _LIFETIME)
        self._add("fsdp.unsharded", lifetime, self._root, copy.t0, t1, attributes, seq)
        waits = [Event("fsdp.wait", self._on_device(n), timestamp=t + self._shift) for t, n in copy.waits[:1]]
        end = copy.waited or copy.issued
        seqs = (copy.seq, *(number for _, number in copy.waits))
        self._add("fsdp.unshard", self._id(copy.seq), lifetime, copy.t0, end, copy.gather, *seqs, events=waits)

    def _used(self, group: int) -> list[Link]:
        """A link from a unit's pass to the prefetch that gathered it, the first time that it is used."""
        copy = self._gathered.get(group)
        if copy is None or not copy.prefetched:
            return []
        copy.prefetched = False
        return [build.link(self._spans.trace, self._id(copy.seq), {"fsdp.link": "prefetch"})]

    def _pre_forward(self, _k: int, seq: int, t0: int, _t1: int, group: int, parent: int, context: int, *_rest: int) -> None:
        if any(known == group for known, _ in self._stack):  # a further module of a grouped unit
            return
        around = self._within(parent)
        # A unit within a unit, unless a recomputation began in between.
        outer = self._stack[-1][1] if self._stack and self._stack[-1][1].around == around else None
        inside = around if outer is None else self._id(outer.seq, _UNIT)
        self._stack.append((group, _Open(seq, t0, inside, self._about(group, context), self._used(group), around=around)))

    def _post_forward(self, _k: int, seq: int, _t0: int, t1: int, group: int, *_rest: int) -> None:
        if any(known == group for known, _ in self._stack):
            while self._stack[-1][0] != group:
                self._end_forward(t1, unfinished=True)
            self._end_forward(t1, seq)

    def _end_forward(self, t1: int, *seqs: int, unfinished: bool = False) -> None:
        _, unit = self._stack.pop()
        if unfinished:
            unit.attributes["fsdp.unfinished"] = True
        self._add("fsdp.unit.forward", self._id(unit.seq, _UNIT), unit.parent, unit.t0, t1, unit.attributes,
                  unit.seq, *seqs, links=unit.links)  # fmt: skip

    def _pre_backward(self, _k: int, seq: int, t0: int, _t1: int, group: int, parent: int, context: int, *_rest: int) -> None:
        if group in self._backward:
            self._end_backward(group, t0, unfinished=True)
        around = self._within(parent)
        self._backward[group] = _Open(seq, t0, around, self._about(group, context), self._used(group))

    def _post_backward(self, _k: int, seq: int, t0: int, t1: int, group: int, parent: int, context: int, *_rest: int) -> None:
        if group not in self._backward:
            self._backward[group] = _Open(seq, t0, self._within(parent), self._about(group, context))
        self._backward[group].attributes |= self._memory.get(seq, {})
        self._end_backward(group, t1, seq)

    def _end_backward(self, group: int, t1: int, *seqs: int, unfinished: bool = False) -> None:
        unit = self._backward.pop(group)
        if unfinished:
            unit.attributes["fsdp.unfinished"] = True
        self._add("fsdp.unit.backward", self._id(unit.seq, _UNIT), unit.parent, unit.t0, t1, unit.attributes, unit.seq, *seqs,
                  links=unit.links)  # fmt: skip

    def _reduction(self, kind: int, seq: int, t0: int, t1: int, group: int, parent: int, context: int, size: int, world: int,
                   dtype: int, tensors: int, op: int) -> None:  # fmt: skip
        unit = self._backward.get(group)
        around = self._id(unit.seq, _UNIT) if unit is not None and unit.t0 <= t0 else self._within(parent)
        attributes = {**self._about(group, context), "fsdp.bytes": size, "fsdp.wire.bytes": ev.wire_bytes(kind, size, world),
                      "fsdp.dtype": ev.DTYPES[dtype], "fsdp.tensors": tensors, "fsdp.op": ev.OPS[op % ev.OP_UNIT],
                      "fsdp.mesh": self._meshes[group], **self._on_device(seq)}  # fmt: skip
        self._add(_REDUCTIONS[kind], self._id(seq), around, t0, t1, attributes, seq)

    def _optimizer(self, _k: int, seq: int, t0: int, t1: int, _g: int, parent: int, _c: int, name: int, tensors: int,
                   *_rest: int) -> None:  # fmt: skip
        attributes = {"fsdp.optimizer": self._step.part.texts.get(name), "fsdp.tensors": tensors}
        self._add("fsdp.optimizer_step", self._id(seq), self._within(parent), t0, t1, attributes, seq)

    # -- the end -------------------------------------------------------------------------------------------------------
    def _close(self) -> None:
        end = self._extent.end
        while self._stack:
            self._end_forward(end, unfinished=True)
        for group in list(self._backward):
            self._end_backward(group, end, unfinished=True)
        for group in list(self._gathered):
            self._free(group, end, 0, "open at the end of the step")
        header, step = self._header, self._step
        trace = identity.step_trace(header, self._map.model, step.part.step)
        rank = identity.span_id(trace, "rank", header.rank)
        attributes = {"fsdp.step": step.part.step, "fsdp.model": self._map.root, "fsdptrace.run.id": header.run_id,
                      "dl.rank": header.rank, "fsdp.noops": self._noops}  # fmt: skip
        events = [Event("exception", {"exception.type": name}, timestamp=t + self._shift)
                  for t, name in self._extent.exceptions]  # fmt: skip
        left, status = self._violations(*list(self._found))
        if status is None and any(data["severity"] == "error" for data in step.violations):
            status = build.error("a unit below has a violation")
        shift = self._shift
        self._spans.add("fsdp.units", self._root, None, self._extent.start + shift, end + shift, attributes, [*events, *left],
                        [build.link(trace, rank, {"fsdp.link": "step"})], status)  # fmt: skip


_HANDLERS: dict[int, Callable[..., None]] = {
    **dict.fromkeys(_CONTAINERS, UnitTrace._container),
    **dict.fromkeys(_REDUCTIONS, UnitTrace._reduction),
    ev.UNSHARD: UnitTrace._unshard,
    ev.WAIT: UnitTrace._wait,
    ev.RESHARD: UnitTrace._reshard,
    ev.DISCARD: UnitTrace._reshard,
    ev.PRE_FORWARD: UnitTrace._pre_forward,
    ev.POST_FORWARD: UnitTrace._post_forward,
    ev.PRE_BACKWARD: UnitTrace._pre_backward,
    ev.POST_BACKWARD: UnitTrace._post_backward,
    ev.OPTIMIZER_STEP: UnitTrace._optimizer,
}
