"""Device time of gathers and reductions: timing events on the streams that FSDP2 uses, around the calls already wrapped.

The training thread records an event (about 2 us each on an H200) and goes on; the drain thread asks with ``query()``
whether the last events of a step have completed and works the times out. Nothing is synchronised, no operator dispatched, no
tensor made, so that selective checkpointing counts the same. One event per step on a stream of its own, on which nothing
else runs, ties device time to host time (within some 40 us, the time it takes to reach the device).

What is derived rather than recorded: a gather begins when its copy-in is done and the gather before it on the same stream
has ended; compute waits for it (``exposed``) from when it reaches the wait until the gather's end. No event says when compute
reaches a reduction that had completed before: it cannot wait for that one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fsdptrace.adapters.accelerator import Api, clock
from fsdptrace.adapters.compat import reductions_in_flight

# Codes of marks. A mark is five items of one flat list: code, seq, group, then two that depend on the code.
GATHER, WAIT, REDUCE, REACHED, ALL_REDUCE, FORWARD, BACKWARD = range(1, 8)
KIND_OF = {
    GATHER: "unshard", WAIT: "wait", REDUCE: "reduce_scatter", ALL_REDUCE: "all_reduce", FORWARD: "forward",
    BACKWARD: "backward",
}  # fmt: skip
MARK = 5
PASS_UNIT = 16
"""A code is one of these plus 16 times the pass."""
MAX_WAITING = 8
"""Steps whose events have not completed: beyond that the device is too far behind, and steps are left out."""
PATIENCE = 60.0
"""Seconds after which the events of a step that have not completed are given up."""
POOL = 20_000
"""Events kept for the next step: about 2,000 param groups' worth."""
AT_ONCE = 32
"""Marks worked out before the drain thread lets training have the interpreter."""


@dataclass(slots=True)
class Times:
    """What was worked out of one step; times in ns of the host's clock.

    ``seqs``, ``kinds``, ``passes``, ``groups`` (-1 without), ``begins``, ``ends`` and ``exposed`` (-1 for not known) go
    together, in the order of ``seq``. ``missing`` counts timings that never completed.
    """

    step: int
    begin: int = 0
    end: int = -1
    seqs: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    exposed: list[int] = field(default_factory=list)
    gather: int = 0
    reduce: int = 0
    missing: int = 0

    @property
    def exposed_total(self) -> int:
        """ns that compute waited for gathers and reductions."""
        return sum(value for value in self.exposed if value > 0)


@dataclass(slots=True)
class _Step:
    number: int
    host: int
    reference: Any
    marks: list[Any]
    events: list[Any]
    newest: list[Any]  # the last event of each stream: when they have completed, all have
    last: Any
    since: float


class _Behind(Exception):
    """An event has not completed yet."""


