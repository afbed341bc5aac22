"""The files of several processes read at the same time, by as many workers as there are cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Any, TypeVar

from fsdptrace.analysis.sources import Source

WORTH_IT = 24 << 20  # bytes from which on starting workers (0.2 s) pays
JOBS = "FSDPTRACE_JOBS"  # how many workers at most, where the caller leaves it open
PERIOD = 0.1  # seconds between looks at how far the workers are

T = TypeVar("T")
Advance = Callable[[int], None]
Progress = Callable[[int, int], None]
"""Told how many bytes have been read, and of how many."""


def _nobody(done: int, total: int) -> None:
    pass


def sizes(sources: Sequence[Source]) -> list[int]:
    """Bytes on disk per source; 0 for what cannot be looked at."""
    return [sum(map(_size, (*source.parts, *([source.tail] if source.tail else [])))) for source in sources]


def _size(path: os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def cores() -> int:
    """Cores that this process may use; ``FSDPTRACE_JOBS`` sets it."""
    given = os.environ.get(JOBS, "")
    if given.isdigit() and int(given):
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def advancing(sources: Sequence[Source], progress: Progress | None) -> Advance:
    """What readers of ``sources`` tell how many bytes they have read; ``progress`` is told how far that is."""
    total, done = sum(sizes(sources)), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    return advance


def each(
    sources: Sequence[Source], work: Callable[[Source, Advance], T], jobs: int | None = 1, progress: Progress | None = None
) -> list[T]:
    """``work(source, advance)`` for each source; the results, in order.

    Args:
        sources: the files of one process each.
        work: a function of a module, since workers are processes of their own; calls ``advance`` with bytes read.
        jobs: how many workers at most; ``None``: as many as there are cores, where the files are large enough to pay. A program
            that uses more than one guards its own start by ``if __name__ == "__main__"``, as for any pool of processes.
        progress: told now and then how far it is.
    """
    progress = progress or _nobody
    per_source = sizes(sources)
    total = sum(per_source)
    if jobs is None:
        jobs = cores() if total >= WORTH_IT else 1
    jobs = min(jobs, len(sources))
    if jobs > 1:
        return _in_workers(sources, per_source, work, jobs, progress)
    advance = advancing(sources, progress)
    return [work(source, advance) for source in sources]


_done: Any = None  # in a worker: the bytes that all of them have read; less than none tells it to stop


def _join(done: Any) -> None:
    global _done
    _done = done
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all of them; who started them says when to stop
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """Ends this worker when the process that it reads for was killed: it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _advance(count: int) -> None:
    with _done.get_lock():
        if _done.value < 0:
            raise KeyboardInterrupt
        _done.value += count


def _one(work: Callable[[Source, Advance], T], source: Source) -> T:
    return work(source, _advance)


def _in_workers(
    sources: Sequence[Source], per_source: Sequence[int], work: Callable[[Source, Advance], T], jobs: int, progress: Progress
) -> list[T]:
    # Spawned: a forked child would inherit locks of threads that it does not have.
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    total = sum(per_source)
    with ProcessPoolExecutor(jobs, context, _join, (done,)) as pool:
        # The largest first, so that no worker is left alone with it at the end.
        order = sorted(range(len(sources)), key=lambda i: -per_source[i])
        futures: dict[int, Future[T]] = {i: pool.submit(_one, work, sources[i]) for i in order}
        running = set(futures.values())
        try:
            while running:
                finished, running = wait(running, PERIOD, FIRST_EXCEPTION)  # looked at once a period, however many there are
                for future in finished:
                    future.result()
                progress(done.value, total)
        except BrokenProcessPool:
            raise OSError(f"a worker that read files was killed (out of memory?); fewer at a time: {JOBS}=1") from None
        except BaseException:
            with done.get_lock():
                done.value = -1
            for future in futures.values():
                future.cancel()
            raise
        return [futures[i].result() for i in range(len(sources))]
