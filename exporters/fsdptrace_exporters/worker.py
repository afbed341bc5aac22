"""One sink's thread: reads the files of every process, hands on their steps, and keeps positions.

Each sink has a thread, a reading position and a pace of its own. The files are the queue between training and a back end: while
one takes nothing, its sink reads nothing, and the others go on.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdptrace.analysis.follow import FollowedStep, Follower, Position
from fsdptrace.analysis.sources import Source, find_runs
from fsdptrace.files import NotATrace
from fsdptrace.options import safe_name
from fsdptrace_exporters.sinks import Settings, Sink, Unusable

LOOK = 1.0  # seconds between looks for new files
PAUSE = 0.2  # seconds between looks at files that have nothing new
KEEP = 1.0  # seconds between positions that are written
AT_ONCE = 32  # processes of a finished run that are read at a time


def here() -> str:
    """This host, as headers name it."""
    return safe_name(socket.gethostname().split(".")[0])


@dataclass(slots=True)
class _Followed:
    """A process as one sink sees it: what is delivered (``position``, ``state``), and what of that is in its ``file``."""

    follower: Follower
    file: Path
    position: Position
    state: dict[str, Any] = field(default_factory=dict)
    kept: str = ""
    ended: bool = False


class Worker(threading.Thread):
    """Brings the steps of all processes to one sink.

    Args:
        sink: where they go.
        folder: what is looked through for files; ``only`` of these, where given.
        settings: whether files still grow.
        host: follow only processes of this host; empty for all.
        keep: whether positions are kept, and those found are honoured unless ``again``.

    Attributes:
        delivered: position up to which everything is delivered, by first file.
        over: first files of processes that are over and delivered.
        steps: handed on; ``skipped`` processes were delivered before.
        failed: why it stopped, empty while it works.
    """

    def __init__(
        self, sink: Sink, folder: Path, settings: Settings, host: str = "", keep: bool = True, again: bool = False,
        only: Iterable[Source] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name=f"fsdptrace-{sink.name}", daemon=True)
        self.sink = sink
        self._folder = folder
        self._settings = settings
        self._host = host
        self._keep = keep
        self._again = again
        self._only = None if only is None else list(only)
        self._followed: dict[Path, _Followed] = {}
        self._known: set[Path] = set()
        self.delivered: dict[Path, Position] = {}
        self.over: set[Path] = set()
        self.steps = 0
        self.skipped = 0
        self.running: list[str] = []
        self.failed = ""
        self._kept = 0.0

    @property
    def idle(self) -> bool:
        """Whether everything that was found is over and delivered."""
        return not self._followed

    @property
    def followers(self) -> list[Follower]:
        """Of the processes that are not over, or not delivered."""
        return [followed.follower for followed in list(self._followed.values())]

    def run(self) -> None:
        try:
            self._run()
        except Unusable as error:
            self.failed = str(error)
        except Exception as error:  # a fault of ours: said, and the other sinks go on
            self.failed = f"{self.sink.name} failed: {type(error).__name__}: {error}"
            if os.environ.get("FSDPTRACE_DEBUG"):
                raise
        finally:
            self.sink.close()

    def _run(self) -> None:
        stop = self._settings.stop
        looked = 0.0
        while True:
            if time.monotonic() - looked >= LOOK or not self._known or (self._only and len(self._followed) < AT_ONCE):
                looked = time.monotonic()
                self._discover()
            read = self._round()
            if not self._settings.live and not self._followed and not self._only:
                return
            if stop.is_set():
                self._last()
                return
            if not read:
                stop.wait(PAUSE)

    def _round(self) -> int:
        """One look at every file; lines read."""
        read = 0
        for followed in list(self._followed.values()):
            follower = followed.follower
            count = follower.read()
            read += count
            if not count:
                self._look(followed)
            self.sink.round(follower, not count)
            if follower.ended and not followed.ended:
                followed.ended = True
                self.sink.end(follower)
            # What fills a request goes out at once, so that it does not matter how many files there are. Told to stop, what
            # cannot be delivered is tried once, at the end.
            if count and not self._settings.stop.is_set():
                self.sink.flush(False)
        self._deliver(not read and not self._settings.live)
        return read

    def _look(self, followed: _Followed) -> None:
        follower = followed.follower
        if self._settings.live:
            follower.look(here())
        elif not follower.ended:
            if follower.lives(here()):
                self.running.append(f"rank {follower.header.rank}")
                del self._followed[follower.path]
            else:
                follower.give_up()

    def _last(self) -> None:
        """Told to stop: what is in the files now still goes out, as long as we are let."""
        deadline = time.monotonic() + 2
        while self._round() and time.monotonic() < deadline:
            pass
        self._deliver(True)
        self._write_positions(True)

    def _deliver(self, due: bool) -> bool:
        """Flushes the sink; when all is out, positions move on."""
        ended = any(followed.ended for followed in self._followed.values())
        if not self.sink.flush(due or ended):
            return False
        for path, followed in list(self._followed.items()):
            followed.position = self._reached(followed)
            followed.state = self.sink.state(followed.follower)
            self.delivered[path] = followed.position
        self._write_positions(ended)
        for path, followed in list(self._followed.items()):
            if followed.ended:
                followed.follower.close()
                self.over.add(path)
                del self._followed[path]
        return True

    def _reached(self, followed: _Followed) -> Position:
        """Up to where everything that was flushed goes."""
        own = getattr(self.sink, "reached", None)
        if own is None:
            return followed.follower.position
        position: Position | None = own(followed.follower)
        return position or followed.position

    # -- finding files -------------------------------------------------------------------------------------------------
    def _discover(self) -> None:
        if self._only is not None:
            # Of a finished run some at a time: their order does not matter, and memory and open files stay few.
            while self._only and len(self._followed) < AT_ONCE:
                self._take_on(self._only.pop(0))
            return
        for source in self._new():
            self._take_on(source)

    def _take_on(self, source: Source) -> None:
        if source.path not in self._known:
            self._known.add(source.path)
            if not self._host or source.header.host == self._host:
                self._begin(source)

    def _new(self) -> Iterable[Source]:
        for where, _folders, names in os.walk(self._folder):
            for name in sorted(names):
                path = Path(where) / name
                if not name.endswith(".jsonl") or path in self._known:
                    continue
                try:
                    runs, _ = find_runs(path)
                except (NotATrace, OSError):
                    continue
                for source in (source for run in runs for source in run.sources):
                    if source.path not in self._known:
                        yield source
                if path != source.path:
                    self._known.add(path)  # a further part

    def _begin(self, source: Source) -> None:
        file = source.path.with_name(f"{source.path.name.removesuffix('.jsonl')}.{self.sink.name}.position")
        position, state = self._read_position(file)
        if position is not None and position.ended:
            self.skipped += 1
            self.over.add(source.path)
            self.delivered[source.path] = position
            return

        def take(step: FollowedStep) -> None:
            self.steps += 1
            self.sink.step(follower, step)

        follower = Follower(source, take, position, getattr(self.sink, "lines", None))
        self._followed[source.path] = _Followed(follower, file, position or Position(), state)
        self.sink.begin(follower, state)

    # -- positions -----------------------------------------------------------------------------------------------------
    def _read_position(self, file: Path) -> tuple[Position | None, dict[str, Any]]:
        if not self._keep or self._again:
            return None, {}
        try:
            data = json.loads(file.read_text())
            return Position.from_json(data["position"]), dict(data["state"])
        except FileNotFoundError:
            return None, {}
        except (OSError, ValueError, KeyError, TypeError):
            self._settings.say(f"note: {file} cannot be read: everything is sent again, under the same ids")
            return None, {}

    def _write_positions(self, now: bool) -> None:
        if not self._keep or (not now and time.monotonic() - self._kept < KEEP):
            return
        self._kept = time.monotonic()
        for followed in self._followed.values():
            text = json.dumps({"position": followed.position.to_json(), "state": followed.state}, separators=(",", ":"))
            if text == followed.kept:
                continue
            temporary = followed.file.with_suffix(".new")
            try:
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                with os.fdopen(fd, "w") as stream:
                    stream.write(text)
                os.replace(temporary, followed.file)
            except OSError as error:
                self._keep = False
                self._settings.say(
                    f"note: positions cannot be kept in {followed.file.parent} ({error.strerror or error}): an exporter that "
                    "is started again sends everything again, under the same ids"
                )
                return
            followed.kept = text
