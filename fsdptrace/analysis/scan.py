"""Event lines in the form in which the recorder writes them, read without a JSON parser.

What varies from event to event is its number, its times and its parent; the rest of a line recurs. So a line is cut by one
regular expression, and what recurs is looked up: the integers that it stands for were worked out from the first such line, the
long way. Lines of any other form go that way each time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import BinaryIO

from fsdptrace import events as ev
from fsdptrace.analysis.stages import alike
from fsdptrace.model_map import ModelMap

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
_LENT = 20_000  # of these, so many are lent to the next file
_KINDS_OF_MODELS = 8  # that lend: stages of a pipeline have forms of their own
#: Kinds that hold a string: its number is that of the reader's own table.
_WITH_TEXTS = frozenset(
    kind for kind, fields in ev.WRITTEN.items() if any(field.codec in ("text", "json") for field in fields)
)  # fmt: skip

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


class Lent:
    """What the files read before in this process told of the forms of lines, by the models that they are of: of a thousand
    ranks all write the same ones, and a rank may have written few of each."""

    def __init__(self) -> None:
        self._kept: list[tuple[dict[int, ModelMap], dict[tuple[bytes, bytes], Form]]] = []

    def get(self, models: Mapping[int, ModelMap]) -> Mapping[tuple[bytes, bytes], Form]:
        """Forms to begin with."""
        return next((forms for known, forms in self._kept if _same(known, models)), {})

    def put(self, models: Mapping[int, ModelMap], forms: Forms) -> None:
        """Takes those of a file that was read."""
        kept = (item for item in forms.known.items() if item[1][1] not in _WITH_TEXTS)
        others = [item for item in self._kept if not _same(item[0], models)]
        self._kept = [(dict(models), dict(islice(kept, _LENT))), *others[: _KINDS_OF_MODELS - 1]]


def _same(known: Mapping[int, ModelMap], models: Mapping[int, ModelMap]) -> bool:
    return known.keys() == models.keys() and all(alike(known[number], models[number]) for number in known)


lent = Lent()
