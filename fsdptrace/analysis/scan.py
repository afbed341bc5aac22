"""Event lines in the form in which the recorder writes them, read without a JSON parser.

What varies from event to event is its number, its times and its parent; the rest of a line recurs. So a line is cut by one
regular expression, and what recurs is looked up: the integers that it stands for were worked out from the first such line, the
long way. Lines of any other form go that way each time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

from fsdptrace import events as ev

BLOCK = 1 << 20

#: Groups: seq, head, t0, t1, step, parent, region, rest; or, alone in the last one, a line of another form.
_LINE = re.compile(
    rb'\{"seq":(\d{1,18}),("kind":"[a-z_]{1,20}"(?:,"(?:pass":"[a-z]{1,20}"|(?:model|group|thread)":\d{1,9}))*)'
    rb',"t0":(\d{1,18}),"t1":(\d{1,18}),"step":(\d{1,18})(?:,"parent":(\d{1,18}))?(?:,"region":(\d{1,18}))?'
    rb"([^\n]*)\}\n|([^\n]*\n|[^\n]+)"
)
# A step and an exception say more than their record does; of the others no two lines are alike.
_NOT_KEPT = frozenset((ev.STEP, ev.EXCEPTION, ev.DEVICE, ev.MEMORY, ev.MISMATCH))
_REGIONS = (ev.REGION, ev.RECOMPUTE)  # the region's number is the first of their own fields
_MOST = 200_000  # forms that are remembered

Row = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]
Form = tuple[int, int, int, int, int, int, int, int, int]
"""What recurs of a line: model, kind, group, context, a to e."""


def rows(stream: BinaryIO, advance: Callable[[int], None]) -> Iterator[list[Row]]:
    """The lines of ``stream``, cut, some thousand at a time; ``advance`` is told how many bytes were read."""
    left = b""
    while True:
        block = stream.read(BLOCK)
        advance(len(block))
        if not block:
            break
        end = block.rfind(b"\n") + 1
        if not end:
            left += block
            continue
        text, left = left + block[:end], block[end:]
        yield _LINE.findall(text)
    if left:
        yield _LINE.findall(left)


def cut(line: bytes) -> Row:
    """One line, cut."""
    row: Row = _LINE.findall(line)[0]
    return row


def whole(row: Row) -> bytes:
    """The line that ``row`` was cut from."""
    seq, head, t0, t1, step, parent, region, rest, other = row
    if other:
        return other
    parent = b',"parent":' + parent if parent else b""
    region = b',"region":' + region if region else b""
    return b'{"seq":%b,%b,"t0":%b,"t1":%b,"step":%b%b%b%b}\n' % (seq, head, t0, t1, step, parent, region, rest)


class Forms:
    """What recurs of lines, and the integers that it stands for. ``known`` is keyed by head and rest."""

    def __init__(self) -> None:
        self.known: dict[tuple[bytes, bytes], Form] = {}

    def learn(self, row: Row, record: tuple[int, ...], step: int) -> None:
        """Remembers the form of ``row``, whose record and step were worked out the long way, if it tells all of it."""
        kind, seq, t0, t1, group, parent, context, *data = record
        cut = (int(row[0]), int(row[2]), int(row[3]), int(row[5] or 0), int(row[4]))
        if kind in _NOT_KEPT or cut != (seq, t0, t1, parent, step):
            return
        if (kind in _REGIONS) != bool(row[6]) or (row[6] and int(row[6]) != data[0]):
            return
        if len(self.known) >= _MOST:
            self.known.clear()
        a, b, c, d, e = data
        self.known[row[1], row[7]] = (context % ev.THREAD_UNIT // ev.MODEL_UNIT, kind, group, context, a, b, c, d, e)
