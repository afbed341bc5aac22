"""Reading files that are still growing, from a position that was kept: what exporters stand on.

The files themselves are the queue between a training process and whatever takes its traces: a follower reads only as fast as
its steps are taken, and a position says from where another one goes on.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from fsdptrace import events as ev
from fsdptrace.analysis.device import StepOnDevice
from fsdptrace.analysis.lines import BAD_LINE, LineReader, RunningStep
from fsdptrace.analysis.process import ProcessTrace, StepPart
from fsdptrace.analysis.records import parse
from fsdptrace.analysis.sources import Header, Problem, Source, exists
from fsdptrace.analysis.steplines import StepLines

SILENCE = 5.0  # seconds without a line after which a process that is not there any more is taken for dead
_LONGEST_LINE = 1 << 24
_SEQ = re.compile(rb'\{"seq": ?(\d{1,18})')
_NO_EVENT = frozenset(("step", "heartbeat", "model", "active_span", "thinned", "entered", "device_times", None))
#: Lines that are no events of a step, for sinks that need no others.
FEW_LINES = re.compile(rb'"kind": ?"(?:step|violation|exception|heartbeat|entered|model|active_span|thinned|end)"|"schema"')


@dataclass(slots=True)
class Position:
    """Where a reader of one process's files stands.

    Attributes:
        part, offset: everything before this byte of this part has been taken.
        inode: of that part when it was read: a part that was thinned since is another file, and is read from its start.
        taken: newest step that was taken and when it ended, by model; steps up to it are passed over when they are read again.
        ended: how the process ended, once that was taken too; see :class:`Follower`.
        timed: newest step whose device times were taken, by model; lines of these that are read again are passed over.
    """

    part: int = 0
    offset: int = 0
    inode: int = 0
    taken: dict[int, tuple[int, int]] = field(default_factory=dict)
    ended: str = ""
    timed: dict[int, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        taken = {str(model): list(last) for model, last in self.taken.items()}
        timed = {str(model): step for model, step in self.timed.items()}
        return {**asdict(self), "taken": taken, "timed": timed}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Position:
        """Reads what :meth:`to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        taken = {int(model): (int(step), int(t)) for model, (step, t) in data["taken"].items()}
        timed = {int(model): int(step) for model, step in data.get("timed", {}).items()}
        return cls(int(data["part"]), int(data["offset"]), int(data["inode"]), taken, str(data["ended"]), timed)


@dataclass(frozen=True, slots=True)
class FollowedStep:
    """One step of one model, as a follower hands it on.

    Attributes:
        part: its events; ``part.line`` is None where the process ended within it.
        violations: its violation lines.
        spans: W3C ``traceparent`` of the spans of the program's own that were active when it began.
        comm: gathers and reductions by mesh, whatever was written in full (see :mod:`fsdptrace.totals`).
        position: where a reader goes on that has taken it and everything before it.
    """

    part: StepPart
    violations: list[dict[str, Any]]
    spans: list[str]
    comm: Mapping[str, Mapping[str, int]]
    position: Position


class _Reader(LineReader):
    """Remembers what the lines say besides the events."""

    def __init__(self, trace: ProcessTrace, sink: Callable[[StepPart], None]) -> None:
        super().__init__(trace, sink)
        self.spans: dict[tuple[int, int], list[str]] = {}
        self.comm: dict[tuple[int, int], Mapping[str, Mapping[str, int]]] = {}
        self.device: list[StepOnDevice] = []
        self.timed: dict[int, int] = {}
        self.thinned = 0
        self.drain_ns = 0
        self.progress_t = 0
        self.boundary = False  # whether the last line was none of an event within a step

    def line(self, raw: bytes) -> None:
        self.boundary = False
        super().line(raw)

    def take(self, data: dict[str, Any]) -> tuple[int, ...] | None:
        kind = data.get("kind")
        self.boundary = kind in _NO_EVENT
        if kind == "active_span":
            self.spans.setdefault((int(data["model"]), int(data["step"])), []).append(str(data["traceparent"]))
            return None
        if kind == "thinned":
            self.thinned += int(data["events"])
            return None
        if kind == "step" and isinstance(comm := data.get("comm"), dict):
            self.comm[int(data.get("model", 0)), int(data["step"])] = {
                str(mesh): {str(name): int(value) for name, value in sums.items()} for mesh, sums in comm.items()
            }
        before = self.trace.last_seq
        record = super().take(data)
        if kind == "device_times":
            times = StepOnDevice.read(data)
            if times.step > self.timed.get(times.model, -1):
                self.timed[times.model] = times.step
                self.device.append(times)
        if self.trace.last_seq > before:
            self.progress_t = self.trace.last_t
        if kind in ("heartbeat", "end") and "drain_ns" in data:
            self.drain_ns = int(data["drain_ns"])
        return record

    def newest(self) -> int:
        """The highest number of an event so far."""
        running = (max(step.records[ev.SEQ :: ev.WIDTH], default=0) for step in self.running.values())
        return max(self.trace.last_seq, *running, 0)

    def empty(self) -> bool:
        """Whether no step has begun that is not over."""
        return not self.spans and not any(running.records or running.violations for running in self.running.values())

    def go_on(self, model: int, step: int, t: int) -> None:
        """Step ``step`` of ``model`` was handed on by another reader; it ended at ``t``."""
        self.running[model] = RunningStep(step + 1, sent=step, last_end=t)


class Follower:
    """Reads the files of one process as they grow.

    Args:
        source: its files as they are now; further parts are found as they appear.
        sink: gets every step that ``position`` does not say was taken.
        position: where to begin.
        lines: where given, other lines than these are passed over unread.

    Attributes:
        trace: what the files said so far; its lists of steps and violations are emptied as the steps are handed on.
        ended: ``""`` while the process runs, ``"end"`` after an orderly end, ``"died"`` when it went without a word.
        grew: when a line was last read (monotonic seconds).
        missed: events that were thinned out of the files, or whose part was gone, before they were read.
    """

    def __init__(
        self,
        source: Source,
        sink: Callable[[FollowedStep], None],
        position: Position | None = None,
        lines: re.Pattern[bytes] | None = None,
    ) -> None:
        self._sink = sink
        self._lines = lines
        self.trace = ProcessTrace(source)
        self._reader = _Reader(self.trace, self._step)
        self._stem = source.path.with_name(source.path.name.removesuffix(".jsonl"))
        start = self._start = position or Position()
        self.ended = start.ended
        self.grew = time.monotonic()
        self.missed = 0
        self._stream: BinaryIO | None = None
        self._part = start.part
        self._offset = 0
        self._inode = 0
        self._gap = 0
        self._taken = dict(start.taken)
        self._mark = (0, 0, 0)
        if self.ended:
            self._mark = (start.part, start.offset, start.inode)
            return
        self._reader.timed.update(start.timed)
        if start.part or start.offset:
            self._read_models()
            for model, (step, t) in start.taken.items():
                self._reader.go_on(model, step, t)
        self._open(start.part)
        if self._stream is not None and (self._part, self._inode) == (start.part, start.inode):
            self._offset = start.offset
            self._stream.seek(start.offset)
        self._advance()

    @property
    def header(self) -> Header:
        """The header of the files."""
        return self.trace.header

    @property
    def path(self) -> Path:
        """The first file."""
        return self.trace.source.path

    @property
    def position(self) -> Position:
        """Where another reader would go on, everything handed on so far being taken."""
        return Position(*self._mark, dict(self._taken), self.ended, dict(self._reader.timed))

    @property
    def drain_ns(self) -> int:
        """CPU time of the process's drain thread, as last said."""
        return self._reader.drain_ns

    def take_device(self) -> list[StepOnDevice]:
        """Device times that were read since the last call; as a rule a step's come after the step itself."""
        taken, self._reader.device = self._reader.device, []
        return taken

    @property
    def progress_t(self) -> int:
        """When the process last recorded an event, ns of its clock, as far as one knows; 0 before any."""
        return self._reader.progress_t

    def file(self, part: int) -> Path:
        """The path of a part."""
        return self._stem.with_name(f"{self._stem.name}{f'.{part}' if part else ''}.jsonl")

    def _read_models(self) -> None:
        """The models that the first part begins with; where reading goes on further in, others come before it."""
        limit = self._start.offset if not self._start.part else None
        try:
            with open(self.file(0), "rb") as stream:
                for raw in stream:
                    if limit is not None and stream.tell() > limit:
                        break
                    if b'"kind":"model"' in raw[:400] or b'"kind": "model"' in raw[:400]:
                        try:
                            self._reader.take(parse(raw))
                        except BAD_LINE:
                            continue
        except OSError:
            pass

    def _open(self, part: int) -> bool:
        """Opens ``part``, or the first one after it that is there."""
        number = self._find(part)
        if number is None:
            return False
        try:
            stream = open(self.file(number), "rb")  # noqa: SIM115 (closed when the next one is opened)
        except OSError:
            return False
        if self._stream is not None:
            self._stream.close()
        self._stream = stream
        self._part, self._offset = number, 0
        self._inode = os.fstat(stream.fileno()).st_ino
        return True

    def _find(self, part: int) -> int | None:
        if self.file(part).exists():
            return part
        stem = self._stem.name
        later = []
        for path in self._stem.parent.glob("*.jsonl"):
            name = path.name.removesuffix(".jsonl")
            if name.startswith(f"{stem}.") and (number := name[len(stem) + 1 :]).isdigit() and int(number) > part:
                later.append(int(number))
        return min(later, default=None)

    # -- reading -------------------------------------------------------------------------------------------------------
    def read(self, limit: int = 2000) -> int:
        """Reads up to ``limit`` lines, handing finished steps on; how many it read. 0 means: nothing new."""
        count = 0
        while count < limit and not self.ended:
            if self._stream is None and not self._open(self._part):
                break
            raw = self._line()
            if raw is not None:
                count += 1
                self._take(raw)
            elif not self._next_part():
                break
        if count:
            self.grew = time.monotonic()
        return count

    def _line(self) -> bytes | None:
        """The next whole line; None where there is none yet."""
        assert self._stream is not None
        raw = self._stream.readline(_LONGEST_LINE)
        if not raw.endswith(b"\n") and len(raw) < _LONGEST_LINE:
            if raw:
                self._stream.seek(self._offset)
            return None
        self._offset += len(raw)
        return raw

    def _next_part(self) -> bool:
        """Goes over to the next part, once it is there: nothing is written to this one any more. Whether anything was done."""
        number = self._find(self._part + 1)
        if number is None:
            return False
        raw = self._line()
        if raw is not None:  # written between the last look and the next part's appearance
            self._take(raw)
            return True
        if number > self._part + 1:
            self._gap = self._reader.newest()
            self.trace.problems.append(Problem(self.file(self._part + 1), "was removed before it was read"))
        return self._open(number)

    def _take(self, raw: bytes) -> None:
        reader, trace = self._reader, self.trace
        if self._lines is not None and self._lines.search(raw, 0, 80) is None:
            return
        thinned = reader.thinned
        try:
            reader.line(raw)
        except BAD_LINE:
            trace.damaged += 1
            return
        self.missed += reader.thinned - thinned
        if self._gap and (seq := _SEQ.match(raw)):
            self.missed += max(0, int(seq[1]) - self._gap - 1)
            self._gap = 0
        if trace.end is not None:
            self._finish("end")
        elif reader.boundary and reader.empty():
            self._advance()

    def _advance(self) -> None:
        self._mark = (self._part, self._offset, self._inode)

    def _step(self, part: StepPart) -> None:
        trace = self.trace
        trace.steps = StepLines()
        number, step = part.map.model, part.step
        mine = [v for v in trace.violations if v["model"] == number and v["step"] == step]
        trace.violations[:] = [v for v in trace.violations if v["model"] != number or v["step"] > step]
        spans = self._reader.spans.pop((number, step), [])
        comm = self._reader.comm.pop((number, step), {})
        for key in [key for key in self._reader.spans if key[0] == number and key[1] < step]:
            del self._reader.spans[key]
        if step <= self._taken.get(number, (-1, 0))[0]:
            return
        if part.line is None and part.records and set(part.records[ev.KIND :: ev.WIDTH]) == {ev.DEVICE}:
            return  # it never began: what the device had done was known after the last one
        self._taken[number] = (step, part.line.t if part.line is not None else 0)
        if part.line is not None and self._reader.empty():
            self._advance()
        self._sink(FollowedStep(part, mine, spans, comm, replace(self.position, ended="")))

    # -- the end -------------------------------------------------------------------------------------------------------
    def look(self, here: str) -> bool:
        """Whether the process is over, now that :meth:`read` found nothing new. One of the host ``here`` is dead when there
        is no such process and it has been silent for :data:`SILENCE`: in a container beside the trainer's its number means
        nothing, but its heartbeat does."""
        if not self.ended and time.monotonic() - self.grew >= SILENCE and self.header.host == here and not self.lives(here):
            self.give_up()
        return bool(self.ended)

    def lives(self, here: str) -> bool:
        """Whether there is a process of its number on ``here``, its host."""
        return self.header.host == here and exists(self.header.pid)

    def give_up(self) -> None:
        """Nothing more will come: hands on what there is of the running steps."""
        if not self.ended:
            self._finish("died")

    def _finish(self, how: str) -> None:
        if how == "died":
            tail = self._stem.with_name(f"{self._stem.name}.tail")
            if tail.exists():
                self._reader.read(tail, tail=True)
        self.ended = how
        self._reader.finish()
        self._advance()

    def close(self) -> None:
        """Closes the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
