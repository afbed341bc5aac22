"""What is still written when a process is told to end: on SIGTERM (what a launcher sends to the ranks that are left) and on
SIGABRT from outside, also while the training thread is stuck in a collective and can run no Python.

CPython's own handler, in C, writes the number of each signal to a pipe (``signal.set_wakeup_fd``); a thread of ours reads it,
has the last words written, and ends the process by that same signal, as it would have ended without us. That is done only
where the signal's disposition was the default one; a handler of the program's keeps its say. ``abort()`` from C++ leaves no
time for words: what was written by then is what there is (see ``flush="collective"``).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Speaker = Callable[[dict[str, Any]], None]
SIGNALS = (signal.SIGTERM, signal.SIGABRT)
PATIENCE = 2.0  # seconds that the end of the process waits for a disk


class LastWords:
    """Listens from when it is made until :meth:`close`. Does nothing outside the main thread, and where somebody else (an
    asyncio loop) has the wakeup pipe.

    Attributes:
        speakers: each writes its last words; called on a thread of its own with ``{"kind": "signal", "signal": name}``.
    """

    def __init__(self) -> None:
        self.speakers: list[Speaker] = []
        self._pid = os.getpid()
        self._read = self._write = -1
        self._mine: list[int] = []
        self._thread: threading.Thread | None = None
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "set_wakeup_fd"):
            self._listen()

    def _listen(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            self._close_pipe()
            return
        for number in SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._handler)
                self._mine.append(number)
        self._thread = threading.Thread(target=self._run, name="fsdptrace-signals", daemon=True)
        self._thread.start()

    def _handler(self, number: int, frame: FrameType | None) -> None:
        # Should somebody have taken the wakeup pipe since: the thread is told all the same, once Python runs again.
        try:
            os.write(self._write, bytes([number]))
        except OSError:
            pass

    def _run(self) -> None:
        while True:
            try:
                got = os.read(self._read, 1)
            except OSError:
                return
            if not got or not got[0]:
                return
            if got[0] in SIGNALS and os.getpid() == self._pid:
                self._ended(got[0])

    def _ended(self, number: int) -> None:
        words = threading.Thread(target=self._said, args=(signal.Signals(number).name,), daemon=True)
        words.start()
        words.join(PATIENCE)
        # == and not `is`: each look at a method makes a new object.
        if number in self._mine and signal.getsignal(number) == self._handler:
            _end_by(number)

    def _said(self, name: str) -> None:
        for speak in list(self.speakers):
            try:
                speak({"kind": "signal", "signal": name})
            except Exception:  # the process is ending; there is nobody to tell
                pass

    def close(self) -> None:
        """Gives the signals back. The handlers can only be taken off on the main thread; elsewhere they stay, and still end
        the process as the default would."""
        if self._write < 0 or threading.current_thread() is not threading.main_thread():
            return
        self._give_back()
        os.write(self._write, b"\0")  # the thread ends
        if self._thread is not None:
            self._thread.join(PATIENCE)
        self._close_pipe()

    def _give_back(self) -> None:
        for number in self._mine:
            if signal.getsignal(number) == self._handler:
                signal.signal(number, signal.SIG_DFL)
        self._mine.clear()
        now = signal.set_wakeup_fd(-1)
        if now not in (self._write, -1):
            signal.set_wakeup_fd(now)

    def forget(self) -> None:
        """In a forked child: its signals are its own, and the pipe is the parent's."""
        self._give_back()
        self._close_pipe()

    def _close_pipe(self) -> None:
        for end in (self._read, self._write):
            if end >= 0:
                os.close(end)
        self._read = self._write = -1


_listener: LastWords | None = None


def add(speak: Speaker) -> None:
    """``speak`` is called when the process is told to end."""
    global _listener
    if _listener is None:
        _listener = LastWords()
    _listener.speakers.append(speak)


def remove(speak: Speaker) -> None:
    """``speak`` has nothing to say any more; the last one gives the signals back."""
    global _listener
    if _listener is None or speak not in _listener.speakers:
        return
    _listener.speakers.remove(speak)
    if not _listener.speakers:
        _listener.close()
        _listener = None


def _after_fork() -> None:
    global _listener
    if _listener is not None and threading.current_thread() is threading.main_thread():
        _listener.forget()
    _listener = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _end_by(number: int) -> None:
    """Ends this process by signal ``number``, from any thread: Python's own ``signal.signal`` is the main thread's alone."""
    try:
        import ctypes

        ctypes.CDLL(None).signal(number, None)  # SIG_DFL
        os.kill(os.getpid(), number)
    except (ImportError, OSError, AttributeError):
        os._exit(128 + number)


def unhandled() -> str:
    """The exception that ends the program, as ``TypeName at file:line in function``; empty where it ends in order. For the end
    of the process: the interpreter leaves it in ``sys.last_value``."""
    error = getattr(sys, "last_value", None)
    if not isinstance(error, BaseException) or hasattr(sys, "ps1"):
        return ""
    kind = type(error)
    text = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return text
    code = trace.tb_frame.f_code
    return f"{text} at {'/'.join(code.co_filename.split(os.sep)[-2:])}:{trace.tb_lineno} in {code.co_name}"
