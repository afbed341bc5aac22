"""The process that exports: a worker for every sink, until all is delivered or nobody is left to follow; clears away."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fsdptrace.analysis.follow import Follower
from fsdptrace.analysis.sources import Source, choose, find_runs
from fsdptrace_exporters.sinks import Settings, Sink, Unusable
from fsdptrace_exporters.worker import Worker, here


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
            if any(_runs(follower) for worker in working for follower in worker.followers):
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
