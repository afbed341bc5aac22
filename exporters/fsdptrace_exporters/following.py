"""The process that exports: follows the files of a folder, hands every step to each sink, keeps positions, clears away.

Each sink has a thread, a reading position and a pace of its own. The files are the queue between training and a back end: while
one takes nothing, its sink reads nothing, and the others go on.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fsdptrace.analysis.follow import FollowedStep, Follower, Position
from fsdptrace.analysis.sources import Source, choose, find_runs
from fsdptrace.files import NotATrace
from fsdptrace.options import safe_name
from fsdptrace_exporters.sinks import Settings, Sink, Unusable

LOOK = 1.0  # seconds between looks for new files
PAUSE = 0.2  # seconds between looks at files that have nothing new
KEEP = 1.0  # seconds between positions that are written


def here() -> str:
    """This host, as headers name it."""
    return safe_name(socket.gethostname().split(".")[0])


def make_sinks(targets: Sequence[str], settings: Settings) -> list[Sink]:
    """The sinks for ``NAME`` or ``NAME:ARGUMENT``.

    Raises:
        Unusable: there is no exporter of that name, or it cannot be used.
    """
    known = {entry.name: entry for entry in entry_points(group="fsdptrace.exporters")}
    sinks: list[Sink] = []
    for target in targets:
        name, _, argument = target.partition(":")
        if name not in known:
            raise Unusable(f"--to {name}: there is no such exporter; installed are {', '.join(sorted(known)) or 'none'}")
        try:
            factory = known[name].load()
        except ImportError as error:
            raise Unusable(f"--to {name} needs {error.name or error}, which is not installed: {_mend(name)}") from None
        sinks += factory(argument, settings)
    return sinks


def _mend(name: str) -> str:
    return "pip install fsdptrace" if name == "otlp" else f"pip install 'fsdptrace[{name}]'"


@dataclass(slots=True)
class _Followed:
    """A process as one sink sees it."""

    follower: Follower
    file: Path
    position: Position
    state: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
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
            if time.monotonic() - looked >= LOOK or not self._known:
                looked = time.monotonic()
                self._discover()
            read = self._round()
            if not self._settings.live and not self._followed:
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
            if count and not self._deliver(False):
                continue
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
        for source in self._only if self._only is not None else self._new():
            if source.path in self._known:
                continue
            self._known.add(source.path)
            if self._host and source.header.host != self._host:
                continue
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
            data = {"position": followed.position.to_json(), "state": followed.state}
            temporary = followed.file.with_suffix(".new")
            try:
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                with os.fdopen(fd, "w") as stream:
                    json.dump(data, stream, separators=(",", ":"))
                os.replace(temporary, followed.file)
            except OSError as error:
                self._keep = False
                self._settings.say(
                    f"note: positions cannot be kept in {followed.file.parent} ({error.strerror or error}): an exporter that "
                    "is started again sends everything again, under the same ids"
                )
                return


class Export:
    """All sinks over one folder.

    Args:
        folder: a run's folder, or one with several.
        sinks: where it goes.
        exit_after: seconds after the last process ended at which it stops whatever is left, ``None``: it goes on until told.
        remove: files go once every sink has delivered them.
        others: as for :class:`Worker`.
    """

    def __init__(
        self, folder: Path, sinks: Sequence[Sink], settings: Settings, exit_after: float | None = None, remove: bool = False,
        **others: Any,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._settings = settings
        self._exit_after = exit_after
        self._remove = remove
        self.workers = [Worker(sink, folder, settings, **others) for sink in sinks]

    def run(self) -> None:
        """Returns when all is delivered, or it was told to stop, or there is nobody left to follow."""
        for worker in self.workers:
            worker.start()
        idle_since = time.monotonic()
        while any(worker.is_alive() for worker in self.workers) and not self._settings.stop.wait(0.1):
            if self._remove:
                self._clear()
            if not self._settings.live or self._exit_after is None:
                continue
            # A trainer that is there counts as soon as one worker has found it.
            working = [worker for worker in self.workers if worker.is_alive()]
            now = time.monotonic()
            if any(_runs(follower) for worker in working for follower in _followers(worker)):
                idle_since = now
            quiet = now - idle_since
            linger = max((worker.sink.linger for worker in working), default=0.0)
            seen = any(worker.over for worker in working)
            if all(worker.idle for worker in working) and quiet >= (linger if seen else self._exit_after):
                break
            if quiet >= self._exit_after + linger:
                break
        self._settings.stop.set()
        for worker in self.workers:
            worker.join(timeout=5)
        if self._remove:
            self._clear()

    @property
    def left(self) -> list[str]:
        """Sinks that have not delivered everything."""
        return [worker.sink.name for worker in self.workers if not worker.idle or worker.is_alive()]

    # -- clearing away -------------------------------------------------------------------------------------------------
    def _clear(self) -> None:
        """Removes what every sink has delivered: whole processes that are over, and parts that were rotated out."""
        done = set.intersection(*(worker.over for worker in self.workers)) if self.workers else set()
        for path in done:
            if path.exists():
                for part in _files_of(path):
                    _unlink(part)
        common = set.intersection(*(set(worker.delivered) for worker in self.workers)) if self.workers else set()
        for path in common - done:
            reached = min(worker.delivered[path].part for worker in self.workers)
            stem = path.name.removesuffix(".jsonl")
            for number in range(1, reached):
                _unlink(path.with_name(f"{stem}.{number}.jsonl"))
        if done and not self._settings.stop.is_set():
            return
        if done:
            _unlink_empty(self._folder)


def _runs(follower: Follower) -> bool:
    """Whether its process runs, as far as one knows without reading on: a sink that waits for its back end reads nothing."""
    return not follower.ended and (follower.lives(here()) or time.monotonic() - follower.grew < 10)


def _followers(worker: Worker) -> list[Follower]:
    return [followed.follower for followed in list(worker._followed.values())]


def _files_of(path: Path) -> list[Path]:
    """All files of the process whose first one is ``path``, that one last."""
    stem = path.name.removesuffix(".jsonl")
    others = [other for other in path.parent.iterdir() if other.name.startswith(f"{stem}.") and other != path]
    return [*others, path]


def _unlink(path: Path) -> None:
    try:
        path.unlink()
    except OSError:
        pass


def _unlink_empty(folder: Path) -> None:
    """The folder, where nothing is left in it but our own log."""
    try:
        if {path.name for path in folder.iterdir()} <= {"exporter.log"}:
            _unlink(folder / "exporter.log")
            folder.rmdir()
    except OSError:
        pass


def sources_of(folder: Path, run: str | None) -> tuple[list[Source], str]:
    """The files of a run (the newest one, or that named ``run``) and its label.

    Raises:
        NotATrace: there is nothing.
    """
    runs, _ = find_runs(folder)
    chosen = choose(runs, run)
    return list(chosen.sources), chosen.label
