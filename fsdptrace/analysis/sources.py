"""Which files there are: one :class:`Source` per process, grouped into runs by what their headers say."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from fsdptrace.analysis.records import PARSE_ERRORS, parse
from fsdptrace.checks.text import count
from fsdptrace.events import SCHEMA
from fsdptrace.files import NotATrace, tail_of

_HEADER_LINES = 5  # a header is the first line; a few more are tried where that one is damaged
_HEADER_BYTES = 1 << 20
_PACKED = (".jsonl.gz", ".jsonl.zst", ".jsonl.xz", ".jsonl.bz2")
_FIRST_LINES = 600  # header, up to 255 models and their corrections


@dataclass(frozen=True, slots=True)
class Problem:
    """Something about a file that the reader should know: one clear line."""

    path: Path
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a process's file, every value of the type that it should have.

    ``unix_ns`` and ``perf_counter_ns`` are one moment on both clocks; 0 where the header does not say.
    """

    rank: int
    world_size: int
    role: str
    host: str
    pid: int
    run_id: str
    run_id_source: str
    attempt: int
    versions: Mapping[str, str]
    options: Mapping[str, Any]
    coverage: tuple[str, ...]
    unix_ns: int
    perf_counter_ns: int
    local_rank: int = 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Header:
        """Reads a header line; what is missing or of another type gets a neutral value."""
        versions, options, clock, coverage = (data.get(name) for name in ("versions", "options", "clock", "coverage"))
        clock = clock if isinstance(clock, dict) else {}
        return cls(
            rank=_int(data.get("rank")),
            world_size=max(1, _int(data.get("world_size"))),
            role=str(data.get("role") or ""),
            host=str(data.get("host") or "?"),
            pid=_int(data.get("pid")),
            run_id=str(data.get("run_id") or "?"),
            run_id_source=str(data.get("run_id_source") or ""),
            attempt=_int(data.get("attempt")),
            versions={str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {},
            options=options if isinstance(options, dict) else {},
            coverage=tuple(str(line) for line in coverage) if isinstance(coverage, list) else (),
            unix_ns=_int(clock.get("unix_ns")),
            perf_counter_ns=_int(clock.get("perf_counter_ns")),
            local_rank=_int(data.get("local_rank")),
        )


@dataclass(frozen=True, slots=True)
class Source:
    """The files of one process: ``parts`` in the order of writing, and ``tail`` with what a killed process left of its
    running step."""

    path: Path
    header: Header
    parts: tuple[Path, ...]
    tail: Path | None


@dataclass(frozen=True, slots=True)
class RunSources:
    """The processes of one run (one attempt of it), by rank; ``started`` in Unix ns."""

    id: str
    attempt: int
    sources: tuple[Source, ...]
    started: int

    @property
    def label(self) -> str:
        """How the run is named on the command line: its id, with ``:N`` for a restart."""
        return f"{self.id}:{self.attempt}" if self.attempt else self.id


def _int(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def find_runs(folder: str | Path) -> tuple[list[RunSources], list[Problem]]:
    """All runs under ``folder`` (the out folder, a run's folder, or one file), newest first, and what could not be used.

    Raises:
        NotATrace: there is nothing of fsdptrace's; the message says what was found instead.
    """
    folder = Path(folder)
    problems: list[Problem] = []
    sources: list[Source] = []
    for parts in _processes(folder, problems):
        source, problem = _open(parts)
        if source is not None:
            sources.append(source)
        if problem is not None:
            problems.append(problem)
    if not sources:
        raise NotATrace(_nothing(folder, problems))
    sources = _joined(sources, problems)
    by_run: dict[tuple[str, int], list[Source]] = {}
    for source in sources:
        by_run.setdefault((source.header.run_id, source.header.attempt), []).append(source)
    runs = [
        RunSources(
            run_id, attempt, tuple(sorted(group, key=lambda s: (s.header.role, s.header.rank, s.header.unix_ns, s.path))),
            max(source.header.unix_ns for source in group),
        )
        for (run_id, attempt), group in by_run.items()
    ]  # fmt: skip
    return sorted(runs, key=lambda run: (run.started, run.id), reverse=True), problems


def _joined(sources: Sequence[Source], problems: list[Problem]) -> list[Source]:
    """One source per process: parts whose names no longer say that they belong together are joined in the order of their
    events, and a copy in another place, which would count twice, is left out."""
    together: dict[tuple[object, ...], list[Source]] = {}
    for source in sources:
        header = source.header
        process = (header.run_id, header.attempt, header.role, header.rank, header.host, header.pid)
        # Without a clock nothing says that two files are of one process: a pid comes again.
        moment = (header.unix_ns, header.perf_counter_ns) if header.perf_counter_ns else (source.path,)
        together.setdefault((*process, *moment), []).append(source)
    return [_join(group, problems) if len(group) > 1 else group[0] for group in together.values()]


def _join(group: Sequence[Source], problems: list[Problem]) -> Source:
    by_first: dict[int, Source] = {}
    for source in sorted(group, key=lambda source: (-_bytes(source), source.path)):
        known = by_first.setdefault(_first_event(source.parts[0]), source)
        if known is not source:
            problems.append(Problem(source.path, f"a copy of {known.path}, or of a part of it; left out"))
    parts = [source for _, source in sorted(by_first.items())]
    tail = next((source.tail for source in parts if source.tail is not None), None)
    return Source(parts[0].path, parts[0].header, tuple(path for source in parts for path in source.parts), tail)


def _bytes(source: Source) -> int:
    return sum(part.stat().st_size for part in source.parts)


def _first_event(path: Path) -> int:
    """The number of the first event in a file; -1 where its first lines have none."""
    with open(path, "rb") as stream:
        for raw in islice(stream, _FIRST_LINES):
            found = re.match(rb'\{"seq": ?(\d{1,18}),', raw)
            if found:
                return int(found[1])
    return -1


def choose(runs: Sequence[RunSources], wanted: str | None) -> RunSources:
    """The run named ``wanted`` (an id, or ``ID:ATTEMPT``), or the newest.

    Raises:
        NotATrace: no run of that name; the message lists those that there are.
    """
    if wanted is None:
        return runs[0]
    for run in runs:
        if wanted in (run.label, f"{run.id}:{run.attempt}"):
            return run
    for run in runs:
        if run.id == wanted:
            return run
    there = ", ".join(run.label for run in runs[:10]) + (f" and {len(runs) - 10} more" if len(runs) > 10 else "")
    raise NotATrace(f"no run {wanted!r}; there are: {there}")


def _nothing(folder: Path, problems: list[Problem]) -> str:
    if problems:
        shown = "; ".join(str(problem) for problem in problems[:3])
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        return f"{folder}: no trace that can be read. {shown}{more}"
    return f"{folder}: no .jsonl files in it; give the folder that `out` named (default ./fsdptrace-out) or one run's folder"


def _processes(folder: Path, problems: list[Problem]) -> list[list[Path]]:
    """The parts of each process under ``folder``, in the order of writing."""
    if folder.is_file():
        stem = _stem(folder.name)[0]
        beside = [path for path in folder.parent.iterdir() if path.suffix == ".jsonl" and _stem(path.name)[0] == stem]
        parts = [path for path in beside if path.is_file()]
        candidates = parts or [folder]
    elif folder.is_dir():
        candidates = _walk(folder, problems)
    else:
        raise NotATrace(f"{folder}: {'neither a file nor a folder' if folder.exists() else 'no such file or folder'}")
    processes: dict[tuple[Path, str], list[tuple[int, Path]]] = {}
    for path in candidates:
        stem, number = _stem(path.name)
        processes.setdefault((path.parent, stem), []).append((number, path))
    return [[path for _, path in sorted(parts)] for _, parts in sorted(processes.items())]


def _walk(folder: Path, problems: list[Problem]) -> list[Path]:
    def unreadable(error: OSError) -> None:
        problems.append(Problem(Path(error.filename), f"cannot be read: {error.strerror or error}"))

    found = []
    packed: list[str] = []
    for where, _folders, names in os.walk(folder, onerror=unreadable):
        for path in (Path(where) / name for name in names if name.endswith(".jsonl")):
            if path.is_file() or not path.exists():  # what is gone is said when it is opened
                found.append(path)
            else:
                problems.append(Problem(path, "a pipe, socket or device, no file; left out"))
        packed += [name for name in sorted(names) if name.endswith(_PACKED)]
    if packed:
        problems.append(Problem(folder, f"{count(len(packed), 'compressed file')} ({packed[0]}…): unpack to have them read"))
    return found


def _stem(name: str) -> tuple[str, int]:
    """``("rank00000.host-12", 3)`` of ``rank00000.host-12.3.jsonl``; part 0 where no number is."""
    stem = name.removesuffix(".jsonl")
    first, _, last = stem.rpartition(".")
    return (first, int(last)) if first and last.isdigit() and first.count(".") else (stem, 0)


def _open(parts: list[Path]) -> tuple[Source | None, Problem | None]:
    first = parts[0]
    try:
        empty = not any(part.stat().st_size for part in parts)
        data = next((found for part in parts if (found := _header(part))), None)
    except OSError as error:
        return None, Problem(first, f"cannot be read: {error.strerror or error}")
    if empty:
        return None, Problem(first, "empty: the process ended before its first line was written")
    if data is None:
        return None, Problem(first, "not a file of fsdptrace: no header in its first lines; left out")
    if data["schema"] != SCHEMA:
        theirs = str(data["schema"])[:40]
        return None, Problem(
            first, f"schema {theirs!r}, this fsdptrace reads {SCHEMA!r}: use the version that wrote it; left out"
        )  # fmt: skip
    stem = first.name.removesuffix(".jsonl") if not _stem(first.name)[1] else _stem(first.name)[0]
    tail = tail_of(first.with_name(f"{stem}.jsonl"))
    return Source(first, Header.from_json(data), tuple(parts), tail if tail.is_file() else None), None


def _header(path: Path) -> dict[str, Any] | None:
    with open(path, "rb") as stream:
        for _ in range(_HEADER_LINES):
            raw = stream.readline(_HEADER_BYTES)
            if not raw:
                break
            try:
                data = parse(raw)
            except PARSE_ERRORS:
                continue
            if isinstance(data, dict) and str(data.get("schema", "")).startswith("fsdptrace/"):
                return data
    return None


def exists(pid: int) -> bool:
    """Whether this host has a process of that number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return pid > 0
