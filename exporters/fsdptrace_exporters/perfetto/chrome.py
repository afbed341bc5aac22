"""Chrome's JSON, which many viewers read. Times are made from whole nanoseconds, with three decimals of a microsecond."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import IO

from fsdptrace_exporters.perfetto.sink import Slice, Template


class ChromeSink:
    """Writes to ``stream``; times count from ``base``, in Unix ns, since viewers read them as floating point."""

    def __init__(self, stream: IO[str], base: int) -> None:
        self._stream = stream
        self._base = base
        self._of: dict[int, tuple[int, str]] = {}  # process and name of each track
        stream.write(f'{{"displayTimeUnit":"ns","otherData":{{"unix_ns":"{base}"}},"traceEvents":[\n')
        self._first = True

    def process(self, number: int, name: str, order: int, labels: str) -> None:
        """A process: one rank."""
        for what, args in (
            ("process_name", {"name": name}),
            ("process_labels", {"labels": labels}),
            ("process_sort_index", {"sort_index": order}),
        ):
            self._put(f'"ph":"M","pid":{number},"tid":0,"name":"{what}","args":{json.dumps(args)}')

    def track(self, number: int, process: int, name: str, order: int, group: str = "") -> None:
        """A track of slices: a thread, as the format has no other."""
        title = f"{group}: {name}" if group else name
        self._of[number] = (process, title)
        for what, args in (("thread_name", {"name": title}), ("thread_sort_index", {"sort_index": order})):
            self._put(f'"ph":"M","pid":{process},"tid":{number},"name":"{what}","args":{json.dumps(args)}')

    def counter(self, number: int, process: int, name: str, order: int) -> None:
        """A track of bytes."""
        self._of[number] = (process, name)

    def slices(self, track: int, slices: Iterable[Slice]) -> None:
        """Slices of a track, each inside or after the ones before it."""
        process, _name = self._of[track]
        for item in slices:
            place = f'"pid":{process},"tid":{track},"ts":{self._time(item.t0)}'
            extra = "".join(
                f',"{name}":{value}' for name, value in (("event", item.seq), ("step", item.step)) if value is not None
            )
            head, args = self._encoded(item.what)
            inside = (args + extra).lstrip(",")
            self._put(f'"ph":"X",{place},"dur":{_micro(max(0, item.t1 - item.t0))},{head},"args":{{{inside}}}')
            if item.flow_out:
                self._put(f'"ph":"s",{place},"id":{item.flow_out},"name":"flow","cat":"flow"')
            if item.flow_in:
                self._put(f'"ph":"f","bp":"e",{place},"id":{item.flow_in},"name":"flow","cat":"flow"')

    def instant(self, track: int, at: int, what: Template) -> None:
        """A moment."""
        process, _name = self._of[track]
        head, args = self._encoded(what)
        place = f'"pid":{process},"tid":{track},"ts":{self._time(at)}'
        self._put(f'"ph":"i","s":"t",{place},{head},"args":{{{args}}}')

    def value(self, track: int, at: int, value: int) -> None:
        """The counter from this moment on."""
        process, name = self._of[track]
        text = json.dumps(name)
        self._put(f'"ph":"C","pid":{process},"ts":{self._time(at)},"name":{text},"args":{{"bytes":{value}}}')

    def close(self) -> None:
        """The end of the list."""
        self._stream.write("\n]}\n")

    def _encoded(self, what: Template) -> tuple[str, str]:
        if what.encoded is None:
            args = json.dumps(dict(what.args), separators=(",", ":"))[1:-1]
            what.encoded = f'"name":{json.dumps(what.name)},"cat":{json.dumps(what.category)}\0{args}'
        assert isinstance(what.encoded, str)
        head, _, rest = what.encoded.partition("\0")
        return head, rest

    def _time(self, at: int) -> str:
        return _micro(max(0, at - self._base))

    def _put(self, body: str) -> None:
        self._stream.write(f"{'' if self._first else ',' + chr(10)}{{{body}}}")
        self._first = False


def _micro(ns: int) -> str:
    """Nanoseconds as microseconds with three decimals, exactly."""
    return f"{ns // 1000}.{ns % 1000:03d}"
