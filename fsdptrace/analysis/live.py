"""A run while it goes on: what each rank does now, from the ends of its growing files.

Nothing is read twice, and where a file grows faster than somebody can look, what lies between two looks is passed over: steps,
violations and signs of life are told by their own lines, and what is gathered is known again after the next step.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdptrace.analysis.records import PARSE_ERRORS, parse
from fsdptrace.analysis.sources import Problem, Source, choose, find_runs
from fsdptrace.files import NotATrace, tail_of
from fsdptrace.model_map import ModelMap, show_name

MOST = 4 << 20  # bytes of one file that are read at one look
KEPT = 1 << 20  # bytes that are read of what grew more than that
SILENT = 5.0  # seconds without a line, where one comes every second
LOOK_FOR_FILES = 3.0  # seconds between looks for files of further ranks

_KIND = re.compile(rb'"kind": ?"(\w+)"')
_EVENTS = frozenset((b"unshard", b"reshard", b"discard", b"state"))
_LINES = frozenset((b"step", b"violation", b"heartbeat", b"entered", b"end", b"model", b"exception"))
_BAD: tuple[type[Exception], ...] = (*PARSE_ERRORS, KeyError, TypeError, IndexError, AttributeError)
COLLECTIVES = {"unshard": "all-gather", "wait": "wait", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce"}


@dataclass(frozen=True, slots=True)
class Found:
    """A violation as the file has it."""

    rank: int
    step: int
    severity: str
    rule: str
    fqn: str
    message: str
    t: int


@dataclass(slots=True)
class RankNow:
    """One rank as it stands.

    Attributes:
        step: number of the running step (of the model that is furthest), of the last one once it has ended; ``step_ns`` is what
            the last finished one took, 0 before.
        gathered: bytes open or pending now; None while unknown, because lines were passed over or are not written.
        open: units that hold them, largest first.
        peak, past_backward: of the last finished step, in bytes.
        errors, warnings: how many were found.
        inside: the collective that it has entered and not left, with its unit; ``inside_s`` for how long, as far as known.
        idle_s: seconds since its last line.
        ended: ``""`` while it runs, ``"ended"`` after its last line, ``"silent"`` when lines stopped coming without one.
        exception: the last exception that left the model or the recording.
    """

    rank: int
    world_size: int
    role: str
    host: str
    step: int = -1
    step_ns: int = 0
    gathered: int | None = 0
    open: list[tuple[str, int]] = field(default_factory=list)
    peak: int = 0
    past_backward: int = 0
    errors: int = 0
    warnings: int = 0
    inside: str = ""
    inside_s: float = 0.0
    idle_s: float = 0.0
    ended: str = ""
    exception: str = ""


@dataclass(slots=True)
class RunNow:
    """The run as it stands: its ranks in order, the last violation of severity ``error`` or ``warning``, and problems of
    files."""

    label: str
    folder: Path
    ranks: list[RankNow]
    last: Found | None
    problems: list[str]

    @property
    def over(self) -> bool:
        """Whether every rank that has a file wrote its last line."""
        return all(rank.ended == "ended" for rank in self.ranks)


class RankWatch:
    """Reads one process's files as they grow."""

    def __init__(self, source: Source) -> None:
        header = source.header
        self.source = source
        self.now = RankNow(header.rank, header.world_size, header.role, header.host)
        self.last: Found | None = None
        self.problem = ""
        self._offset = header.unix_ns - header.perf_counter_ns if header.unix_ns else None
        self._maps: dict[int, ModelMap] = {}
        self._open: dict[tuple[int, int], int] = {}  # (model, group): bytes
        self._known = True  # whether what is open is known
        self._part = 0  # which of the files is read
        self._at = 0
        self._rest = b""
        self._step_end: dict[int, int] = {}
        self._inside: tuple[str, int, int] | None = None  # what, number of the last event, since when
        self._seen = time.monotonic()
        self._last_t = 0
        self._tail_stamp: tuple[int, int] | None = None
        self._events_step = -1  # of the newest event, and of the newest step that ended
        self._finished = -1

    def look(self) -> RankNow:
        """Takes what was written since the last look."""
        try:
            while self._read():
                pass
            self._look_at_tail()
        except OSError as error:
            self.problem = f"{error.filename}: {error.strerror or error}"
        self._sum_up()
        return self.now

    # -- bytes ---------------------------------------------------------------------------------------------------------
    def _path(self) -> Path:
        first = self.source.path
        return first if not self._part else first.with_name(f"{first.stem}.{self._part}.jsonl")

    def _read(self) -> bool:
        """Reads on; whether there may be more."""
        path = self._path()
        size = path.stat().st_size
        if size < self._at:  # thinned, or replaced: what is in it now was read before
            self._at, self._rest = size, b""
        if size > self._at:
            self._take_bytes(path, size)
        if self._part_after().exists():
            self._part, self._at, self._rest = self._part + 1, 0, b""
            return True
        return False

    def _part_after(self) -> Path:
        first = self.source.path
        return first.with_name(f"{first.stem}.{self._part + 1}.jsonl")

    def _take_bytes(self, path: Path, size: int) -> None:
        skipped = size - self._at > MOST
        with open(path, "rb") as stream:
            if skipped and not self._at:  # the first look at a long file: its first lines say what the model is
                for _ in range(64):
                    self._line(stream.readline(1 << 24))
            start = size - KEPT if skipped else self._at
            stream.seek(start)
            data = stream.read(size - start)
        self._at = size
        if skipped:
            self._rest, data = b"", data[data.find(b"\n") + 1 :]
            self._open.clear()
            self._known = False
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            self._line(line)
        self._seen = time.monotonic()

    def _line(self, line: bytes) -> None:
        match = _KIND.search(line, 0, 80)
        if match is None:
            return
        kind = match[1]
        try:
            if kind in _EVENTS:
                self._event(parse(line))
            elif kind in _LINES:
                getattr(self, f"_take_{kind.decode()}")(parse(line))
        except _BAD:
            pass  # a torn or foreign line: `report` counts them

    # -- lines ---------------------------------------------------------------------------------------------------------
    def _event(self, data: Mapping[str, Any]) -> None:
        model, group, kind = int(data.get("model", 0)), int(data["group"]), data["kind"]
        self._last_t = max(self._last_t, int(data["t1"]))
        self._running(model, int(data["step"]))
        self._events_step = max(self._events_step, int(data["step"]))
        key = (model, group)
        if kind == "unshard":
            if "noop" not in data:
                self._open[key] = int(data["bytes"])
        elif kind == "state":
            if data.get("sharded") == "unsharded" or data.get("pending"):
                self._open[key] = int(data.get("bytes") or 0)
        else:
            self._open.pop(key, None)

    def _running(self, model: int, step: int) -> None:
        self.now.step = max(self.now.step, step)

    def _take_step(self, data: Mapping[str, Any]) -> None:
        model, t = int(data.get("model", 0)), int(data["t1"])
        now = self.now
        before = self._step_end.get(model)
        now.step_ns = t - before if before else 0
        self._step_end[model] = t
        self._last_t = max(self._last_t, t)
        now.peak, now.past_backward = int(data["unsharded_peak"]), int(data["past_backward_bytes"])
        now.past_backward = max(now.past_backward, int(data.get("past_backward_peak", 0)))
        self._finished = max(self._finished, int(data["step"]))
        self._running(model, int(data["step"]) + 1)
        held = int(data["unsharded_bytes"])
        mine = {key: size for key, size in self._open.items() if key[0] == model}
        if sum(mine.values()) != held:  # events were passed over or not written
            for key in mine:
                del self._open[key]
        self._known = sum(size for key, size in self._open.items() if key[0] == model) == held

    def _take_violation(self, data: Mapping[str, Any]) -> None:
        severity = str(data["severity"])
        if severity == "error":
            self.now.errors += 1
        elif severity == "warning":
            self.now.warnings += 1
        else:
            return
        if severity == "warning" and self.now.errors:
            return  # the last error says more
        self.last = Found(
            self.now.rank, int(data["step"]), severity, str(data["rule"]), str(data.get("fqn") or ""), str(data["message"]),
            int(data.get("t1", 0)) + (self._offset or 0),
        )  # fmt: skip

    def _take_heartbeat(self, data: Mapping[str, Any]) -> None:
        t = int(data["t"])
        self._last_t = max(self._last_t, t)
        for model, step in (data.get("steps") or {"0": data.get("step", 0)}).items():
            self._running(int(model), int(step))
        entered = data.get("collective")
        if not isinstance(entered, dict):
            self._inside = None
            return
        what = self._collective(str(entered.get("kind")), int(entered.get("model", 0)), int(entered["group"]))
        number = int(data.get("last", 0))
        if self._inside is None or self._inside[:2] != (what, number):
            self._inside = (what, number, t)

    def _take_entered(self, data: Mapping[str, Any]) -> None:
        what = self._collective(str(data["what"]), int(data.get("model", 0)), int(data["group"]))
        self._inside = (what, -1, int(data["t"]))

    def _collective(self, kind: str, model: int, group: int) -> str:
        known = self._maps.get(model)
        unit = show_name(known.groups[group].fqn) if known is not None else f"group {group}"
        return f"{COLLECTIVES.get(kind, kind)} of {unit}"

    def _take_exception(self, data: Mapping[str, Any]) -> None:
        self.now.exception = str(data.get("type", ""))

    def _take_model(self, data: Mapping[str, Any]) -> None:
        model = ModelMap.from_json(data)
        self._maps[model.model] = model

    def _take_end(self, data: Mapping[str, Any]) -> None:
        self.now.ended = "ended"
        self.now.step = max(self._finished, self._events_step)
        self._last_t = max(self._last_t, int(data.get("t", 0)))

    # -- a step that is written only if something happens in it ----------------------------------------------------------
    def _look_at_tail(self) -> None:
        """Its newest events lie in a file beside, which is written anew every second."""
        tail = tail_of(self.source.path)
        try:
            stat = tail.stat()
        except OSError:
            return
        stamp = (stat.st_mtime_ns, stat.st_size)
        if stamp == self._tail_stamp or self.now.ended == "ended":
            return
        self._tail_stamp = stamp
        if not stat.st_size:
            return
        lines = tail.read_bytes().split(b"\n")
        self._open.clear()
        first = _number(lines[0])
        for line in lines[:-1]:
            self._line(line)
        # Of a step of more events than are kept only the newest are there.
        self._known = len(lines) < 4096 and first >= 0
        self._seen = time.monotonic()

    # -- the answer ----------------------------------------------------------------------------------------------------
    def _sum_up(self) -> None:
        now = self.now
        held = sorted(((self._unit(key), size) for key, size in self._open.items()), key=lambda item: (-item[1], item[0]))
        now.open = held
        now.gathered = sum(size for _, size in held) if self._known else None
        now.idle_s = self._idle()
        if now.ended != "ended":
            now.ended = "silent" if now.idle_s > SILENT else ""
        now.inside, now.inside_s = "", 0.0
        if self._inside is not None and now.ended != "ended":
            what, _number, since = self._inside
            now.inside = what
            now.inside_s = max(0.0, (self._last_t - since) / 1e9 + now.idle_s)

    def _unit(self, key: tuple[int, int]) -> str:
        model = self._maps.get(key[0])
        return show_name(model.groups[key[1]].fqn) if model is not None and key[1] < len(model.groups) else f"group {key[1]}"

    def _idle(self) -> float:
        """By the clock of the last line, which another host's may not agree with; never longer than nothing was read."""
        waited = time.monotonic() - self._seen
        if self._offset is None or not self._last_t:
            return waited
        told = (time.time_ns() - self._last_t - self._offset) / 1e9
        return max(0.0, told) if waited < SILENT else max(waited, told)


