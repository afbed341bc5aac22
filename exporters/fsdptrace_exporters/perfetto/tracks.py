"""What of a rank is shown: its calls, its collectives, when each unit was gathered and computed, bytes, violations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdptrace import events as ev
from fsdptrace.analysis import ProcessTrace, read_process
from fsdptrace.analysis.device import STALLS, STREAMS, device_spans
from fsdptrace.analysis.process import StepPart
from fsdptrace.analysis.records import fields_of
from fsdptrace.analysis.sources import Source
from fsdptrace.analysis.timeline import AFTERWARDS, ENDS, Hold, ModelTimes, ProcessTimes
from fsdptrace.analysis.workers import Advance
from fsdptrace.model_map import ModelMap, show_name
from fsdptrace.summary import rows_of
from fsdptrace_exporters.perfetto.sink import Sink, Slice, Template, Value, nest

_PER_PROCESS = 1 << 24  # numbers of tracks and arrows of one process
_STEPS, _FOUND, _BYTES, _CALLS, _COLLECTIVES, _DEVICE, _UNITS = (100 * place for place in range(1, 8))
#: Kinds that are no call: the step's line is a slice of another track; a change of parameters has the times of its
#: optimizer's step, of which the number of groups says as much; what a device did is known long after; memory is a curve.
_NO_CALLS = frozenset((ev.STEP, ev.STATE, ev.PARAM_CHANGE, ev.DEVICE, ev.MEMORY))


@dataclass(slots=True)
class Counts:
    """What was written of one rank."""

    slices: int = 0
    flows: int = 0
    violations: int = 0
    events: int = 0


@dataclass(slots=True)
class RankTracks:
    """Writes one rank.

    Args:
        sink: the trace.
        number: of the process in the trace, from 1.
        offset: what its times lack to Unix time, in ns.
        wanted: whether a step (model, number) is shown.
    """

    sink: Sink
    number: int
    offset: int
    wanted: Callable[[int, int], bool]
    counts: Counts = field(default_factory=Counts)
    _tracks: dict[tuple[str, str, int], int] = field(default_factory=dict)
    _known: dict[tuple[int, ...], Template] = field(default_factory=dict)
    _templates: dict[tuple[Value, ...], Template] = field(default_factory=dict)
    _times: ProcessTimes = field(init=False)
    _steps: list[Slice] = field(default_factory=list)
    _shown: set[tuple[int, int]] = field(default_factory=set)
    _device: dict[tuple[int, str], list[Slice]] = field(default_factory=dict)
    _maps: dict[int, ModelMap] = field(default_factory=dict)
    _allocated: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._times = ProcessTimes(self.wanted)

    def write(self, source: Source, order: int, advance: Advance) -> None:
        """Reads the files of the rank and writes its tracks; ``advance`` is told how many bytes were read."""
        header = source.header
        role = f"{header.role} " if header.role else ""
        self.sink.process(self.number, f"{role}rank {header.rank}", order, f"{header.host}, pid {header.pid}")
        trace = read_process(source, self._part, advance, self._device_times)
        self._times.finish()
        self._put("", "steps", _STEPS, self._steps)
        self._violations(trace)
        self._bytes()
        for model, times in sorted(self._times.models.items()):
            self._units(model, times)
        for (model, stream), slices in sorted(self._device.items()):
            of = f" of model {model}" if model else ""
            self._put(f"device{of}", stream, _DEVICE + list(dict.fromkeys(STREAMS.values())).index(stream), slices)
        if self._allocated:
            self._curve("allocated by the device's allocator", _BYTES + 50, self._allocated)

    def _device_times(self, data: Mapping[str, Any]) -> None:
        """What the device did in a step, on the host's clock; steps are read before their device times are known."""
        model = int(data["model"])
        known = self._maps.get(model)
        if known is None or not self.wanted(model, int(data["step"])):
            return
        offset = self.offset
        for span in device_spans(data):
            if span.group < 0:
                name = span.what
            else:
                name = f"{'for' if span.stream == STALLS else span.stream} {show_name(known.fqn(span.group))}"
            args: dict[str, Value] = {"exposed, ns": span.exposed} if span.exposed >= 0 else {}
            template = Template(name, ev.PASSES[span.pass_], args)
            self._device.setdefault((model, span.stream), []).append(
                Slice(span.t0 + offset, span.t1 + offset, template, span.seq, data["step"])
            )

    # -- calls -------------------------------------------------------------------------------------------------------
    def _part(self, part: StepPart) -> None:
        if not self.wanted(part.map.model, part.step):
            return
        self._times(part)
        times = self._times.models.get(part.map.model)
        served = dict(times.served) if times is not None else {}
        if times is not None:
            times.served.clear()
        issued = set(served.values())
        threads: dict[int, list[Slice]] = {}
        self._maps[part.map.model] = part.map
        low, high = 1 << 62, 0
        for record in rows_of(part.records):
            kind, seq, t0, t1, _group, _parent, context = record[: ev.A]
            self.counts.events += 1
            if kind not in AFTERWARDS:
                low, high = min(low, t0), max(high, t1)
            if kind in _NO_CALLS:
                if kind == ev.MEMORY:
                    self._allocated.append((t0, record[ev.A]))
                continue
            item = Slice(t0 + self.offset, t1 + self.offset, self._call(part, record), seq, part.step)
            if kind == ev.WAIT and seq in served:
                item.flow_in = self._flow(served[seq])
                self.counts.flows += 1
            elif kind == ev.UNSHARD and seq in issued:
                item.flow_out = self._flow(seq)
            threads.setdefault(context // ev.THREAD_UNIT, []).append(item)
        model = part.map.model
        of = f" of model {model}" if model else ""
        for thread, slices in threads.items():
            self._put("", f"calls{of}, thread {thread}" if thread else f"calls{of}", _CALLS + 10 * model + thread, slices)
        if high:
            self._shown.add((part.map.model, part.step))
            name = f"step {part.step}" + (f" of model {part.map.model}" if part.map.model else "")
            unfinished = {} if part.line is not None else {"finished": "no"}
            self._steps.append(Slice(low + self.offset, high + self.offset, Template(name, "step", unfinished)))

    def _flow(self, seq: int) -> int:
        return self.number * (1 << 40) + seq

    def _call(self, part: StepPart, record: Sequence[int]) -> Template:
        kind, group, context = record[ev.KIND], record[ev.GROUP], record[ev.CONTEXT]
        key = (part.map.model, kind, group, context % 4, *record[ev.A :])
        known = self._known.get(key)
        if known is None:
            if len(self._known) > 100_000:
                self._known.clear()
            args: dict[str, Value] = {name: value for name, _, value in fields_of(record, part.map, part.texts)}
            name = ev.KINDS[kind] + (f" {show_name(part.map.fqn(group))}" if group >= 0 else "")
            if kind in (ev.REGION, ev.RECOMPUTE) and args.get("name"):
                name += f" {args['name']}"
            known = self._known[key] = Template(name, ev.PASSES[context % 4], args)
        return known

    # -- what lies behind the calls -----------------------------------------------------------------------------------
    def _units(self, model: int, times: ModelTimes) -> None:
        names = {group.id: show_name(group.fqn) for group in times.map.groups}
        of_group: dict[int, list[Slice]] = {}
        pending: list[Slice] = []
        offset = self.offset
        for hold in times.holds:
            of_group.setdefault(hold.group, []).append(
                Slice(hold.t0 + offset, hold.t1 + offset, self._hold(names, hold), hold.seq or None)
            )
            if hold.ready and hold.seq:
                what = self._named(f"all-gather {names[hold.group]}", "collective", bytes=hold.bytes)
                pending.append(Slice(hold.t0 + offset, hold.ready + offset, what, hold.seq))
        for use in times.uses:
            pass_ = ev.PASSES[use.pass_]
            what = self._named(f"computing ({pass_})", pass_)
            of_group.setdefault(use.group, []).append(Slice(use.t0 + offset, use.t1 + offset, what, use.seq))
        several = f" of {times.map.root} (model {model})" if len(self._times.models) > 1 else ""
        self._put("", f"all-gathers from issue to use{several}", _COLLECTIVES, pending)
        for group in times.map.groups:
            if group.id in of_group:
                self._put(f"units{several}", show_name(group.fqn), _UNITS + group.id, of_group[group.id])

    def _hold(self, names: Mapping[int, str], hold: Hold) -> Template:
        args: dict[str, Value] = {"bytes": hold.bytes, "used": "yes" if hold.used else "no", "freed by": ENDS[hold.end]}
        if hold.issuer >= 0:
            args["asked for by"] = names[hold.issuer]
        name = "gathered" if hold.used or hold.end == ENDS.index("open") else "gathered, never used"
        return self._named(name, ev.PASSES[hold.pass_], **args)

    def _named(self, name: str, category: str, **args: Value) -> Template:
        """One template for all slices that say the same."""
        key = (name, category, *args.values())
        known = self._templates.get(key)
        if known is None:
            known = self._templates[key] = Template(name, category, args)
        return known

    def _bytes(self) -> None:
        for place, (model, times) in enumerate(sorted(self._times.models.items())):
            if not times.levels:
                continue
            name = "gathered bytes" + (f" of model {model}" if len(self._times.models) > 1 else "")
            self._curve(name, _BYTES + place, times.levels)

    def _curve(self, name: str, order: int, values: Sequence[tuple[int, int]]) -> None:
        track = self.number * _PER_PROCESS + len(self._tracks) + 1
        self._tracks["counter", name, 0] = track
        self.sink.counter(track, self.number, name, order)
        for at, value in values:
            self.sink.value(track, at + self.offset, value)

    def _violations(self, trace: ProcessTrace) -> None:
        for data in trace.violations:
            if (data["model"], data["step"]) not in self._shown or not isinstance(data.get("t0"), int):
                continue
            evidence = ", ".join(map(str, data["evidence"]))
            what = Template(f"{data['severity']}: {data['rule']} {show_name(data['fqn'])}", f"violation,{data['severity']}", {
                "message": data["message"], "what to change": data["hint"], "step": data["step"], "bytes": data["bytes"],
                "evidence": evidence,
            })  # fmt: skip
            self.sink.instant(self._track("", "found", _FOUND, 0), data["t0"] + self.offset, what)
            self.counts.violations += 1

    # -- tracks --------------------------------------------------------------------------------------------------------
    def _put(self, group: str, name: str, order: int, slices: Sequence[Slice]) -> None:
        for lane, items in nest(slices):
            self.sink.slices(self._track(group, name, order, lane), items)
            self.counts.slices += len(items)

    def _track(self, group: str, name: str, order: int, lane: int) -> int:
        number = self._tracks.get((group, name, lane))
        if number is None:
            number = self.number * _PER_PROCESS + len(self._tracks) + 1
            self._tracks[group, name, lane] = number
            self.sink.track(number, self.number, f"{name} ({lane + 1})" if lane else name, order, group)
        return number

    def put_foreign(self, group: str, name: str, order: int, slices: Sequence[Slice]) -> None:
        """Slices that another tool recorded of this rank, already in Unix time."""
        self._put(group, name, 10_000 + order, slices)
