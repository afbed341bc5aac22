"""``record(live=True)``: the process that shows the run at the lower edge of the terminal, started and ended."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

GIVE_BACK = 3.0  # seconds that it gets to give the terminal back


class Panel:
    """The process, one per node: that of local rank 0. It is spawned, reads the files, and ends with this process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._pid = os.getpid()

    @classmethod
    def start(cls, folder: Path, run: str, local_rank: int, complain: Callable[[str], None]) -> Panel | None:
        """Starts it where standard error is a terminal; else says how the run can be watched. ``run`` is its label."""
        if local_rank:
            return None
        if not _is_terminal():
            complain(f"live: standard error is no terminal; watch this run with: fsdptrace top {folder}")
            return None
        if importlib.util.find_spec("rich") is None:
            complain("live: the view needs rich, which is not installed: pip install 'fsdptrace[cli]'")
            return None
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FSDPTRACE")}
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "fsdptrace.cli.below", str(folder), run], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, env=environment,
            )  # fmt: skip
        except OSError as error:
            complain(f"live: the view could not be started: {error.strerror or error}")
            return None
        return cls(process)

    def close(self) -> None:
        """Ends it and waits until the terminal is as it was."""
        if self._pid != os.getpid():
            return
        self._process.terminate()
        try:
            self._process.wait(GIVE_BACK)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _is_terminal() -> bool:
    """Whether file descriptor 2 is one: `sys.stderr` may be another thing by now, or closed."""
    try:
        return os.isatty(2)
    except OSError:
        return False
