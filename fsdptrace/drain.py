"""The one thread that formats lines and writes them: paced, in short batches, since it shares the GIL with training."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

from fsdptrace import events as ev
from fsdptrace.files import device_line, step_line
from fsdptrace.ring import StepRecords
from fsdptrace.standing import Movement, collective, details, entered, newest
from fsdptrace.totals import Totals

if TYPE_CHECKING:
    from fsdptrace.session import Session

PERIOD = 0.25  # seconds between looks at the ring
HEARTBEAT = 1.0  # seconds
STANDS = 10  # heartbeats of a process that stands still between two that say where
END_WAIT = 10.0  # seconds that the end of a process waits for a thread that is writing
DEVICE_WAIT = 2.0  # seconds that the end of the process waits for timing events to complete
BATCH = 128 * ev.WIDTH  # integers formatted at a time: about 0.15 ms of the GIL
PAUSE = 0.0005  # seconds between batches
COUNTED = 1024 * ev.WIDTH  # integers added up at a time: where steps are alike, about 0.15 ms of the GIL too
ANNOUNCEMENTS = 64  # collectives of a process that are put on disk before they are entered although nobody asked for it
TAIL_EVENTS = 4096  # newest events of a running step that are kept on disk when its detail is not wanted
FULL_STEPS = 10
FULL_EVERY = 100


class Drain:
    """Moves records from the ring to the file.

    ``lock`` guards the writer: the thread holds it for a batch, ``flush="collective"`` for a flush.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.lock = threading.RLock()
        # Held for a whole look, so that a flush neither overtakes the thread nor finds it half way.
        self._turn = threading.RLock()
        self.wake = threading.Event()
        self.stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._last_beat = 0.0
        self._last_tail = 0.0
        self._movement = Movement(session)
        self._stood = 0
        self._announced = 0
        self.opened = threading.Event()  # the file is there, or cannot be
        self._told_dropped = 0
        self._totals: dict[int, Totals] = {}
        self.written_events = 0
        self.busy_ns = 0

    def start(self) -> None:
        """Starts the thread; no-op when it runs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fsdptrace-drain", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        # The first look comes at once: rank 0 says what the run is called, and others wait for it.
        while not self.stopping.is_set():
            try:
                self.cycle(PAUSE if self._session.options.flush == "none" else 0.0)
                self._session.look_after_exporter()
            except Exception as error:  # whatever happens here must not show in training
                self._session.complain(f"the drain thread failed and the trace stops here: {error!r}")
                return
            self.wake.wait(PERIOD)
            self.wake.clear()

    def close(self) -> None:
        """Stops the thread and writes what is left, then the end line. Where writing blocks for longer than
        :data:`END_WAIT` the rest is given up: the end of a process is not ours to hold."""
        self.stopping.set()
        self.wake.set()
        session = self._session
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=END_WAIT)
            if self._thread.is_alive():
                session.complain("the files cannot be written fast enough to end them; what came last is not in the trace")
                return
        if not session.models:
            return
        # What still runs on the device gets a moment to end; nothing is synchronised.
        deadline = time.monotonic() + DEVICE_WAIT
        self.cycle(0.0)
        while any(timing.behind for timing in session.timings.values()) and time.monotonic() < deadline:
            time.sleep(0.01)
            self.cycle(0.0)
        if session.take_device_times():
            self.cycle(0.0)
        with self.lock:
            writer = session.writer
            if writer is None:
                return
            for step in session.ring.running.values():
                if not self.wanted(step):
                    self._write(step, 0.0, TAIL_EVENTS)
            end: dict[str, Any] = {
                "kind": "end", "events": newest(session), "dropped": session.ring.dropped + writer.lost,
                "violations": session.violation_count, "t": time.perf_counter_ns(), "drain_ns": self.busy_ns,
            }  # fmt: skip
            if session.ended_by:
                end["exception"] = session.ended_by
            writer.write(_line(end))
            writer.close()

    def wanted(self, step: StepRecords) -> bool:
        """Whether all events of ``step`` are written, or one line for it."""
        return bool(step.violations or step.exceptions) or self.detailed(step.step)

    def detailed(self, number: int) -> bool:
        """Whether step ``number`` is written with all its events, whatever happens in it."""
        options = self._session.options
        if options.schedule is not None:
            return str(options.schedule(number)).rpartition(".")[2] in ("RECORD", "RECORD_AND_SAVE")
        if options.detail != "auto":
            return options.detail == "full"
        return number < FULL_STEPS or number % FULL_EVERY == 0

    def cycle(self, pause: float) -> None:
        """One look: moves what is in the ring, writes what is wanted, beats the heart."""
        with self._turn:
            self._cycle(pause)

    def _cycle(self, pause: float) -> None:
        session = self._session
        ring = session.ring
        ring.pump()
        started = time.thread_time_ns()
        if session.writer is None and not session.models:
            return
        session.settle_run_id()
        with self.lock:
            if not session.open_file():
                with ring.lock:
                    ring.take()
                    for step in ring.running.values():
                        step.written = len(step.records)
                self.opened.set()
                return
        self.opened.set()
        with ring.lock:
            finished = ring.take()
        self._write_spans()
        self._write_coverage()
        self._finish(finished, pause)
        self._write_device_times(pause)
        now = time.monotonic()
        for step in list(ring.running.values()):
            self._count(step, pause, running=True)
            if self.wanted(step):
                self._write(step, pause)
            elif now - self._last_tail >= HEARTBEAT and step.records:
                self._last_tail = now
                self._write_tail(step)
        if now - self._last_beat >= HEARTBEAT:
            self._last_beat = now
            self._beat()
        self.busy_ns += time.thread_time_ns() - started

    def _write_device_times(self, pause: float) -> None:
        session = self._session
        for model, timing in list(session.timings.items()):
            for times in timing.poll(pause):
                line = device_line(model, times)
                with self.lock:
                    assert session.writer is not None
                    session.writer.write(line)

    def _finish(self, finished: list[StepRecords], pause: float) -> None:
        """Writes ``finished`` steps: the events of those that are wanted, and a line for each. Lines go out together: each
        write gives up the GIL, which training then has to hand back."""
        writer = self._session.writer
        assert writer is not None
        lines: list[str] = []
        for step in finished:
            if not step.records:
                continue
            if self.wanted(step):
                self._put(lines)
                self._write(step, pause)
            self._count(step, pause)
            comm = self._totals[step.model].take()
            with self.lock:
                lines.append(step_line(self._session.formatter, step.records, step.step, step.dropped, step.cut, comm))
            step.written = len(step.records)
        self._put(lines)
        if finished:
            with self.lock:
                writer.empty_tail()

    def _put(self, lines: list[str]) -> None:
        """Writes ``lines`` and empties the list."""
        writer = self._session.writer
        if lines and writer is not None:
            with self.lock:
                self._write_models()
                writer.write("".join(lines))
            lines.clear()

    def _write_models(self) -> None:
        """The lines of models that appeared since, for they come before their events; the caller holds the lock."""
        session = self._session
        while session.new_models and session.writer is not None:
            session.writer.write(_line(session.new_models.popleft().to_json()))
            session.formatter.forget()

    def _write(self, step: StepRecords, pause: float, only: int | None = None) -> None:
        """Writes what of ``step`` has not been written (of its newest ``only`` events, if given), but for the record that ends
        it."""
        session = self._session
        while True:
            with self.lock:
                with session.ring.lock:  # given back before the write: a disk may block for seconds
                    records = step.records
                    start = step.written
                    if only is not None:
                        start = max(start, len(records) - only * ev.WIDTH)
                    # Whoever moves records may have ended the step since: its own record is left for _finish.
                    ends = bool(records) and records[-ev.WIDTH] == ev.STEP
                    stop = min(len(records) - (ev.WIDTH if ends else 0), start + BATCH)
                    if stop <= start:
                        return
                    text = session.formatter.lines(records, start, stop, step.step)
                    step.written = stop
                assert session.writer is not None
                self._write_models()
                session.writer.write(text)
                self.written_events += (stop - start) // ev.WIDTH
            if pause:
                time.sleep(pause)

    def _count(self, step: StepRecords, pause: float, running: bool = False) -> None:
        """Adds up what of ``step`` has not been; of one that is ``running`` whole batches only, so that steps that are alike
        are cut alike, and most are looked at once."""
        totals = self._totals.get(step.model)
        if totals is None:
            totals = self._totals[step.model] = Totals()
        totals.use(self._session.models[step.model])
        while True:
            with self._session.ring.lock:
                start = max(0, step.counted - step.base)
                if len(step.records) - start < (COUNTED if running else 1):
                    return
                chunk = step.records[start : start + COUNTED]
                place = step.base + start
                step.counted = place + len(chunk)
            totals.feed(chunk, place)
            if pause and step.counted < step.base + len(step.records):
                time.sleep(pause)

    def _write_spans(self) -> None:
        """The lines that say which spans of the program's own were active when steps began."""
        session = self._session
        while session.active_spans:
            model, step, traceparent = session.active_spans.popleft()
            with self.lock:
                if session.writer is not None:
                    session.writer.write(
                        f'{{"kind":"active_span","model":{model},"step":{step},"traceparent":"{traceparent}"}}\n'
                    )

    def _write_coverage(self) -> None:
        """What came to light of what cannot be shown, beside what the file begins with."""
        session = self._session
        while session.coverage_written < len(session.coverage):
            with self.lock:
                if session.writer is None:
                    return
                line = session.coverage[session.coverage_written]
                session.coverage_written += 1
                session.writer.write(_line({"kind": "coverage", "line": line}))

    def _write_tail(self, step: StepRecords, pause: float = PAUSE) -> None:
        session = self._session
        with self.lock:
            with session.ring.lock:
                records = step.records[-TAIL_EVENTS * ev.WIDTH :]
            parts = []
            for start in range(0, len(records), BATCH):
                parts.append(session.formatter.lines(records, start, min(start + BATCH, len(records)), step.step))
                if pause:
                    time.sleep(pause)
            assert session.writer is not None
            session.writer.write_tail("".join(parts))

    def _beat(self) -> None:
        session = self._session
        dropped = session.ring.dropped
        if dropped > self._told_dropped and not self._told_dropped:
            session.complain(f"{dropped:,} events did not fit in memory and were dropped; checks saw all of them")
        self._told_dropped = dropped
        last, moved = self._movement.last, self._movement.look()
        beat: dict[str, Any] = {"kind": "heartbeat", "t": time.perf_counter_ns(), "last": self._movement.last}
        steps = {number: step.step for number, step in session.ring.running.items()}
        beat["step"] = steps.get(0, 0)
        if len(steps) > 1:
            beat["steps"] = steps
        inside = entered(session)
        if inside:
            beat["collective"] = inside
        if dropped:
            beat["dropped"] = dropped
        beat["drain_ns"] = self.busy_ns
        self._stood = self._stood + 1 if last == self._movement.last else 0
        if self._stood:
            beat["moved"] = moved
            if self._stood % STANDS == 1:
                beat |= details(session)
        with self.lock:
            if session.writer is not None:
                session.writer.write(_line(beat))

    def last_words(self, what: dict[str, Any]) -> None:
        """The process is about to be ended: the newest events of every running step and where it stands, on disk now."""
        session = self._session
        if session.closed or not session.models:
            return
        with self._turn:
            self._cycle(0.0)
            for step in list(session.ring.running.values()):
                if not self.wanted(step):
                    self._write_tail(step, 0.0)
            line: dict[str, Any] = {**what, "t": time.perf_counter_ns(), "last": newest(session), **details(session)}
            inside = entered(session)
            if inside:
                line["collective"] = inside
            with self.lock:
                if session.writer is not None:
                    session.writer.write(_line(line))

    def flush_now(self, model: int = 0, entered: int = 0, which: int = 0) -> None:
        """Writes everything recorded so far, from the calling thread; then, if given, that ``model`` enters a
        collective: kind + 32 * group, and which parameters take part."""
        self._session.settle_run_id()
        with self._turn:
            self._flush(model, entered, which)

    def announce(self, model: int, entered: int, which: int) -> None:
        """Like :meth:`flush_now`, but a disk that blocks is not waited for, nor a file that is not open yet; at most
        :data:`ANNOUNCEMENTS` times."""
        if self._session.writer is None or self._announced >= ANNOUNCEMENTS or not self._turn.acquire(blocking=False):
            return
        try:
            self._announced += 1
            self._flush(model, entered, which, all_detail=False)
        finally:
            self._turn.release()

    def _flush(self, model: int, entered: int, which: int, all_detail: bool = True) -> None:
        session = self._session
        with self.lock:
            session.ring.pump()
            if not session.open_file():
                return
            with session.ring.lock:
                finished = session.ring.take()
            self._write_spans()
            self._finish(finished, 0.0)
            for step in session.ring.running.values():
                if all_detail or self.wanted(step):
                    self._write(step, 0.0)
                else:  # read if the process dies now, gone when the step ends well
                    self._write_tail(step, 0.0)
            if entered and session.writer is not None:
                what = collective(model, entered, which)
                what = {"kind": "entered", "t": time.perf_counter_ns(), "what": what.pop("kind"), **what}
                session.writer.write(_line(what))


def _line(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":")) + "\n"