def _number(line: bytes) -> int:
    match = re.match(rb'\{"seq":(\d+)', line)
    return int(match[1]) if match else -1


class RunWatch:
    """Looks at a run again and again: the newest one in the folder when it began, or the one that is named.

    Raises:
        NotATrace: there is nothing to read, or no run of that name.
    """

    def __init__(self, folder: str | Path, run: str | None = None) -> None:
        self._folder = Path(folder)
        runs, problems = find_runs(folder)
        chosen = choose(runs, run)
        self.label = chosen.label
        self.folder = chosen.sources[0].path.parent
        self._problems: list[Problem] = problems
        self._ranks: dict[Path, RankWatch] = {}
        self._looked = time.monotonic()
        self._add(chosen.sources)

    def _add(self, sources: tuple[Source, ...]) -> None:
        for source in sources:
            if source.path not in self._ranks:
                self._ranks[source.path] = RankWatch(source)

    def look(self) -> RunNow:
        """The run as it stands now."""
        if time.monotonic() - self._looked > LOOK_FOR_FILES:
            self._looked = time.monotonic()
            try:
                runs, self._problems = find_runs(self._folder)
                self._add(choose(runs, self.label).sources)
            except (NotATrace, OSError):
                pass  # the files are gone; what is known stays
        now = [watch.look() for watch in self._ranks.values()]
        found = [watch.last for watch in self._ranks.values() if watch.last is not None]
        problems = [str(problem) for problem in self._problems] + [w.problem for w in self._ranks.values() if w.problem]
        return RunNow(
            self.label, self.folder, sorted(now, key=lambda rank: (rank.role, rank.rank)),
            max(found, key=lambda item: (item.severity == "error", item.t), default=None), problems,
        )  # fmt: skip
