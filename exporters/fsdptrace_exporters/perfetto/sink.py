"""What is written, whatever the format: processes, tracks, slices that lie in each other, instants, counters, flows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Value = int | str


class Template:
    """What recurs of slices: name, category, arguments. One object for all slices that share it, so that a writer can keep
    its encoded form."""

    __slots__ = ("args", "category", "encoded", "name")

    def __init__(self, name: str, category: str, args: Mapping[str, Value] | None = None) -> None:
        self.name = name
        self.category = category
        self.args: Mapping[str, Value] = args or {}
        self.encoded: bytes | str | None = None


@dataclass(slots=True)
class Slice:
    """One bar, from ``t0`` to ``t1`` in Unix ns. ``seq`` and ``step`` are those of the event, None without one.

    ``flow_out`` and ``flow_in`` number the arrows that begin and end here, 0 for none.
    """

    t0: int
    t1: int
    what: Template
    seq: int | None = None
    step: int | None = None
    flow_out: int = 0
    flow_in: int = 0


class Sink(Protocol):
    """A trace being written. Numbers of tracks are chosen by the caller, unique in the trace."""

    def process(self, number: int, name: str, order: int, labels: str) -> None:
        """A process: one rank."""

    def track(self, number: int, process: int, name: str, order: int, group: str = "") -> None:
        """A track of slices; ``group`` names the tracks that it is shown among."""

    def counter(self, number: int, process: int, name: str, order: int) -> None:
        """A track of bytes."""

    def slices(self, track: int, slices: Iterable[Slice]) -> None:
        """Slices of a track, each inside or after the ones before it (see :func:`nest`)."""

    def instant(self, track: int, at: int, what: Template) -> None:
        """A moment."""

    def value(self, track: int, at: int, value: int) -> None:
        """The counter from this moment on."""

    def close(self) -> None:
        """The end of the trace."""


def nest(slices: Iterable[Slice]) -> Iterator[tuple[int, list[Slice]]]:
    """The slices by lane, each lane's in the order of their begin, longer first, so that each lies in or after the ones
    before it. What would cross another one goes to a further lane; its times stay as they are."""
    lanes: list[list[Slice]] = []
    open_until: list[list[int]] = []
    for item in sorted(slices, key=lambda s: (s.t0, -s.t1, s.seq or 0)):
        item.t1 = max(item.t0, item.t1)  # in a damaged file an end can lie before its begin
        lane = _lane(open_until, item)
        if lane == len(lanes):
            lanes.append([])
            open_until.append([])
        open_until[lane].append(item.t1)
        lanes[lane].append(item)
    yield from enumerate(lanes)


def _lane(open_until: Sequence[list[int]], item: Slice) -> int:
    """The first lane in which it lies in, or after, what is there."""
    for lane, ends in enumerate(open_until):
        while ends and ends[-1] <= item.t0:
            ends.pop()
        if not ends or item.t1 <= ends[-1]:
            return lane
    return len(open_until)
