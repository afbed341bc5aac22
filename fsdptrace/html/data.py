"""What the page shows, as plain data: columns of integers for the time axis, tables of numbers, texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from fsdptrace import events as ev
from fsdptrace._version import __version__
from fsdptrace.analysis import Finding, ProcessTrace, Run, read_process
from fsdptrace.analysis.device import STREAMS, DeviceSpan, device_spans
from fsdptrace.analysis.notes import ranks_text, spans
from fsdptrace.analysis.process import StepPart
from fsdptrace.analysis.records import fields_of
from fsdptrace.analysis.timeline import AFTERWARDS, ENDS, ModelTimes, ProcessTimes, clock_offsets
from fsdptrace.analysis.workers import Progress, advancing
from fsdptrace.checks.text import count, size
from fsdptrace.html import tables
from fsdptrace.html.choice import MAX_EVENTS, Choice, choose
from fsdptrace.summary import rows_of

MARKS = 5_000  # violations of one process that are marked on the time axis


def page_data(run: Run, limit: int = MAX_EVENTS, progress: Progress | None = None) -> dict[str, Any]:
    """All that the page needs; ``limit`` bounds the events on its time axis."""
    choice = choose(run, limit)
    processes, texts, base, shown = _timeline(run, choice, progress)
    return {
        "version": __version__,
        "run": _about(run, choice),
        "findings": [_finding(finding, run, shown) for finding in run.findings],
        "names": {"kinds": list(ev.KINDS), "passes": list(ev.PASSES), "ends": list(ENDS)},
        "base_ns": str(base),
        "texts": texts,
        "processes": processes,
        "steps": tables.step_lines(run),
        "tables": tables.tables(run),
        "memory": [tables.memory(model, run.several_models) for model in run.models],
        "coverage": run.coverage,
        "notes": run.notes,
        "problems": [str(problem) for problem in run.problems],
    }


def _about(run: Run, choice: Choice) -> dict[str, Any]:
    basis = run.basis
    torch = sorted({process.header.versions.get("torch", "?") for process in run.processes})
    shown = sorted({step for steps in choice.steps.values() for _, step in steps})
    ranks = sorted({run.processes[place].rank for place in choice.steps})
    left = ""
    if choice.left_out:
        left = (
            f"{ranks_text(ranks)}, steps {spans(shown)} on the time axis: {count(choice.left_out, 'more step')} (summed over "
            "ranks) with all events in the files did not fit; `fsdptrace view` shows all"
        )
    return {
        "label": run.label, "folder": str(run.folder), "ranks": basis.ranks, "world_size": basis.world_size,
        "steps": basis.steps, "events": basis.events, "torch": ", ".join(torch), "rules": list(basis.rules),
        "partly": list(basis.partly), "left_out": left, "others": run.others,
    }  # fmt: skip


def _finding(finding: Finding, run: Run, shown: Callable[[int, int], bool]) -> dict[str, Any]:
    data = asdict(finding)
    data["steps_text"] = spans(finding.steps)
    data["ranks_text"] = ranks_text(finding.ranks)
    files = [str(process.source.path) for process in run.processes]
    data["place"] = files.index(finding.first.file) if finding.first.file in files else -1
    data["shown"] = shown(data["place"], finding.first.seq)
    return data


# -- the time axis -----------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Texts:
    """Strings that recur, by number."""

    numbers: dict[str, int] = field(default_factory=dict)

    def put(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def _timeline(
    run: Run, choice: Choice, progress: Progress | None
) -> tuple[list[dict[str, Any]], list[str], int, Callable[[int, int], bool]]:
    """The processes on one clock, times in ns since ``base`` (Unix ns); and whether an event of a process is among them."""
    offsets = clock_offsets(run.processes)
    texts = _Texts()
    texts.put("")
    made: list[_Read] = []
    advance = advancing([run.processes[place].source for place in choice.steps], progress)
    for place, process in enumerate(run.processes):
        if place not in choice.steps:
            continue
        calls = _Calls(texts)
        times = ProcessTimes(lambda model, step, place=place: (place, model, step) in choice, calls.take)  # type: ignore[misc]
        device = _Device(lambda model, step, place=place: (place, model, step) in choice)  # type: ignore[misc]
        trace = read_process(process.source, times, advance, device)
        times.finish()
        made.append(_Read(calls, times, device, trace, place))
    base = min((offsets[read.place] + read.calls.first for read in made if read.calls.rows), default=0)
    processes = [_process(read, offsets[read.place] - base, texts) for read in made]
    seen = {read.place: {row[2] for row in read.calls.rows} for read in made}
    return processes, list(texts.numbers), base, lambda place, seq: seq in seen.get(place, ())


class _Calls:
    """Every event of one process that is shown, as one row."""

    def __init__(self, texts: _Texts) -> None:
        self.rows: list[tuple[int, ...]] = []  # t0, -t1, seq, kind, model, group, parent, pass, text, step
        self.steps: list[tuple[int, int, int, int]] = []  # model, step, first t0, last t1
        self.first = 1 << 62
        self.allocated: list[tuple[int, int]] = []  # when, and bytes that the device's allocator had given out
        self._texts = texts
        self._known: dict[tuple[int, ...], int] = {}

    def take(self, part: StepPart) -> None:
        """The records of one step."""
        low, high = 1 << 62, 0
        for record in rows_of(part.records):
            kind, seq, t0, t1, group, parent, context = record[: ev.A]
            if kind not in AFTERWARDS:
                low, high = min(low, t0), max(high, t1)
            if kind == ev.MEMORY:
                self.allocated.append((t0, record[ev.A]))
            text = self._text(part, record)
            self.rows.append((t0, -t1, seq, kind, part.map.model, group, parent, context % 4, text, part.step))
        if high:
            self.steps.append((part.map.model, part.step, low, high))
            self.first = min(self.first, low)

    def _text(self, part: StepPart, record: Sequence[int]) -> int:
        key = (part.map.model, record[ev.KIND], record[ev.GROUP], *record[ev.A :])
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._texts.put(describe(part, record))
        return known


class _Device:
    """What the device did in the steps that are shown, by model."""

    def __init__(self, wanted: Callable[[int, int], bool]) -> None:
        self._wanted = wanted
        self.spans: dict[int, list[tuple[DeviceSpan, int]]] = {}  # with the step

    def __call__(self, data: Mapping[str, Any]) -> None:
        """A line of it, from the reader."""
        model, step = int(data["model"]), int(data["step"])
        if self._wanted(model, step):
            self.spans.setdefault(model, []).extend([(span, step) for span in device_spans(data)])  # all of it or none

    def streams(self, model: int) -> list[str]:
        """Those of a model on which something ran, in the order in which they are shown."""
        there = {span.stream for span, _ in self.spans.get(model, ())}
        return [stream for stream in dict.fromkeys(STREAMS.values()) if stream in there]


@dataclass(frozen=True, slots=True)
class _Read:
    calls: _Calls
    times: ProcessTimes
    device: _Device
    trace: ProcessTrace
    place: int


def describe(part: StepPart, record: Sequence[int]) -> str:
    """The fields of a record's kind for a reader, one a line."""
    shown = []
    for name, codec, value in fields_of(record, part.map, part.texts):
        if codec == "bytes" or name == "wire_bytes":
            value = size(value)
        elif codec == "ns":
            value = f"{value:,} ns"
        shown.append(f"{name.replace('_', ' ')}: {value}")
    return "\n".join(shown)


