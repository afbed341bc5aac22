"""The order in which a step's events were recorded: that in which calls ended. Rules and sums depend on it."""

from __future__ import annotations

import operator
from array import array
from itertools import chain, pairwise

from fsdptrace import events as ev

SWAPPED = 20_000_000  # ns: the recorder itself swaps neighbours of two threads by microseconds at most
#: What was seen in a call, and is written before it although its time can be the call's end or a later one.
_SEEN = frozenset((ev.FLAG, ev.MEMORY, ev.PARAM, ev.PARAM_CHANGE, ev.DEVICE, ev.EXCEPTION))
_ASIDE = _SEEN | {ev.MISMATCH}  # no calls: their time says little of when they were written


def disturbed(records: array[int]) -> bool:
    """Whether another tool changed the order: a call stands after one of its own thread that ended later."""
    ends = records[ev.T1 :: ev.WIDTH]
    if all(map(operator.le, ends, ends[1:])):
        return False
    return any(
        after < before - SWAPPED or (after < before and _of_one_thread(records, place))
        for place, (before, after) in enumerate(pairwise(ends))
    )


def _of_one_thread(records: array[int], place: int) -> bool:
    """Whether the record there and the next one are calls of one thread."""
    first, second = place * ev.WIDTH, (place + 1) * ev.WIDTH
    threads = (records[at + ev.CONTEXT] // ev.THREAD_UNIT for at in (first, second))
    return records[first] not in _ASIDE and records[second] not in _ASIDE and len(set(threads)) == 1


def by_end(records: array[int]) -> array[int]:
    """The records by when their calls ended; what was seen in a call comes before it."""
    rows: list[tuple[int, ...]] = list(zip(*[iter(records)] * ev.WIDTH, strict=True))
    ends = {row[ev.SEQ]: row[ev.T1] for row in rows}

    def place(row: tuple[int, ...]) -> tuple[int, bool, int]:
        seen = row[ev.KIND] in _SEEN
        return min(row[ev.T1], ends.get(row[ev.PARENT], row[ev.T1])) if seen else row[ev.T1], not seen, row[ev.SEQ]

    rows.sort(key=place)
    return array("q", chain.from_iterable(rows))


def once(records: array[int]) -> array[int]:
    """The records without those that stand there a second time."""
    rows = {row[ev.SEQ]: row for row in zip(*[iter(records)] * ev.WIDTH, strict=True)}
    return array("q", chain.from_iterable(rows.values()))
