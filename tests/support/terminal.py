"""A terminal that a program runs in, and what is seen on it: a pseudo-terminal with pyte behind it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Sequence
from typing import Any

import pyte


class Terminal:
    """Starts ``command`` in a terminal of its own, of 110 columns and 30 lines if nothing else is said."""

    def __init__(self, command: Sequence[str], columns: int = 110, rows: int = 30) -> None:
        self.screen: Any = pyte.HistoryScreen(columns, rows, history=5000)
        self._stream: Any = pyte.ByteStream(self.screen)
        self.raw = b""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            time.sleep(0.2)  # until the size is set
            os.environ["TERM"] = "xterm-256color"
            os.execvp(command[0], list(command))
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int) -> None:
        """Another size, as if the window was dragged."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    @property
    def lines(self) -> list[str]:
        """What is seen, top down."""
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        """The same in one."""
        return "\n".join(self.lines)

    def wait_for(self, text: str, timeout: float = 60) -> None:
        """Reads until ``text`` is seen."""
        self.wait_until(lambda: text in self.text, timeout, repr(text))

    def wait_until(self, seen: Callable[[], bool], timeout: float = 60, what: str = "it") -> None:
        """Reads until what is seen is as it should be.

        Raises:
            AssertionError: it did not come.
        """
        deadline = time.monotonic() + timeout
        while not seen():
            assert time.monotonic() < deadline, f"{what} was not seen; the terminal:\n{self.text}"
            if not self.read(0.1):
                assert seen(), f"the program ended without {what}; the terminal:\n{self.text}"

    def read(self, seconds: float) -> bool:
        """Takes what is written for a while; False when all that held the terminal have ended."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self._fd], [], [], left)[0]:
                continue
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:  # what Linux says when the last program has closed its end
                return False
            if not data:
                return False
            self.raw += data
            self._stream.feed(data)
        return True

    def type(self, data: bytes) -> None:
        """Keys."""
        os.write(self._fd, data)

    def end(self, timeout: float = 60) -> int:
        """Reads until everything in it has ended; the program's exit status."""
        deadline = time.monotonic() + timeout
        while self.read(0.2):
            assert time.monotonic() < deadline, f"it did not end; the terminal:\n{self.text}"
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        """Kills what is left."""
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(self._fd)