class Timing:
    """Times the steps of one recorded model. All but :meth:`poll` runs on the training thread.

    Args:
        api: the device.
        wanted: whether a step, by its number, is timed.
        memory: whether, in it, allocator memory is read at unit boundaries.

    Attributes:
        on: whether the running step is timed.
        results: what :meth:`poll` worked out and nobody took yet.
        skipped: steps left out because the device was too far behind.
    """

    def __init__(self, api: Api, wanted: Callable[[int], bool], memory: Callable[[int], bool]) -> None:
        self._api = api
        self._wanted = wanted
        self._memory_wanted = memory
        self._idle: Any = None
        self._pool: list[Any] = []
        self._marks: list[Any] = []
        self._events: list[Any] = []
        self._newest: dict[int, Any] = {}  # the last event by id of its stream, the current one aside
        self._in_flight: list[int] = []
        self._scattered: Any = None
        self._reference: Any = None
        self._host = 0
        self._step = 0
        self._reached: Any = None
        self._open: dict[int, Any] = {}
        self._waiting: deque[_Step] = deque()
        self.results: deque[Times] = deque(maxlen=64)
        self.on = False
        self.memory_on = False
        self.skipped = 0

    # -- steps ---------------------------------------------------------------------------------------------------------
    def begin_step(self, number: int) -> None:
        """The running step is ``number`` from here on."""
        self.on = self.memory_on = False
        self._marks, self._events = [], []
        self._newest.clear()
        self._in_flight.clear()
        self._open.clear()
        self._step = number
        if not self._wanted(number) or self._api.capturing():
            return
        if len(self._waiting) >= MAX_WAITING:
            self.skipped += 1
            return
        if self._idle is None:
            self._idle = self._api.idle()
        before = clock()
        self._reference = self._record(self._idle)
        self._host = (before + clock()) // 2
        self.on = True
        self.memory_on = self._memory_wanted(number)

    def end_step(self) -> None:
        """The running step is over: its events wait to complete."""
        if not self.on:
            return
        self.on = self.memory_on = False
        if self._marks and not self._api.capturing():
            last = self._record_here()
            newest = [last, *self._newest.values()]
            self._waiting.append(
                _Step(self._step, self._host, self._reference, self._marks, self._events, newest, last, time.monotonic())
            )
        else:
            self._pool += self._events

    def drop(self) -> None:
        """Forgets the running step (an exception left it half way, or recording ends)."""
        self.on = self.memory_on = False
        self._pool += self._events
        self._marks, self._events = [], []

    # -- marks ---------------------------------------------------------------------------------------------------------
    def _record(self, stream: Any) -> Any:
        event = self._pool.pop() if self._pool else self._api.event()
        event.record(stream)
        self._events.append(event)
        return event

    def _record_here(self) -> Any:
        event = self._pool.pop() if self._pool else self._api.event()
        event.record()  # on the current stream, which is found in C++
        self._events.append(event)
        return event

    def gather(self, seq: int, gid: int, pass_: int, group: Any, async_op: bool) -> None:
        """A gather was issued by the unshard ``seq`` in ``pass_``."""
        copy_in, gather = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
        if copy_in is gather:
            return  # on the current stream, or asynchronous on one of the process group's own: not to be seen from here
        begin, end = self._record(copy_in), self._record(gather)
        self._marks += (GATHER + PASS_UNIT * pass_, seq, gid, begin, end)
        self._newest[id(gather)] = end

    def wait(self, seq: int, gid: int, pass_: int) -> None:
        """Compute reaches the wait ``seq``."""
        self._marks += (WAIT + PASS_UNIT * pass_, seq, gid, self._record_here(), None)

    def before_reduction(self) -> None:
        """A post-backward begins, in which compute may wait for an earlier reduction, if one is still running."""
        self._reached = self._record_here() if self._in_flight and not self._scattered.query() else None

    def after_reduction(self, comm_ctx: Any, gid: int, scatter: int, reduce: int) -> None:
        """It has ended; ``scatter`` and ``reduce`` are the ``seq`` of the reduce-scatter and the all-reduce in it, or 0."""
        if scatter:
            stream = comm_ctx.reduce_scatter_stream
            begin, end = self._record_here(), self._record(stream)
            self._marks += (REDUCE, scatter, gid, begin, end)
            self._newest[id(stream)] = self._scattered = end
            self._in_flight.append(scatter)
            if reduce:
                stream = comm_ctx.all_reduce_stream
                last = self._record(stream)
                self._marks += (ALL_REDUCE, reduce, gid, end, last)
                self._newest[id(stream)] = last
        self._settle(comm_ctx)

    def before_final(self) -> None:
        """A root's final callback begins, in which compute waits for what is left."""
        self.before_reduction()
        self._open[-1] = self._reached

    def after_final(self, comm_ctx: Any) -> None:
        """It has ended."""
        self._reached = self._open.pop(-1, None)
        self._settle(comm_ctx)

    def _settle(self, comm_ctx: Any) -> None:
        """Reductions that PyTorch holds no longer were waited for where compute reached last."""
        over = len(self._in_flight) - reductions_in_flight(comm_ctx)
        if over > 0:
            if self._reached is not None:
                for seq in self._in_flight[:over]:
                    self._marks += (REACHED, seq, -1, self._reached, None)
            del self._in_flight[:over]

    def open(self, seq: int) -> None:
        """An outermost forward or backward begins on the current stream."""
        if self._api.capturing():
            self.drop()
            return
        self._open[seq] = self._record_here()

    def close(self, seq: int, code: int) -> None:
        """It ends; ``code`` is ``FORWARD`` or ``BACKWARD``."""
        begin = self._open.pop(seq, None)
        if begin is not None:
            self._marks += (code, seq, -1, begin, self._record_here())

    def memory(self) -> tuple[int, int]:
        """Bytes that the allocator has given out, and bytes that it holds."""
        return self._api.memory()

    # -- on the drain thread -------------------------------------------------------------------------------------------
    def poll(self, pause: float = 0.0) -> list[Times]:
        """Steps whose events have completed since the last call (or will not); never waits for the device. One thread at a
        time."""
        out = []
        while self._waiting:
            with self._api.asking():
                times = self._next(pause)
            if times is None:
                break
            self._waiting.popleft()
            self.results.append(times)
            out.append(times)
        return out

    def _next(self, pause: float) -> Times | None:
        """What the step that has waited longest did; ``None`` if it has not ended yet."""
        step = self._waiting[0]
        late = time.monotonic() - step.since > PATIENCE
        try:
            if not late and not all(event.query() for event in step.newest):
                return None
            times = _work_out(step, self._api, pause, late)
            free = [event for event in step.events if not late or event.query()]
        except _Behind:
            return None
        except RuntimeError:  # the device has failed: what it did is not to be had, the rest of the trace is
            return _nothing(step)
        if len(self._pool) < POOL:
            self._pool += free
        return times

    @property
    def behind(self) -> int:
        """Steps whose events have not completed."""
        return len(self._waiting)


