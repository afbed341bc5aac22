"""The JSONL format: how an event becomes a line, and how a file is read back.

A file is ``DIR/{run_id}/rank00000.host-pid.jsonl``; readers go by the header, never by the name. First line the header,
then a ``model`` line per recorded root, event lines, ``heartbeat`` lines once a second, and an ``end`` line; a file
without one is of a process that died and is read all the same. Lines leave out what is usual (see ``usual`` in
:mod:`fsdptrace.events`); reading fills it in.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdptrace import events as ev
from fsdptrace.events import DTYPE_NUMBER, Event, Texts, unpack_how
from fsdptrace.model_map import ModelMap

_CACHE_LIMIT = 20_000


class LineFormatter:
    """Formats records as lines, about 1 µs each: what recurs is cached as text.

    Args:
        texts: the session's strings.
        models: the maps by model number; may grow later.
    """

    def __init__(self, texts: Texts, models: dict[int, ModelMap]) -> None:
        self._texts = texts
        self._models = models
        self._heads: dict[tuple[int, int, int], str] = {}
        self._tails: dict[tuple[int, ...], str] = {}

    def forget(self) -> None:
        """Drops cached text; needed when a model's map changes."""
        self._heads.clear()
        self._tails.clear()

    def lines(self, records: Sequence[int], start: int, stop: int, step: int) -> str:
        """The lines of ``records[start:stop]``, newline after each."""
        heads, tails = self._heads, self._tails
        step_text = f',"step":{step}'
        out: list[str] = []
        # One iterator twelve times: zip then takes a record at a time, without a slice for each.
        values = iter(records[start:stop])
        for kind, seq, t0, t1, group, parent, context, a, b, c, d, e in zip(*[values] * ev.WIDTH, strict=True):
            head = heads.get((kind, group, context))
            if head is None:
                head = self._head(kind, group, context)
            tail = tails.get((kind, group, context, a, b, c, d, e))
            if tail is None:
                tail = self._tail(kind, group, context, (a, b, c, d, e))
            parent_text = f',"parent":{parent}' if parent else ""
            out.append(f'{{"seq":{seq},{head},"t0":{t0},"t1":{t1}{step_text}{parent_text}{tail}}}\n')
        return "".join(out)

    def _head(self, kind: int, group: int, context: int) -> str:
        if len(self._heads) > _CACHE_LIMIT:
            self._heads.clear()
        model = context % ev.THREAD_UNIT // ev.MODEL_UNIT
        thread = context // ev.THREAD_UNIT
        text = f'"kind":"{ev.KINDS[kind]}"'
        if context % 4:
            text += f',"pass":"{ev.PASSES[context % 4]}"'
        if model:
            text += f',"model":{model}'
        if group >= 0:
            text += f',"group":{group}'
        if thread:
            text += f',"thread":{thread}'
        self._heads[(kind, group, context)] = text
        return text

    def _tail(self, kind: int, group: int, context: int, data: tuple[int, ...]) -> str:
        if kind == ev.VIOLATION:
            body = self._texts.get(data[0]).strip()
            return f",{body[1:-1]}" if len(body) > 2 else ""
        text = ""
        once = False
        for spec, value in zip(ev.WRITTEN[kind], data, strict=False):
            if spec.usual == "model":
                if value == self._usual(spec.name, group, context):
                    continue
            elif spec.usual is not None and value == spec.usual:
                continue
            part, one_off = self._field(spec, value)
            text += part
            once |= one_off
        if not once:
            if len(self._tails) > _CACHE_LIMIT:
                self._tails.clear()
            key = (kind, group, context, *data)
            self._tails[key] = text
        return text

    def _usual(self, name: str, group: int, context: int) -> int:
        model = self._models.get(context % ev.THREAD_UNIT // ev.MODEL_UNIT)
        if model is None or not 0 <= group < len(model.groups):
            return -2
        info = model.groups[group]
        return info.world if name == "world" else DTYPE_NUMBER.get(info.dtype, 0)

    def _field(self, spec: ev.FieldSpec, value: int) -> tuple[str, bool]:
        if spec.codec == "how":
            parts = zip(("noop", "direction", "mode"), unpack_how(value), strict=True)
            return "".join(f',"{name}":"{text}"' for name, text in parts if text), False
        if spec.codec == "op":
            text = f',"op":"{spec.names[value % ev.OP_UNIT]}"' if value % ev.OP_UNIT != spec.usual else ""
            which = value // ev.OP_UNIT
            return (f'{text},"which":"{ev.which_text(which)}"' if which else text), False
        if spec.codec == "enum":
            return f',"{spec.name}":"{spec.names[value]}"', False
        if spec.codec == "dtype":
            return f',"{spec.name}":"{ev.DTYPES[value]}"', False
        if spec.codec in ("group", "unit"):
            return (f',"{spec.name}":{value}' if value >= 0 else ""), False
        if spec.codec == "bool":
            return f',"{spec.name}":{"true" if value else "false"}', False
        if spec.codec == "text":
            return f',"{spec.name}":{json.dumps(self._texts.get(value))}', value < 0
        if spec.codec == "json":
            return f',"{spec.name}":{self._texts.get(value) or "null"}', value < 0
        if spec.codec in ("bytes", "ns", "count") and value < 0:
            return f',"{spec.name}":null', False
        return f',"{spec.name}":{value}', False


def step_line(
    formatter: LineFormatter,
    records: Sequence[int],
    step: int,
    dropped: int,
    cut: Mapping[int, int] | None = None,
    comm: Mapping[str, Mapping[str, int]] | None = None,
) -> str:
    """The line of a finished step: its ``step`` record, with the step's events by kind, those of ``cut`` included, and with
    ``comm``, its gathers and reductions by mesh."""
    kinds = Counter(records[ev.KIND :: ev.WIDTH])
    kinds.update(cut or {})
    counts = {ev.KINDS[kind]: number for kind, number in sorted(kinds.items()) if kind != ev.STEP and number}
    at = len(records) - ev.WIDTH
    line = formatter.lines(records, at, at + ev.WIDTH, step).rstrip("\n")
    extra = f',"step_dropped":{dropped}' if dropped else ""
    if comm:
        extra += f',"comm":{json.dumps(comm, separators=(",", ":"))}'
    return f'{line[:-1]},"counts":{json.dumps(counts, separators=(",", ":"))}{extra}}}\n'


def device_line(model: int, times: Any) -> str:
    """The line of a step's device times (``adapters.device.Times``): ``t0`` counts from ``base``, ``ns`` is how long."""
    data = {
        "kind": "device_times", "model": model, "step": times.step, "base": times.begin,
        "span": times.end - times.begin if times.end >= 0 else None, "seq": times.seqs, "what": times.kinds,
        "pass": times.passes, "group": times.groups,
        "t0": [begin - times.begin for begin in times.begins],
        "ns": [end - begin for begin, end in zip(times.begins, times.ends, strict=True)],
        "exposed": times.exposed, "missing": times.missing,
    }  # fmt: skip
    return json.dumps(data, separators=(",", ":")) + "\n"


# -- reading -----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class TraceFile:
    """What was read of one process's file or files.

    Attributes:
        path: the first file.
        header: its first line; empty when it could not be read.
        models: model maps by number.
        events: all events that are there, a model's in the order in which they were recorded, which is when calls ended
            and what rules expect; sort by ``seq`` for the order in which they began.
        heartbeats: the heartbeat lines.
        end: the last line, ``None`` when the process died before writing it.
        damaged: ``(file, line number)`` of lines that could not be read.
        summaries: ``step`` lines as written, with ``counts``.
        untimed: timings that never completed.
    """

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    models: dict[int, ModelMap] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    heartbeats: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    damaged: list[tuple[Path, int]] = field(default_factory=list)
    summaries: list[dict[str, Any]] = field(default_factory=list)
    entered: list[dict[str, Any]] = field(default_factory=list)
    device: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    untimed: int = 0

    @property
    def rank(self) -> int:
        """The process's global rank; 0 where the header is missing."""
        return int(self.header.get("rank", 0))

    @property
    def complete(self) -> bool:
        """Whether the process closed its file."""
        return self.end is not None


class NotATrace(ValueError):
    """A file or folder holds nothing that fsdptrace wrote; the message says what was looked at."""


def read_file(path: str | Path) -> TraceFile:
    """Reads one file of a process, with its further parts and the tail of a step that was not finished.

    Unreadable lines are counted, never fatal; a torn last line is the normal end of a killed process.

    Raises:
        NotATrace: the file has no readable header of ours.
        OSError: it cannot be opened.
    """
    path = Path(path)
    trace = TraceFile(path)
    for part in parts_of(path):
        _read_part(part, trace)
    if not trace.header:
        raise NotATrace(f"{path}: not a file of fsdptrace: no header with a schema in its first lines")
    tail = tail_of(path)
    if trace.end is None and tail.exists():
        _read_part(tail, trace)
    _attach_device_times(trace)
    return trace


def parts_of(path: Path) -> list[Path]:
    """``path`` and what it was rotated into, in the order of writing (``name.jsonl``, ``name.1.jsonl``, …)."""
    numbered = []
    for other in path.parent.glob(f"{_glob_safe(path.stem)}.*.jsonl"):
        number = other.name[len(path.stem) + 1 : -len(".jsonl")]
        if number.isdigit():
            numbered.append((int(number), other))
    return [path, *(other for _, other in sorted(numbered))]


def _glob_safe(text: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in text)


def tail_of(path: Path) -> Path:
    """Where the running step's events lie while they are not (yet) wanted in the file itself."""
    return path.with_name(f"{path.stem}.tail")


def find_files(folder: str | Path) -> list[Path]:
    """First files of all processes under ``folder`` (or ``folder`` itself when it is a file), sorted.

    Raises:
        NotATrace: there are none.
    """
    folder = Path(folder)
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise NotATrace(f"{folder}: no such file or folder")
    found = sorted(path for path in folder.rglob("*.jsonl") if not path.name[: -len(".jsonl")].rpartition(".")[2].isdigit())
    if not found:
        raise NotATrace(f"{folder}: no .jsonl files in it; give the folder that `out` named, or one run's folder in it")
    return found


def _read_part(path: Path, trace: TraceFile) -> None:
    with open(path, "rb") as stream:
        for number, raw in enumerate(stream, 1):
            try:
                data = json.loads(raw)
                _take(data, trace)
            except (ValueError, KeyError, TypeError, IndexError, AttributeError):
                trace.damaged.append((path, number))


def _take(data: dict[str, Any], trace: TraceFile) -> None:
    if "schema" in data:
        if not str(data["schema"]).startswith("fsdptrace/"):
            raise ValueError("foreign schema")
        if not trace.header:
            trace.header = data
        return
    kind = data["kind"]
    if kind == "model":
        model = ModelMap.from_json(data)
        trace.models[model.model] = model
    elif kind == "heartbeat":
        trace.heartbeats.append(data)
    elif kind == "entered":
        trace.entered.append(data)
    elif kind == "end":
        trace.end = data
    elif kind == "device_times":
        _take_device(data, trace)
    elif kind in ev.KIND_NUMBER:
        trace.events.append(read_event(data, trace.models.get(data.get("model", 0))))
        if kind == "step":
            trace.summaries.append(data)
    # Lines of kinds that a later version added are skipped: they are not damage.


def _take_device(data: dict[str, Any], trace: TraceFile) -> None:
    model, base = data["model"], data["base"]
    rows = zip(data["seq"], data["t0"], data["ns"], data["exposed"], strict=True)
    trace.device.update({(model, seq): (base + t0, base + t0 + ns, exposed) for seq, t0, ns, exposed in rows})
    trace.untimed += data["missing"]


def _attach_device_times(trace: TraceFile) -> None:
    """Device times are known later than the events that they belong to, and stand in lines of their own."""
    if not trace.device:
        return
    for position, event in enumerate(trace.events):
        times = trace.device.get((event.model, event.seq))
        if times is not None:
            begin, end, exposed = times
            added = {"device_t0": begin, "device_t1": end} | ({"exposed": exposed} if exposed >= 0 else {})
            trace.events[position] = replace(event, data={**event.data, **added})


def read_event(data: dict[str, Any], model: ModelMap | None) -> Event:
    """The :class:`Event` of an event line, with what the line left out.

    Raises:
        KeyError, TypeError, IndexError: the line lacks a common field or names a group that the model has not.
    """
    number = ev.KIND_NUMBER[data["kind"]]
    group = data.get("group")
    out: dict[str, Any] = {}
    info = model.groups[group] if model is not None and group is not None else None
    if number == ev.VIOLATION:
        out = {"violation": data}
    else:
        for spec in ev.SPECS[number].fields:
            if spec.codec == "how":
                out.update({name: data[name] for name in ("noop", "direction", "mode") if name in data})
            elif spec.codec == "op":
                out["op"] = data.get("op", spec.names[0])
                if "which" in data:
                    out["which"] = data["which"]
            elif spec.name in data:
                out[spec.name] = data[spec.name]
            elif spec.usual == "model":
                out[spec.name] = getattr(info, spec.name) if info is not None else None
            elif spec.usual is not None:
                out[spec.name] = _usual_value(spec)
            elif spec.codec in ("group", "unit"):
                if not (number == ev.UNSHARD and spec.name == "issuer"):
                    out[spec.name] = None
            elif spec.name == "wire_bytes":
                out["wire_bytes"] = ev.wire_bytes(number, out["bytes"], out["world"] or 1)
            elif spec.name == "tensors" and spec.codec == "derived" and info is not None:
                out["tensors"] = info.tensors
    return Event(
        data["seq"], data["kind"], data["t0"], data["t1"], data["step"], data.get("pass", "none"), data.get("parent"),
        data.get("model", 0), group, data.get("thread", 0), out,
    )  # fmt: skip


def _usual_value(spec: ev.FieldSpec) -> Any:
    assert isinstance(spec.usual, int)
    if spec.codec == "enum":
        return spec.names[spec.usual]
    if spec.codec == "text":
        return ""
    return bool(spec.usual) if spec.codec == "bool" else spec.usual


def violations_of(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    """The violations among ``events``, as written."""
    for event in events:
        if event.kind == "violation":
            yield event["violation"]
