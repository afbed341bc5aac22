"""The arithmetic of repeated blocks."""

from __future__ import annotations

import pytest

from fsdptrace.repeats import Repeat, Saved, find_longer_loop, find_repeat, first_difference, only_rows_differ


def t(*shape: int, dtype: str = "float32") -> Saved:
    return shape, dtype, "cpu"


def moe(hits: list[int], before: int = 5, after: int = 9, block: int = 12) -> list[Saved]:
    """Tensors before a loop, ``block`` per pass of it with ``rows`` of tokens in some of them, tensors after it."""
    out = [t(7, i + 3) for i in range(before)]
    for rows in hits:
        out += [t(rows, 64) if i % 3 else t(64, i + 1) for i in range(block)]
    return out + [t(9, i + 30) for i in range(after)]


def test_the_report() -> None:
    # 1750 and 310 tensors: 1440 fewer, which are 120 blocks of 12.
    forward, again = moe([4] * 128, before=200, after=14), moe([64] * 8, before=200, after=14)
    assert (len(forward), len(again)) == (1750, 310)
    assert find_repeat(forward, again) == Repeat(12, 200, 128, 8)


@pytest.mark.parametrize(
    ("forward", "again", "found"),
    [
        ([1] * 128, [1] * 8, Repeat(12, 5, 128, 8)),
        ([3, 1, 4, 1, 5], [9, 2], Repeat(12, 5, 5, 2)),  # other numbers of rows
        ([3, 4], [5], Repeat(12, 5, 2, 1)),
        ([3, 4, 5], [], Repeat(12, 5, 3, 0)),  # not once
        ([3], [], None),  # a stretch that comes once is no loop
    ],
)
def test_loops(forward: list[int], again: list[int], found: Repeat | None) -> None:
    assert find_repeat(moe(forward), moe(again)) == found


def test_no_loop() -> None:
    assert find_repeat([t(1), t(2), t(3)], [t(1)]) is None
    assert find_repeat([t(4, 1), t(4, 2), t(4, 3), t(4, 4)], [t(4, 1), t(4, 9), t(4, 3)]) is None
    # As many, or more.
    assert find_repeat([t(1)], [t(1)]) is None
    assert find_repeat([t(1)], [t(1), t(1)]) is None


def test_a_loop_that_goes_on() -> None:
    # The forward left the loop after 3 passes; the recomputation was stopped at the forward's count, in its 4th.
    forward = moe([2, 3, 1])
    assert find_longer_loop(forward, moe([2] * 128)[: len(forward)]) == Repeat(12, 5, 3, 3, open=True)
    assert find_longer_loop(forward, forward) is None
    assert find_longer_loop([t(1), t(2), t(3)], [t(1), t(2), t(4)]) is None


def test_where_lists_part() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert only_rows_differ(t(3, 8), t(5, 8))
    assert not only_rows_differ(t(3, 8), t(3, 9))
    assert not only_rows_differ(t(3, 8), t(5, 8, dtype="bfloat16"))
    assert not only_rows_differ(t(), t())
