"""Where two lists of saved tensors part, and whether whole repetitions of a block of tensors are missing.

A mixture of experts written as a loop saves the same few tensors per expert. When a router decides otherwise in the
recomputation, counts differ by whole passes of that loop, which is how it is recognised. Pure arithmetic on what PyTorch
keeps of each saved tensor: its shape, dtype and device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

Saved = tuple[tuple[int, ...], str, str]
"""Shape, dtype and device of one saved tensor."""

_LONGEST_BLOCK = 512
_ALIKE = 4  # so many single tensors alike are called a loop; of longer blocks, two


@dataclass(frozen=True, slots=True)
class Repeat:
    """A block of ``tensors`` that is repeated: ``forward`` and ``recompute`` times.

    ``start`` is the position of its first tensor in the forward. ``recompute`` is at least that where ``open`` is set: the
    recomputation was stopped in the middle of the loop.
    """

    tensors: int
    start: int
    forward: int
    recompute: int
    open: bool = False


def first_difference(forward: Sequence[Any], recompute: Sequence[Any]) -> int | None:
    """The first position at which the lists differ; the shorter one's length when it is a prefix; ``None`` when equal."""
    for position, (one, other) in enumerate(zip(forward, recompute, strict=False)):
        if one != other:
            return position
    return None if len(forward) == len(recompute) else min(len(forward), len(recompute))


def only_rows_differ(one: Saved, other: Saved) -> bool:
    """Whether two tensors are the same but for their first dimension: another number of rows (tokens, samples)."""
    return one != other and one[1:] == other[1:] and len(one[0]) == len(other[0]) > 0 and one[0][1:] == other[0][1:]


def find_repeat(forward: Sequence[Saved], recompute: Sequence[Saved]) -> Repeat | None:
    """The loop that ran another number of times, if counts differ by whole repetitions of a block.

    Blocks are compared as they are and, where that gives nothing, without their first dimension: the rows that a router
    sends to an expert vary. ``None`` where no block explains the difference.
    """
    missing = len(forward) - len(recompute)
    if missing <= 0:
        return None
    for look, shortest in _LOOKS:
        found = _explains(_numbered(map(look, forward), map(look, recompute)), missing, shortest)
        if found is not None:
            return found
    return None


def find_longer_loop(forward: Sequence[Saved], recompute: Sequence[Saved]) -> Repeat | None:
    """The loop that the recomputation went on with where the forward had left it; for equal counts (early stop ends a
    recomputation at the forward's count) that part at some position."""
    for look, shortest in _LOOKS:
        one, other = _numbered(map(look, forward), map(look, recompute))
        parts = first_difference(one, other)
        if parts is None:
            continue
        rest = len(other) - parts
        for length in range(shortest, min(parts // 2, _LONGEST_BLOCK) + 1):
            # A few tensors that go on with the period are needed, else anything would do.
            if rest < min(length, 3) or any(other[i] != other[i - length] for i in range(parts, len(other))):
                continue
            start = _run_start(one, parts, length)
            times = (parts - start) // length
            if times >= (2 if length > 1 else _ALIKE):
                return Repeat(length, parts - times * length, times, times + rest // length, open=True)
    return None


def _exact(tensor: Saved) -> Hashable:
    return tensor


def _without_rows(tensor: Saved) -> Hashable:
    return len(tensor[0]), tensor[0][1:], tensor[1], tensor[2]


# How tensors are compared, and the shortest block that is one: without rows a single tensor looks like any other.
_LOOKS: tuple[tuple[Callable[[Saved], Hashable], int], ...] = ((_exact, 1), (_without_rows, 2))


def _numbered(forward: Any, recompute: Any) -> tuple[list[int], list[int]]:
    """Small integers in the place of what is compared."""
    numbers: dict[Hashable, int] = {}
    one, other = ([numbers.setdefault(item, len(numbers)) for item in items] for items in (forward, recompute))
    return one, other


def _run_start(values: Sequence[int], end: int, length: int) -> int:
    """Where the run of blocks of ``length`` that ends before ``end`` begins."""
    start = end - length
    while start > 0 and values[start - 1] == values[start - 1 + length]:
        start -= 1
    return start


def _explains(lists: tuple[list[int], list[int]], missing: int, shortest: int) -> Repeat | None:
    """The shortest block of which ``missing`` tensors are whole repetitions, cut out of a run of it in the forward."""
    forward, recompute = lists
    parts = first_difference(forward, recompute)
    assert parts is not None
    # The recomputation is the forward without `missing` tensors at one place: what follows them is the same again.
    if forward[parts + missing :] != recompute[parts:]:
        return None
    for length in range(shortest, min(missing, _LONGEST_BLOCK) + 1):
        if missing % length:
            continue
        # The run of that period around the place: from `start` to `end` every value equals the one a block before.
        start = end = parts
        while start > 0 and start - 1 + length < len(forward) and forward[start - 1] == forward[start - 1 + length]:
            start -= 1
        if parts + length > len(forward) or any(
            forward[i] != forward[i + length] for i in range(start, min(parts, len(forward) - length))
        ):
            continue
        end = start + length
        while end < len(forward) and forward[end] == forward[end - length]:
            end += 1
        times = (end - start) // length
        fewer = missing // length
        if (
            times >= (2 if length > 1 else _ALIKE)
            and times >= fewer
            and start + times * length >= parts + missing - (length - 1)
        ):
            return Repeat(length, start, times, times - fewer)
    return None
