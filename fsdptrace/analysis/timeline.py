"""What lies along the time axis: when each unit was gathered, and when it computed. For pictures; needs neither torch
nor numpy.

A *hold* is one gathered copy of a group, from the issue of its all-gather to its free; a *use* is the computing between the
two hooks of a pass. Both come from a step's records, in the order in which rules see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fsdptrace import events as ev
from fsdptrace.analysis.process import ProcessTrace, StepPart
from fsdptrace.model_map import ModelMap
from fsdptrace.summary import rows_of

OPEN, RESHARDED, SMALLER_MESH, DISCARDED, UNKNOWN = range(5)
#: How a hold ended, by number: still open at the end of the files, freed, freed to the post-forward mesh, thrown away while
#: pending, not in the files (the next step was written as one line).
ENDS = ("open", "reshard", "post_forward", "discard", "unknown")
#: Kinds whose times are not those of the step that they are in: its own line is written when the next one begins, and what a
#: device did is known even later.
AFTERWARDS = frozenset((ev.STEP, ev.DEVICE))
SAME_BOOT = 60_000_000_000  # ns: clocks of one host that are further apart belong to different boots or containers


@dataclass(slots=True)
class Hold:
    """One gathered copy of a group.

    Attributes:
        seq, t0: the unshard that made it (0 where it was there when recording began) and when that was called, in ns.
        ready: when the wait for it ended, 0 where nobody waited; ``wait_seq`` that event.
        t1: when it was freed, or the last moment known; ``end`` is an index into :data:`ENDS`.
        pass_: the pass that it was gathered in, by number; ``how`` and ``issuer`` as in the unshard.
        bytes: unsharded bytes.
        used: a forward, backward or recomputation of the group began meanwhile; ``use_seq`` the first of these events.
    """

    group: int
    seq: int
    t0: int
    pass_: int
    bytes: int
    issuer: int = ev.NONE
    how: int = 0
    ready: int = 0
    wait_seq: int = 0
    use_seq: int = 0
    t1: int = 0
    end_seq: int = 0
    end: int = OPEN

    @property
    def used(self) -> bool:
        """Whether the copy was needed."""
        return self.use_seq > 0

    @property
    def prefetched(self) -> bool:
        """Whether a prefetch of another group asked for it."""
        return self.how >= ev.DIRECTION_UNIT and self.how // ev.MODE_UNIT != ev.MODES.index("manual")


@dataclass(frozen=True, slots=True)
class Use:
    """A group's computing in one pass: from the end of its pre-hook to the begin of its post-hook, in ns."""

    group: int
    seq: int
    t0: int
    t1: int
    pass_: int