def _nothing(step: _Step) -> Times:
    return Times(step.number, step.host, missing=len(step.marks) // MARK)


def _work_out(step: _Step, api: Api, pause: float, late: bool) -> Times:
    """Raises :class:`_Behind` where an event has not completed, unless it is too ``late`` to wait for it."""
    if late and not step.reference.query():
        return _nothing(step)
    times = Times(step.number, step.host)
    reader = _Reader(step, api, times, late)
    marks = step.marks
    for position in range(0, len(marks), MARK):
        reader.take(*marks[position : position + MARK])
        if pause and position % (AT_ONCE * MARK) == (AT_ONCE - 1) * MARK:
            time.sleep(pause)  # training wants the GIL
    reader.finish()
    end = reader.at(step.last)
    times.end = -1 if end is None else end
    return times


class _Reader:
    """Turns the marks of one step into times, in the order in which they were made."""

    def __init__(self, step: _Step, api: Api, times: Times, late: bool) -> None:
        self._host, self._reference, self._elapsed = step.host, step.reference, api.elapsed
        self._times, self._late = times, late
        self._rows: dict[int, list[int]] = {}  # by seq: begin, end, exposed, code with its pass, group
        self._gathered: dict[int, list[int]] = {}  # the row of the gather that a group's next wait is for
        self._gather_end = self._scatter_end = self._reduce_end = self._waited = step.host

    def at(self, event: Any) -> int | None:
        """When ``event`` completed; ``None`` if it has not."""
        try:
            return self._host + self._elapsed(self._reference, event)
        except (RuntimeError, ValueError):
            if event.query():
                raise
            if not self._late:
                raise _Behind from None
            return None

    def take(self, packed: int, seq: int, gid: int, one: Any, two: Any) -> None:
        """One mark."""
        times = self._times
        code = packed % PASS_UNIT
        first = self.at(one)
        second = self.at(two) if two is not None else first
        if first is None or second is None:
            times.missing += 1
        elif code == GATHER:
            begin = max(first, self._gather_end)
            self._gather_end = end = max(second, begin)
            self._rows[seq] = self._gathered[gid] = [begin, end, 0, packed, gid]
            times.gather += end - begin
        elif code == WAIT:
            row = self._gathered.pop(gid, None)
            if row is not None:
                end = row[1]
                row[2] = max(0, end - first)
                self._rows[seq] = [first, max(first, end), -1, packed, gid]
        elif code == REDUCE:
            begin = max(first, self._scatter_end)
            self._scatter_end = end = max(second, begin)
            self._rows[seq] = [begin, end, 0, packed, gid]
            times.reduce += end - begin
        elif code == ALL_REDUCE:
            begin = max(first, self._reduce_end)
            self._reduce_end = end = max(second, begin)
            self._rows[seq] = [begin, end, -1, packed, gid]
            times.reduce += end - begin
        elif code == REACHED:
            row = self._rows.get(seq)
            if row is not None:
                # Several are waited for at one place: what the first took is not waited for again.
                row[2] = max(0, row[1] - max(first, self._waited))
                self._waited = max(self._waited, row[1])
        else:  # FORWARD, BACKWARD
            self._rows[seq] = [first, second, -1, packed, gid]

    def finish(self) -> None:
        """Puts the rows into columns."""
        times = self._times
        times.seqs = sorted(self._rows)
        rows = [self._rows[seq] for seq in times.seqs]
        times.begins = [row[0] for row in rows]
        times.ends = [row[1] for row in rows]
        times.exposed = [row[2] for row in rows]
        times.kinds = [KIND_OF[row[3] % PASS_UNIT] for row in rows]
        times.passes = [row[3] // PASS_UNIT for row in rows]
        times.groups = [row[4] for row in rows]
