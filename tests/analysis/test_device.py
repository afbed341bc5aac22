"""Sums of device times and what is advised, on lines whose times a person chose."""

from __future__ import annotations

from typing import Any

import pytest

from fsdptrace.analysis.device import DeviceSums
from fsdptrace.model_map import GroupInfo, ModelMap, UnitInfo

US = 1000


def model_of(sizes: list[int]) -> ModelMap:
    units = tuple(UnitInfo(i, f"layers.{i}", (f"layers.{i}",), (i,), True) for i in range(len(sizes)))
    groups = tuple(
        GroupInfo(
            i, f"layers.{i}", i, (f"layers.{i}",), (), 1, size, size // 4, "float32", "float32", 4, 4, 1, {"0": 4},
            True, True, 1, False,
        )
        for i, size in enumerate(sizes)
    )  # fmt: skip
    return ModelMap(0, "M", units, groups)


def line(rows: list[tuple[str, int, int, int, int, int]], span: int | None, **more: Any) -> dict[str, Any]:
    """Rows are (what, pass, group, t0, ns, exposed)."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * 6
    names = ("what", "pass", "group", "t0", "ns", "exposed")
    data: dict[str, Any] = {name: list(column) for name, column in zip(names, columns, strict=True)}
    return {"seq": list(range(len(rows))), "missing": 0, "span": span, **data, **more}


def pass_of(gathers: list[int], compute: list[int]) -> list[tuple[str, int, int, int, int, int]]:
    """A forward as FSDP2 runs it by itself: gather i + 1 begins when compute i does."""
    rows: list[tuple[str, int, int, int, int, int]] = []
    now = free = 0
    for i, (gather, work) in enumerate(zip(gathers, compute, strict=True)):
        end = free + gather
        waited = max(0, end - now)
        rows.append(("unshard", 1, i, free, gather, waited))
        rows.append(("wait", 1, i, now, waited, -1))
        free = now = max(now, end)
        now += work
    return rows


def test_sums_per_unit() -> None:
    model = model_of([400, 400])
    sums = DeviceSums()
    rows = pass_of([30 * US, 50 * US], [40 * US, 40 * US])
    rows += [("reduce_scatter", 2, 0, 200 * US, 25 * US, 5 * US)]
    for _ in range(2):
        sums.take(line(rows, 300 * US), model)
        sums.memory(700, 900)
        sums.memory(800, 850)
    assert (sums.steps, sums.span_ns, sums.allocated, sums.reserved) == (2, 600 * US, 800, 900)
    first, second = sums.rows(grouped=False)
    assert (first.gathers, first.gather_ns, first.gather_exposed_ns) == (2, 60 * US, 60 * US)
    assert (first.reductions, first.reduce_ns, first.reduce_exposed_ns) == (2, 50 * US, 10 * US)
    # The second gather begins with the first compute at 30 and ends at 80; compute is there at 70.
    assert (second.gather_ns, second.gather_exposed_ns, second.reductions) == (100 * US, 20 * US, 0)
    (both,) = sums.rows(grouped=True)
    assert (both.name, both.units, both.gather_exposed_ns) == ("layers.*", 2, 80 * US)


def test_a_gather_that_nobody_waits_for_is_counted() -> None:
    sums = DeviceSums()
    sums.take(
        line([("unshard", 2, 0, 0, 30 * US, 0), ("unshard", 2, 0, 50, 40 * US, 0), ("wait", 2, 0, 60, 0, -1)], 100),
        model_of([4]),
    )
    (row,) = sums.rows(grouped=False)
    assert (row.gathers, row.unwaited, row.unwaited_ns) == (2, 1, 30 * US)


def test_gathers_that_fit_behind_more_units_are_to_be_prefetched_further_ahead() -> None:
    """Gathers of 10 with one of 50 among compute of 20 each: issued one unit ahead 30 of the long one stay exposed; issued two
    ahead, it begins when the one before it has ended and runs behind two units, and so on: three hide it."""
    model = model_of([100, 100, 100, 100, 900, 100, 100, 100])
    gathers = [10, 10, 10, 10, 50, 10, 10, 10]
    sums = DeviceSums()
    sums.take(line(pass_of([g * US for g in gathers], [20 * US] * 8), 300 * US), model)
    (advice,) = sums.advice(model)
    assert (advice.name, advice.call) == ("forward", "set_modules_to_forward_prefetch")
    # The first gather (10) and 30 of the long one.
    assert advice.exposed_ns == 40 * US
    assert advice.gather_ns == 120 * US
    # Issued k ahead at the start of unit i - k, after the gather before it: with k = 2 the long one is issued when unit 2
    # begins, its stream is free (unit 3's gather took 10 of the 20 before), and has 40: 10 too few. With k = 3 it has 60.
    assert advice.ahead == 3
    assert advice.bytes == (900 + 100 + 100) - 900
    assert advice.least_ns == 10 * US


def test_gathers_that_take_longer_than_compute_cannot_be_hidden() -> None:
    model = model_of([100] * 4)
    sums = DeviceSums()
    sums.take(line(pass_of([60 * US] * 4, [20 * US] * 4), 400 * US), model)
    (advice,) = sums.advice(model)
    assert (advice.ahead, advice.bytes) == (0, 0)
    # 240 of gathers, 60 of compute between them (what follows the last is not known to be before anything).
    assert advice.least_ns == 180 * US


def test_little_exposed_time_is_not_worth_a_word() -> None:
    model = model_of([100] * 4)
    sums = DeviceSums()
    sums.take(line(pass_of([1 * US] * 4, [200 * US] * 4), 1000 * US), model)
    assert sums.advice(model) == []


def test_ranks_add_up() -> None:
    model = model_of([400])
    one, two = DeviceSums(), DeviceSums()
    one.take(line([("unshard", 1, 0, 0, 10, 4), ("wait", 1, 0, 6, 4, -1)], 100), model)
    two.take(line([("unshard", 1, 0, 0, 30, 8), ("wait", 1, 0, 22, 8, -1)], None, missing=3), model)
    one.merge(two)
    (row,) = one.rows(grouped=False)
    assert (one.steps, one.span_ns, one.missing) == (1, 100, 3)
    assert (row.units, row.gathers, row.gather_ns, row.gather_exposed_ns) == (1, 2, 40, 12)


@pytest.mark.parametrize("broken", [{"ns": []}, {"group": [7]}])
def test_a_torn_line_is_refused_whole(broken: dict[str, Any]) -> None:
    data = line([("unshard", 1, 0, 0, 10, 4)], 100) | broken
    with pytest.raises((ValueError, IndexError)):
        DeviceSums().take(data, model_of([4]))
