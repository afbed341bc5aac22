"""One process's files, read once, line by line: what they say of the process, and each step's events handed on.

Memory stays that of one step, however long the trace.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdptrace import events as ev
from fsdptrace.analysis import order, scan
from fsdptrace.analysis.device import DeviceSums
from fsdptrace.analysis.process import ProcessTrace, StepPart
from fsdptrace.analysis.records import PARSE_ERRORS, parse, record_of
from fsdptrace.analysis.sources import Problem, Source
from fsdptrace.analysis.steplines import StepLine
from fsdptrace.model_map import ModelMap

BAD_LINE: tuple[type[Exception], ...] = (
    *PARSE_ERRORS, KeyError, TypeError, IndexError, AttributeError, OverflowError,
)  # fmt: skip
KEPT_VIOLATIONS = 200_000  # violation lines of one process that are looked at; the rest is counted


@dataclass(slots=True)
class RunningStep:
    """The step of one model that is being read."""

    step: int
    records: array[int] = field(default_factory=lambda: array("q"))
    violations: int = 0
    sent: int | None = None  # the last step handed on
    last_end: int = 0  # when the last step ended, 0 before
    damaged: bool = False  # a line was lost while it was read


def _nobody(count: int) -> None:
    pass


def read_process(
    source: Source,
    sink: Callable[[StepPart], None] | None = None,
    advance: Callable[[int], None] = _nobody,
    device: Callable[[Mapping[str, Any]], None] | None = None,
) -> ProcessTrace:
    """Reads the files of ``source``; ``sink`` gets every step in turn, unfinished ones at the end; ``advance`` is told how many
    bytes were read, bit by bit; ``device`` gets every ``device_times`` line that could be read.

    Lines that cannot be read are counted and named in ``problems``, never fatal.
    """
    reader = LineReader(ProcessTrace(source), sink or (lambda part: None), advance)
    reader.on_device = device
    for part in source.parts:
        reader.read(part)
    if source.tail is not None and reader.trace.end is None:
        reader.read(source.tail, tail=True)
    reader.finish()
    return reader.trace


class LineReader:
    """Takes the lines of one process in turn; ``sink`` gets every step. :func:`read_process` is the usual way to use it."""

    def __init__(self, trace: ProcessTrace, sink: Callable[[StepPart], None], advance: Callable[[int], None] = _nobody) -> None:
        self.trace = trace
        self._sink = sink
        self.on_device: Callable[[Mapping[str, Any]], None] | None = None
        self._advance = advance
        self._texts = ev.Texts()
        self.running: dict[int, RunningStep] = {}
        self._known: set[int] | None = None  # while a tail is read: events that the file itself has
        self._forms = scan.Forms()
        self._bad: list[int] = []
        self._torn = False
        self._out_of_order = ""

    def read(self, path: Path, tail: bool = False) -> None:
        self._bad, self._torn = [], False
        if tail:
            self._known = {seq for running in self.running.values() for seq in running.records[ev.SEQ :: ev.WIDTH]}
        number = 0
        try:
            with open(path, "rb") as stream:
                for rows in scan.rows(stream, self._advance):
                    if tail:
                        for i, row in enumerate(rows, number + 1):
                            self._slowly(i, row)
                    else:
                        self._rows(rows, number)
                    number += len(rows)
        except OSError as error:
            self.trace.problems.append(Problem(path, f"cannot be read on from line {number + 1}: {error.strerror or error}"))
        self._tell(path, self._bad, self._torn)

    def _rows(self, rows: Sequence[scan.Row], number: int) -> None:
        """Lines of the usual form by what is known of it, those of one step together; the others one by one."""
        known = self._forms.known
        trace = self.trace
        batch: list[int] = []
        at: tuple[int, bytes] | None = None  # the model and step of the batch
        for row in rows:
            number += 1
            seq, head, t0, t1, step, parent, region, rest, _ = row
            form = known.get((head, rest))
            if form is None or trace.entered is not None:
                if batch and at is not None:
                    self._take_batch(at, batch)
                    batch = []
                self._slowly(number, row)
                continue
            model, kind, group, context, a, b, c, d, e = form
            if at != (model, step):
                if batch and at is not None:
                    self._take_batch(at, batch)
                    batch = []
                at = (model, step)
            a = int(region) if region else a
            batch += (kind, int(seq), int(t0), int(t1), group, int(parent or 0), context, a, b, c, d, e)
        if batch and at is not None:
            self._take_batch(at, batch)

    def _take_batch(self, at: tuple[int, bytes], batch: list[int]) -> None:
        self._step_of(at[0], int(at[1])).records.fromlist(batch)
        self.trace.events += len(batch) // ev.WIDTH

    def _slowly(self, number: int, row: scan.Row) -> None:
        """One line through the parser."""
        raw = scan.whole(row)
        try:
            data = parse(raw)
            record = self.take(data)
            if record is not None and row[0]:
                self._forms.learn(row, record, data["step"])
        except BAD_LINE:
            self._bad.append(number)
            self._torn = not raw.endswith(b"\n")
            for running in self.running.values():
                running.damaged |= not self._torn

    def _tell(self, path: Path, bad: list[int], torn: bool) -> None:
        if torn:
            bad.pop()
            self.trace.problems.append(Problem(path, "its last line is cut off, as a killed process or a copy leaves it"))
        self.trace.damaged += len(bad) + torn
        if bad:
            shown = ", ".join(map(str, bad[:5])) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
            word = "line" if len(bad) == 1 else "lines"
            self.trace.problems.append(
                Problem(path, f"{word} {shown} cannot be read (damaged, or of another version); the rest is used")
            )

    def line(self, raw: bytes) -> None:
        """One whole line; raises one of :data:`BAD_LINE` when it cannot be read."""
        row = scan.cut(raw)
        seq, head, t0, t1, step, parent, region, rest, _ = row
        form = self._forms.known.get((head, rest)) if seq else None
        if form is not None and self.trace.entered is None:
            model, kind, group, context, a, *data = form
            a = int(region) if region else a
            record = [kind, int(seq), int(t0), int(t1), group, int(parent or 0), context, a, *data]
            self._take_batch((model, step), record)
            return
        parsed = parse(raw)
        learned = self.take(parsed)
        if learned is not None and row[0]:
            self._forms.learn(row, learned, parsed["step"])

    def take(self, data: dict[str, Any]) -> tuple[int, ...] | None:
        """Takes a parsed line up; the record, where it is one of an event."""
        if "schema" in data:
            return None
        kind = data["kind"]
        if kind == "violation":
            self._violation(data)
        elif kind == "step":
            self._end_step(data)
        elif kind in ev.KIND_NUMBER:
            return self._event(data)
        elif kind == "model":
            self._model(ModelMap.from_json(data))
        elif kind in ("heartbeat", "entered", "signal"):
            self._sign_of_life(kind, data)
        elif kind == "device_times":
            number = int(data["model"])
            self.trace.device.setdefault(number, DeviceSums()).take(data, self.trace.models[number])
            if self.on_device is not None:
                self.on_device(data)
        elif kind == "coverage":
            self.trace.coverage.append(str(data["line"]))
        elif kind == "end":
            self.trace.end = data
            self.trace.dropped = int(data.get("dropped", 0))
        # Lines of kinds that a later version added are skipped: they are not damage.
        return None

    def _model(self, model: ModelMap) -> None:
        if any(group.id != number for number, group in enumerate(model.groups)):
            raise ValueError("groups are not numbered in order")
        known = self.trace.models.get(model.model)
        if known == model:  # each further part of a file begins with them again
            return
        if known is not None and len(model.groups) < len(known.groups):
            raise ValueError("fewer groups than before: units do not go away")
        if known is not None and [g.id for g in known.groups] != [g.id for g in model.groups]:
            self._flush(model.model, None)
        self.trace.models[model.model] = model
        self._forms.known.clear()  # what a line leaves out may be another value now
        self._forms.known.update(scan.lent.get(self.trace.models))

    def _event(self, data: dict[str, Any]) -> tuple[int, ...] | None:
        number = data.get("model", 0)
        model = self.trace.models[number]
        record = record_of(data, model, self._texts)
        if self._known is not None and record[ev.SEQ] in self._known:
            return None
        running = self._step_of(number, data["step"])
        before = len(running.records)
        try:
            running.records.extend(record)
        except (TypeError, OverflowError):
            del running.records[before:]
            raise
        trace = self.trace
        trace.events += 1
        if trace.entered is not None:
            self._maybe_left(data)
        if record[0] == ev.EXCEPTION:
            trace.failed = data
            unit = data.get("unit")
            fqn = model.units[unit].fqn if isinstance(unit, int) and 0 <= unit < len(model.units) else ""
            trace.exceptions = [*trace.exceptions[-9:], (running.step, str(data.get("type", "")), fqn)]
        return record

    def _step_of(self, model: int, step: int) -> RunningStep:
        running = self.running.get(model)
        if running is None:
            running = self.running[model] = RunningStep(int(step))
        elif step != running.step:
            if running.sent is not None and step <= running.sent:
                self.trace.apart = True
                self._out_of_order = self._out_of_order or f"step {step} comes again after step {running.sent}"
            if running.records or running.violations:  # its line was lost
                self._flush(model, None)
            running.step = int(step)
        return running

    def _violation(self, data: dict[str, Any]) -> None:
        trace = self.trace
        for name in ("rule", "severity", "message"):
            data[name] = str(data[name])
        for name in ("fqn", "hint", "cause"):
            data[name] = str(data.get(name) or "")
        for name in ("seq", "step"):
            data[name] = int(data[name])
        data["bytes"] = int(data.get("bytes") or 0)
        data["evidence"] = [int(seq) for seq in data.get("evidence") or ()]
        data["model"] = int(data.get("model") or 0)
        if self._known is not None and any(known["seq"] == data["seq"] for known in trace.violations[-100:]):
            return
        running = self._step_of(data["model"], data["step"])
        running.violations += 1
        trace.events += 1
        trace.last_seq = max(trace.last_seq, data["seq"])
        trace.violation_count += 1
        if len(trace.violations) < KEPT_VIOLATIONS:
            trace.violations.append(data)
        else:
            trace.lost_violations += 1

    def _end_step(self, data: dict[str, Any]) -> None:
        number = int(data.get("model", 0))
        model = self.trace.models[number]
        record = record_of(data, model, self._texts)
        counts = data.get("counts")
        counts = {str(kind): int(times) for kind, times in counts.items()} if isinstance(counts, dict) else None
        running = self._step_of(number, data["step"])
        seqs = running.records[ev.SEQ :: ev.WIDTH]
        if len(set(seqs)) < len(seqs):
            running.records = order.once(running.records)
            self._out_of_order = self._out_of_order or f"events of step {running.step} stand there twice"
        dropped = int(data.get("step_dropped", 0))
        full = not dropped and counts is not None and _all_there(running, counts)
        lost = (counts or {}).get("violation", 0) - running.violations
        self.trace.lost_violations += max(0, lost)
        started = running.last_end or (running.records[ev.T0] if running.records else 0)
        line = StepLine(
            model=number, step=running.step, full=full, seq=record[ev.SEQ], t=record[ev.T1],
            duration_ns=max(0, record[ev.T1] - started) if started else 0,
            events=sum(counts.values()) + 1 if counts is not None else len(running.records) // ev.WIDTH + 1,
            gathers=(counts or {}).get("unshard", 0), violations=max(running.violations, (counts or {}).get("violation", 0)),
            dropped=dropped, unsharded_bytes=record[ev.A], unsharded_peak=record[ev.A + 1],
            past_backward_bytes=record[ev.A + 2], past_backward_peak=record[ev.A + 4],
        )  # fmt: skip
        self.trace.steps.append(line)  # which refuses what is no 64-bit integer
        running.records.extend(record)
        running.last_end = line.t
        self.trace.events += 1
        self.trace.dropped = max(self.trace.dropped, record[ev.A + 3])
        self.trace.last_seq = max(self.trace.last_seq, line.seq)
        self.trace.last_t = max(self.trace.last_t, line.t)
        self._flush(number, line)

    def _flush(self, model: int, line: StepLine | None, at_end: bool = False) -> None:
        """Hands the running step on and begins the next one."""
        if model not in self.trace.models:  # its line was lost, and all that is here are violations
            del self.running[model]
            return
        running = self.running[model]
        contiguous = running.step == 0 if running.sent is None else running.step == running.sent + 1
        records, running.records = running.records, array("q")
        running.violations = 0
        if records:
            ends = records[ev.T1 :: ev.WIDTH]
            if order.disturbed(records):
                records = order.by_end(records)
                self._out_of_order = self._out_of_order or f"step {running.step} was put in order by the ends of its calls"
            self.trace.last_seq = max(self.trace.last_seq, max(records[ev.SEQ :: ev.WIDTH]))
            self.trace.last_event = max(self.trace.last_event, max(ends))
            self.trace.last_t = max(self.trace.last_t, self.trace.last_event)
            self._memory(model, records)
        full = line is not None and line.full
        part = StepPart(
            self.trace.models[model], running.step, records, self._texts, line, full,
            full or (at_end and not running.damaged and not self.trace.apart), contiguous,
        )  # fmt: skip
        running.damaged = False
        running.sent = running.step
        running.step += 1
        self._sink(part)

    def _memory(self, model: int, records: array[int]) -> None:
        """What the accelerator's allocator held at most."""
        kinds = records[ev.KIND :: ev.WIDTH]
        if ev.MEMORY in kinds:
            sums = self.trace.device.setdefault(model, DeviceSums())
            for kind, allocated, reserved in zip(kinds, records[ev.A :: ev.WIDTH], records[ev.A + 1 :: ev.WIDTH], strict=True):
                if kind == ev.MEMORY:
                    sums.memory(allocated, reserved)

    def _sign_of_life(self, kind: str, data: dict[str, Any]) -> None:
        trace = self.trace
        t = int(data["t"])
        trace.last_t = max(trace.last_t, t)
        if kind == "entered":
            which = {"which": str(data["which"])} if "which" in data else {}
            trace.entered = {"kind": str(data["what"]), "model": data["model"], "group": data["group"], **which, "t": t}
            trace.last_entered = trace.entered
            return
        if kind == "signal":
            trace.signal = data
        if "held" in data:
            trace.stands = {name: data[name] for name in ("at", "held", "stack", "moved", "last") if name in data}
        trace.last_seq = max(trace.last_seq, int(data.get("last", 0)))
        trace.dropped = max(trace.dropped, int(data.get("dropped", 0)))
        collective = data.get("collective")
        if isinstance(collective, dict):
            trace.entered = {**collective, "t": t}
        elif trace.entered is not None and t > trace.entered["t"]:
            trace.entered = None

    def _maybe_left(self, data: Mapping[str, Any]) -> None:
        """Forgets the collective that was entered once an event says that it ended."""
        entered = self.trace.entered
        assert entered is not None
        same = (entered.get("kind"), entered.get("model", 0), entered.get("group"))
        if same == (data["kind"], data.get("model", 0), data.get("group")) and data["t1"] >= entered["t"]:
            self.trace.entered = None

    def finish(self) -> None:
        """The end of the files: what is left belongs to steps that were not finished."""
        for model, running in list(self.running.items()):
            if running.records or running.violations:
                self.trace.running_step[model] = running.step
                self.trace.running_events[model] = len(running.records) // ev.WIDTH
                self._flush(model, None, at_end=True)
        scan.lent.put(self.trace.models, self._forms)
        if self.trace.apart:  # the lines that say where it stood are in no order either
            self.trace.entered = self.trace.last_entered = None
        if self._out_of_order:
            said = f"its lines are not in the order in which they were written ({self._out_of_order}), as sorting or joining"
            said += " by another tool leaves them; steps that are torn apart are not in the tables"
            self.trace.problems.append(Problem(self.trace.source.path, said))


def _all_there(running: RunningStep, counts: Mapping[str, int]) -> bool:
    """Whether every event that the step's line counts was read."""
    seen = Counter(running.records[ev.KIND :: ev.WIDTH])
    return running.violations >= counts.get("violation", 0) and all(
        seen[ev.KIND_NUMBER[kind]] >= times
        for kind, times in counts.items()
        if kind in ev.KIND_NUMBER and kind not in ("violation", "step")
    )