Column = list[int] | dict[str, list[int]]
_Lanes = Mapping[tuple[int, "int | str"], int]


def _process(read: _Read, shift: int, texts: _Texts) -> dict[str, Any]:
    header, calls, models = read.trace.header, read.calls, read.times.models
    lanes: dict[tuple[int, int | str], int] = {}  # by model, and group or stream of the device
    listed: list[dict[str, Any]] = []
    for number, model in sorted(models.items()):
        for group in (ev.NONE, *read.device.streams(number), *range(len(model.map.groups))):
            lanes[number, group] = len(listed)
            info = model.map.groups[group] if isinstance(group, int) and group >= 0 else None
            listed.append({
                "model": number, "root": model.map.root, "name": info.fqn if info else "", "group": group if info else ev.NONE,
                "bytes": info.bytes if info else 0, "stream": group if isinstance(group, str) else "",
            })  # fmt: skip
    calls.rows.sort()
    steps = sorted(calls.steps, key=lambda step: step[2])
    return {
        "place": read.place, "rank": header.rank, "role": header.role, "host": header.host, "pid": header.pid,
        "lanes": listed,
        "steps": [[model, step, low + shift, high + shift] for model, step, low, high in steps],
        "calls": _call_columns(calls.rows, lanes, shift),
        "holds": _hold_columns(models, lanes, shift),
        "uses": _use_columns(models, lanes, shift),
        "device": _device_columns(read.device, lanes, shift),
        "levels": _level_columns(list(models.values()), shift),
        "allocated": {
            "t": _deltas([at + shift for at, _ in sorted(calls.allocated)]),
            "bytes": _deltas([bytes_ for _, bytes_ in sorted(calls.allocated)]),
        },
        "marks": _marks(read.trace, {(m, s) for m, s, _, _ in calls.steps}, calls.rows, texts),
    }  # fmt: skip


def _deltas(values: Sequence[int]) -> list[int]:
    """Differences: shorter as text than the numbers themselves."""
    return [value - before for before, value in zip([0, *values], values, strict=False)]


def _runs(values: Sequence[int]) -> Column:
    """The values as runs, where that is shorter: value, how often, value, how often …"""
    runs: list[int] = []
    for value, alike in groupby(values):
        runs += (value, sum(1 for _ in alike))
    return {"runs": runs} if 2 * len(runs) < len(values) else list(values)


