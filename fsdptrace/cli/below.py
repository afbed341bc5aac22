"""What ``record(live=True)`` starts: a few lines at the lower edge of the terminal, below what training prints.

A process of its own, so that drawing takes nothing from training, which goes on printing where it did: the terminal is told to
scroll only the lines above (as apt does for its progress). Ended by SIGTERM, by the end of its parent, or by the end of the
run, it gives the lines back.

    python -m fsdptrace.cli.below FOLDER RUN
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from types import FrameType

from rich.console import Console, Group

from fsdptrace.analysis.live import RunNow, RunWatch
from fsdptrace.cli.top import head, last, table
from fsdptrace.files import NotATrace

EVERY = 1.0  # seconds between looks
RANKS = 4  # rows at most
LINES = RANKS + 4  # of the panel: a rule, the head, titles, rows, one for the last finding
LEAST = 16  # lines that a terminal must have


class Below:
    """The lowest lines of the terminal behind ``fd``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rows = 0
        self._columns = 0

    def show(self, now: RunNow) -> None:
        """Draws the run; in one write, so that nothing that training prints falls in between."""
        columns, rows = os.get_terminal_size(self._fd)
        if rows < LEAST:
            self.give_back()
            return
        out = "" if (columns, rows) == (self._columns, self._rows) else self._reserve(columns, rows)
        out += "\x1b7"  # where training's cursor is
        for number, line in enumerate(lines(now, columns)):
            out += f"\x1b[{rows - LINES + 1 + number};1H\x1b[0m\x1b[2K{line}"
        self._write(out + "\x1b[0m\x1b8")

    def _reserve(self, columns: int, rows: int) -> str:
        """Pushes up what stands in the lines, and keeps them out of what scrolls."""
        before, self._columns, self._rows = self._rows, columns, rows
        room = "\n" * LINES + f"\x1b[{LINES}A" if not before else ""
        return f"{room}\x1b7\x1b[1;{rows - LINES}r\x1b8"

    def give_back(self) -> None:
        """The whole terminal scrolls again, the lines are empty."""
        if not self._rows:
            return
        clear = "".join(f"\x1b[{self._rows - LINES + 1 + number};1H\x1b[2K" for number in range(LINES))
        self._rows = self._columns = 0
        self._write(f"\x1b7\x1b[r{clear}\x1b8")

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        while data:
            data = data[os.write(self._fd, data) :]


def lines(now: RunNow, columns: int) -> list[str]:
    """The panel, line by line, each as wide as the terminal at most."""
    out = io.StringIO()
    console = Console(
        file=out, width=columns - 1, force_terminal=True, highlight=False, markup=False, emoji=False, color_system="standard",
        legacy_windows=False,
    )  # fmt: skip
    console.print("─" * (columns - 1), style="dim")
    console.print(Group(head(now), table(now, RANKS, columns)), no_wrap=True, overflow="ellipsis", crop=True)
    for item in last(now):
        with console.capture() as captured:
            console.print(item, no_wrap=True, overflow="ellipsis", crop=True)
        out.write("".join(captured.get().strip("\n").split("\n")[:1]) + "\n")
    drawn = out.getvalue().split("\n")[:LINES]
    return drawn + [""] * (LINES - len(drawn))


class _Life:
    """Whether to go on: until SIGTERM, or until the process that started this one is gone."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._stopped = False
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGHUP, self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is training's to obey; when it ends, so does this

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopped = True

    def goes_on(self) -> bool:
        return not self._stopped and os.getppid() == self._parent

    def pause(self, seconds: float) -> None:
        """Waits, but not longer than life."""
        deadline = time.monotonic() + seconds
        while self.goes_on() and time.monotonic() < deadline:
            time.sleep(0.05)


def main() -> None:
    """Shows the run until told to stop."""
    life = _Life()
    below = Below(sys.stderr.fileno())
    try:
        with contextlib.suppress(NotATrace, OSError):
            watch = RunWatch(sys.argv[1], sys.argv[2])
            while life.goes_on():
                below.show(watch.look())
                life.pause(EVERY)
    finally:
        with contextlib.suppress(OSError):  # the terminal is gone
            below.give_back()


if __name__ == "__main__":
    main()
