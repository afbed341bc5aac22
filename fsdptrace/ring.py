"""The bounded buffer between the training thread and the drain.

The training thread appends :data:`~fsdptrace.events.WIDTH` integers per event to one flat list, by one
``list.extend`` of a tuple: atomic, no lock, nothing for the garbage collector to look at. :meth:`Ring.pump` moves what is
there into the running step's buffer and closes steps at their ``step`` record; it may be called from any thread.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fsdptrace.events import CONTEXT, EXCEPTION, KIND, MODEL_UNIT, STEP, THREAD_UNIT, VIOLATION, WIDTH

# An event takes up to WIDTH pointers and five integers too large to be shared: about 260 bytes.
EVENT_MEMORY = 260
DEFAULT_CAPACITY = 120_000
"""Events held in memory by default: about 30 MiB."""
KEPT_STEPS = 4


@dataclass(slots=True)
class StepRecords:
    """The raw records of one step of one model, and how much of them has been written.

    ``base`` counts the integers that were cut off the front (written before, or dropped), ``cut`` their events by kind.
    ``counted`` is how many integers from the step's begin were added up for its line.
    """

    model: int
    step: int
    records: list[int] = field(default_factory=list)
    written: int = 0
    base: int = 0
    dropped: int = 0
    violations: int = 0
    exceptions: int = 0
    cut: Counter[int] = field(default_factory=Counter)
    counted: int = 0

    @property
    def events(self) -> int:
        """Events of the step, those cut off included."""
        return (self.base + len(self.records)) // WIDTH

    def shorten(self, length: int) -> int:
        """Cuts ``length`` integers off the front, but for what is worth most and is not written; the events lost by it."""
        front = self.records[:length]
        kept = _essential(front[self.written :])
        self.cut.update(front[KIND::WIDTH])
        self.cut.subtract(kept[KIND::WIDTH])
        lost = (max(0, length - self.written) - len(kept)) // WIDTH
        self.records[:length] = kept
        self.base += length - len(kept)
        self.written = max(0, self.written - length)
        self.dropped += lost
        return lost


class Ring:
    """Flat buffer of records, split into steps.

    Attributes:
        append: ``list.extend`` of the buffer, bound once: hooks keep it in their closures.
        capacity: events that may lie in memory, waiting or kept.
        dropped: events that did not fit, so far.
        taker: sees all records once, in order: ``taker(model, step, records, their kinds)``; called with the lock held.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._buffer: list[int] = []
        self.append: Callable[[Sequence[int]], None] = self._buffer.extend
        self.capacity = capacity
        self.dropped = 0
        self.lock = threading.Lock()
        self.running: dict[int, StepRecords] = {}
        self.finished: deque[StepRecords] = deque()
        self.rescued: deque[StepRecords] = deque(maxlen=100_000)
        self.kept: deque[StepRecords] = deque(maxlen=KEPT_STEPS)
        self._waiting = 0
        self.taker: Callable[[int, int, Sequence[int], Sequence[int]], None] | None = None

    def __len__(self) -> int:
        return len(self._buffer) // WIDTH

    def full(self) -> bool:
        """Whether the drain is behind by more than a quarter of the capacity, so that somebody should pump."""
        return len(self._buffer) > self.capacity * WIDTH // 4

    def clear(self) -> None:
        """Forgets everything, in a forked child, where a thread that is not there may have held the lock."""
        self.lock = threading.Lock()
        self._buffer.clear()
        self.running.clear()
        self.finished.clear()
        self.rescued.clear()
        self.kept.clear()
        self._waiting = 0

    def pump(self) -> None:
        """Moves the buffer into the running steps; keeps to the capacity, dropping the oldest unwritten detail."""
        with self.lock:
            self._pump()

    def pump_if_free(self) -> None:
        """Like :meth:`pump`, but never waits: for the training thread, when :meth:`full` says so."""
        if self.lock.acquire(blocking=False):
            try:
                self._pump()
            finally:
                self.lock.release()

    def _pump(self) -> None:
        buffer = self._buffer
        count = len(buffer)
        if not count:
            return
        # Only this method removes, and appends come in whole records, so that the front is stable.
        chunk = buffer[:count]
        del buffer[:count]
        kinds = chunk[KIND::WIDTH]
        contexts = chunk[CONTEXT::WIDTH]
        low, high = min(contexts), max(contexts)
        if high < THREAD_UNIT and low // MODEL_UNIT == high // MODEL_UNIT:
            self._split_steps(low // MODEL_UNIT, chunk, kinds)
        else:
            self._split(chunk, kinds, contexts)
        self._bound()

    def _split_steps(self, model: int, chunk: list[int], kinds: list[int]) -> None:
        """Records of one model on one thread, the usual case: no look at each."""
        start = 0
        for _ in range(kinds.count(STEP)):
            stop = kinds.index(STEP, start) + 1
            self._add(model, chunk[start * WIDTH : stop * WIDTH], kinds[start:stop])
            self._finish(model)
            start = stop
        if start < len(kinds):
            self._add(model, chunk[start * WIDTH :], kinds[start:])

    def _split(self, chunk: list[int], kinds: list[int], contexts: list[int]) -> None:
        start = 0
        last = len(kinds) - 1
        for i, kind in enumerate(kinds):
            model = contexts[i] % THREAD_UNIT // MODEL_UNIT
            ends = i == last or contexts[i + 1] % THREAD_UNIT // MODEL_UNIT != model
            if kind == STEP or ends:
                self._add(model, chunk[start * WIDTH : (i + 1) * WIDTH], kinds[start : i + 1])
                start = i + 1
            if kind == STEP:
                self._finish(model)

    def _add(self, model: int, records: list[int], kinds: list[int]) -> None:
        step = self.running.get(model)
        if step is None:
            step = self.running[model] = StepRecords(model, 0)
        step.records += records
        if self.taker is not None:
            self.taker(model, step.step, records, kinds)
        if VIOLATION in kinds:
            step.violations += kinds.count(VIOLATION)
        if EXCEPTION in kinds:
            step.exceptions += kinds.count(EXCEPTION)

    def _finish(self, model: int) -> None:
        step = self.running[model]
        self.running[model] = StepRecords(model, step.step + 1)
        self.finished.append(step)
        self.kept.append(step)
        self._waiting += len(step.records) - step.written
        while len(self.kept) > 1 and sum(len(kept.records) for kept in self.kept) > self.capacity * WIDTH // 2:
            self.kept.popleft()

    def _bound(self) -> None:
        limit = self.capacity * WIDTH
        while self._waiting > limit // 2 and len(self.finished) > 1:
            step = self.finished.popleft()
            self._waiting -= len(step.records) - step.written
            self.dropped += step.shorten(len(step.records))
            self.rescued.append(step)
        for step in self.running.values():
            over = len(step.records) - limit // 2
            if over > 0:
                self.dropped += step.shorten(min(len(step.records), (over // WIDTH + self.capacity // 8) * WIDTH))

    def take(self) -> list[StepRecords]:
        """Finished steps that wait to be written, oldest first; the caller holds :attr:`lock` or is the only taker."""
        steps = [*self.rescued, *self.finished]
        self.rescued.clear()
        self.finished.clear()
        self._waiting = 0
        return steps


def _essential(records: list[int]) -> list[int]:
    """A step's own record and its violations: small, and worth most."""
    out: list[int] = []
    for i in range(0, len(records), WIDTH):
        if records[i] in (STEP, VIOLATION):
            out += records[i : i + WIDTH]
    return out
