"""A bar on standard error for what takes more than a second; nothing where that is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console

from fsdptrace.analysis.workers import Progress

AFTER = 1.0  # seconds


class Bar:
    """Shows itself once :data:`AFTER` seconds have passed."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._started = time.monotonic()
        self._bar: progress.Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        """So many bytes of so many."""
        if self._bar is None:
            if time.monotonic() - self._started < AFTER:
                return
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn(),
                progress.TimeRemainingColumn(), console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self._bar.add_task(self._what, total=total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def close(self) -> None:
        """Takes it off the screen."""
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def bar(what: str = "reading") -> Iterator[Progress | None]:
    """What to tell how far the reading is; ``None`` where nobody sees it."""
    if not sys.stderr.isatty():
        yield None
        return
    shown = Bar(what)
    try:
        yield shown
    finally:
        shown.close()