@dataclass(slots=True)
class ModelTimes:
    """Holds and uses of one model of one process, fed with its records in order.

    ``levels`` are ``(ns, bytes)``: what is open or pending from that moment on. ``served`` are the waits for what a prefetch
    issued: the number of the wait's event, and of the unshard's.
    """

    map: ModelMap
    holds: list[Hold] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    levels: list[tuple[int, int]] = field(default_factory=list)
    served: dict[int, int] = field(default_factory=dict)
    _open: dict[int, Hold] = field(default_factory=dict)
    _started: dict[tuple[int, bool], tuple[int, int, int]] = field(default_factory=dict)
    _held: int = 0
    _last: int = 0

    def feed(self, records: Iterable[Sequence[int]]) -> None:
        """Takes the records of a step."""
        for record in records:
            self._one(record)

    def _one(self, record: Sequence[int]) -> None:
        kind, seq, t0, t1, group, _parent, context, a, b, _c, d, e = record
        self._last = max(self._last, t1)
        if kind == ev.UNSHARD:
            if not e % ev.DIRECTION_UNIT:
                self._begin(Hold(group, seq, t0, context % 4, a, issuer=d, how=e))
        elif kind == ev.STATE:
            if (ev.SHARDED_STATES[a] == "unsharded" or b) and group not in self._open:
                self._begin(Hold(group, 0, t0, ev.PASS_NONE, e))
        elif kind == ev.WAIT:
            hold = self._open.get(group)
            if hold is not None and not hold.ready:
                hold.ready, hold.wait_seq = t1, seq
                if hold.prefetched:
                    self.served[seq] = hold.seq
        elif kind == ev.RESHARD:
            self._end(group, seq, t0, SMALLER_MESH if b else RESHARDED)
        elif kind == ev.DISCARD:
            self._end(group, seq, t0, DISCARDED)
        elif kind in (ev.PRE_FORWARD, ev.PRE_BACKWARD):
            hold = self._open.get(group)
            if hold is not None and not hold.use_seq:
                hold.use_seq = seq
            self._started[group, kind == ev.PRE_BACKWARD] = (seq, t1, context % 4)
        elif kind in (ev.POST_FORWARD, ev.POST_BACKWARD):
            started = self._started.pop((group, kind == ev.POST_BACKWARD), None)
            if started is not None and t0 >= started[1]:
                self.uses.append(Use(group, started[0], started[1], t0, started[2]))

    def _begin(self, hold: Hold) -> None:
        known = self._open.pop(hold.group, None)
        if known is not None:  # its free is not in the files
            self._close(known, 0, hold.t0, UNKNOWN)
        self._open[hold.group] = hold
        self._level(hold.t0, hold.bytes)

    def _end(self, group: int, seq: int, at: int, end: int) -> None:
        hold = self._open.pop(group, None)
        if hold is not None:
            self._close(hold, seq, at, end)

    def _close(self, hold: Hold, seq: int, at: int, end: int) -> None:
        hold.t1, hold.end_seq, hold.end = max(at, hold.t0), seq, end
        self.holds.append(hold)
        self._level(hold.t1, -hold.bytes)

    def _level(self, at: int, change: int) -> None:
        self._held += change
        if self.levels and self.levels[-1][0] >= at:
            self.levels[-1] = (self.levels[-1][0], self._held)
        else:
            self.levels.append((at, self._held))

    def gap(self) -> None:
        """What follows is not the next step: what was open is closed where it was last known."""
        for hold in list(self._open.values()):
            self._close(hold, 0, self._last, UNKNOWN)
        self._open.clear()
        self._started.clear()

    def finish(self) -> None:
        """The end of the files: what is open stays so until the last moment known. Sorts holds and uses by begin."""
        for hold in self._open.values():
            hold.t1 = max(self._last, hold.t0)
            self.holds.append(hold)
        self._open.clear()
        self.holds.sort(key=lambda hold: (hold.t0, hold.seq))
        self.uses.sort(key=lambda use: (use.t0, use.seq))


@dataclass(slots=True)
class ProcessTimes:
    """A sink for :func:`~fsdptrace.analysis.lines.read_process`: the times of one process.

    Args:
        wanted: ``(model, step)`` of a step that is looked at; all where it is None.
        on_step: gets every step that is looked at, before its records are taken up.
    """

    wanted: Callable[[int, int], bool] | None = None
    on_step: Callable[[StepPart], None] | None = None
    models: dict[int, ModelTimes] = field(default_factory=dict)
    _next: dict[int, int] = field(default_factory=dict)

    def __call__(self, part: StepPart) -> None:
        """One step, from the reader."""
        number = part.map.model
        if (self.wanted is not None and not self.wanted(number, part.step)) or not part.records:
            return
        times = self.models.get(number)
        if times is None:
            times = self.models[number] = ModelTimes(part.map)
        elif self._next[number] != part.step or times.map != part.map or not (part.full or part.intact):
            times.gap()
            times.map = part.map
        # Of a step without all its events, what is open at its end is not known.
        self._next[number] = part.step + 1 if part.full or part.intact else -1
        if part.line is not None and len(part.records) == ev.WIDTH and not part.full:
            return  # its line is all there is
        if self.on_step is not None:
            self.on_step(part)
        times.feed(rows_of(part.records))

    def finish(self) -> None:
        """Call once, when all is read."""
        for times in self.models.values():
            times.finish()


def clock_offsets(processes: Sequence[ProcessTrace]) -> list[int]:
    """What to add to each process's times, in ns, to have them on one clock: Unix time.

    Processes of one host share its monotonic clock, so the first one's offset serves all of them: their own, taken at
    different moments, would differ by what the clock was set in between. Between hosts only the hosts' own clocks can
    tell (NTP, PTP). Without a clock in the header, a process begins where the others do.
    """
    by_host: dict[str, int] = {}
    offsets: list[int | None] = []
    for process in processes:
        header = process.header
        if not header.unix_ns:
            offsets.append(None)
            continue
        own = header.unix_ns - header.perf_counter_ns
        known = by_host.setdefault(header.host, own)
        offsets.append(known if abs(known - own) < SAME_BOOT else own)
    start = min((o + begin(p) for p, o in zip(processes, offsets, strict=True) if o is not None), default=0)
    return [start - begin(p) if o is None else o for p, o in zip(processes, offsets, strict=True)]


def begin(process: ProcessTrace) -> int:
    """When its first step that is known began, on its own clock."""
    return min((line.t - line.duration_ns for line in process.steps), default=process.last_t)
