"""The order in which a step's events were recorded: that in which calls ended. Rules and sums depend on it."""

from __future__ import annotations

import operator
from array import array
from itertools import chain, pairwise

from fsdptrace import events as ev

SWAPPED = 20_000_000  # ns: the recorder itself swaps neighbours by microseconds at most


def disturbed(ends: array[int]) -> bool:
    """Whether some call ended long before the one recorded before it, so that another tool changed the order."""
    if all(map(operator.le, ends, ends[1:])):
        return False
    return any(after < before - SWAPPED for before, after in pairwise(ends))


def by_end(records: array[int]) -> array[int]:
    """The records by when their calls ended."""
    rows = sorted(zip(*[iter(records)] * ev.WIDTH, strict=True), key=lambda row: row[ev.T1])
    return array("q", chain.from_iterable(rows))