def _call_columns(rows: Sequence[tuple[int, ...]], lanes: _Lanes, shift: int) -> dict[str, Column]:
    depth: list[int] = []
    open_until: dict[int, list[int]] = {}  # lane: ends of the calls that the next one may lie in
    for t0, minus_t1, _seq, _kind, model, group, *_rest in rows:
        stack = open_until.setdefault(lanes[model, group], [])
        while stack and stack[-1] <= t0:
            stack.pop()
        depth.append(min(len(stack), 9))
        stack.append(-minus_t1)
    return {
        "t0": _deltas([row[0] + shift for row in rows]), "dur": [-row[1] - row[0] for row in rows],
        "seq": _runs(_deltas([row[2] for row in rows])), "kind": [row[3] for row in rows],
        "lane": [lanes[row[4], row[5]] for row in rows], "parent": _runs([row[2] - row[6] if row[6] else 0 for row in rows]),
        "pass": _runs([row[7] for row in rows]), "text": [row[8] for row in rows], "step": _runs([row[9] for row in rows]),
        "depth": _runs(depth),
    }  # fmt: skip


def _hold_columns(models: dict[int, ModelTimes], lanes: _Lanes, shift: int) -> dict[str, list[int]]:
    holds = sorted(((hold, number) for number, model in models.items() for hold in model.holds), key=lambda item: item[0].t0)
    return {
        "t0": _deltas([hold.t0 + shift for hold, _ in holds]), "dur": [hold.t1 - hold.t0 for hold, _ in holds],
        "ready": [hold.ready - hold.t0 if hold.ready else -1 for hold, _ in holds],
        "lane": [lanes[number, hold.group] for hold, number in holds], "pass": [hold.pass_ for hold, _ in holds],
        "bytes": [hold.bytes for hold, _ in holds], "seq": [hold.seq for hold, _ in holds],
        "use": [hold.use_seq for hold, _ in holds], "end": [hold.end for hold, _ in holds],
        "end_seq": [hold.end_seq for hold, _ in holds],
        "issuer": [lanes.get((number, hold.issuer), -1) if hold.issuer >= 0 else -1 for hold, number in holds],
    }  # fmt: skip


def _use_columns(models: dict[int, ModelTimes], lanes: _Lanes, shift: int) -> dict[str, list[int]]:
    uses = sorted(((use, number) for number, model in models.items() for use in model.uses), key=lambda item: item[0].t0)
    return {
        "t0": _deltas([use.t0 + shift for use, _ in uses]), "dur": [use.t1 - use.t0 for use, _ in uses],
        "lane": [lanes[number, use.group] for use, number in uses], "pass": [use.pass_ for use, _ in uses],
    }  # fmt: skip


def _device_columns(device: _Device, lanes: _Lanes, shift: int) -> dict[str, list[int]]:
    known = [
        (span, step, model) for model, spans in device.spans.items() for span, step in spans if (model, span.stream) in lanes
    ]
    known.sort(key=lambda item: (item[0].t0, -item[0].t1))
    return {
        "t0": _deltas([span.t0 + shift for span, _, _ in known]), "dur": [span.t1 - span.t0 for span, _, _ in known],
        "lane": [lanes[model, span.stream] for span, _, model in known], "pass": [span.pass_ for span, _, _ in known],
        "unit": [lanes.get((model, span.group), -1) if span.group >= 0 else -1 for span, _, model in known],
        "seq": [span.seq for span, _, _ in known], "exposed": [span.exposed for span, _, _ in known],
        "step": [step for _, step, _ in known],
    }  # fmt: skip


def _level_columns(models: Sequence[ModelTimes], shift: int) -> dict[str, list[int]]:
    """Gathered bytes of all models of the process together, each from its moment on."""
    changes: list[tuple[int, int]] = []
    for model in models:
        before = 0
        for at, level in model.levels:
            changes.append((at, level - before))
            before = level
    changes.sort()
    times: list[int] = []
    values: list[int] = []
    held = 0
    for at, change in changes:
        held += change
        if times and times[-1] == at:
            values[-1] = held
        else:
            times.append(at)
            values.append(held)
    return {"t": _deltas([at + shift for at in times]), "bytes": _deltas(values)}


def _marks(trace: ProcessTrace, shown: set[tuple[int, int]], rows: Sequence[tuple[int, ...]], texts: _Texts) -> list[list[Any]]:
    """``[position of the call that broke the rule, severity, rule, message]`` of violations in the steps that are shown."""
    place = {row[2]: number for number, row in enumerate(rows)}
    marks: list[list[Any]] = []
    for data in trace.violations:
        at = data["evidence"][-1] if data["evidence"] else data["seq"]
        if (data["model"], data["step"]) in shown and at in place and len(marks) < MARKS:
            marks.append([place[at], texts.put(data["severity"]), texts.put(data["rule"]), texts.put(data["message"])])
    return sorted(marks)
