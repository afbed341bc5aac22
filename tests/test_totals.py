"""Sums of a step's gathers and reductions by mesh, and that remembering alike steps changes none of them."""

from __future__ import annotations

from fsdptrace import events as ev
from fsdptrace.model_map import ModelMap
from fsdptrace.totals import Totals
from support import made

UNSHARD, RESHARD, PRE_FORWARD = ev.UNSHARD, ev.RESHARD, ev.PRE_FORWARD
MESH = "0=2"


def totals() -> Totals:
    data = made.model()
    for group in data["groups"]:
        group.update({"mesh": {"0": 2}, "world": 2})
    out = Totals()
    out.use(ModelMap.from_json(data))
    return out


def records(*what: tuple[int, int, int, int]) -> list[int]:
    """Records of a forward: kind, group, bytes, packed how."""
    out: list[int] = []
    for i, (kind, group, size, how) in enumerate(what):
        out += [kind, i + 1, 0, 0, group, 0, ev.PASS_FORWARD, size, 2, 1, -1, how]
    return out


def test_steps_that_are_alike_add_up_alike() -> None:
    one = records((UNSHARD, 0, 800, 0), (PRE_FORWARD, 0, 0, 0), (RESHARD, 0, 800, 0), (UNSHARD, 1, 400, 1))
    sums = totals()
    expected = {MESH: {"gathers_forward": 1, "noops": 1, "gathered_bytes": 800, "gather_wire_bytes": 400}}
    for _ in range(3):
        sums.feed(one)
        assert sums.take() == expected


def test_another_size_in_a_step_of_the_same_kinds_is_seen() -> None:
    sums = totals()
    for size in (800, 800, 1600, 800):
        sums.feed(records((UNSHARD, 0, size, 0), (PRE_FORWARD, 0, 0, 0), (RESHARD, 0, size, 0)))
        assert sums.take()[MESH] == {"gathers_forward": 1, "gathered_bytes": size, "gather_wire_bytes": size // 2}


def test_what_is_open_from_before_counts() -> None:
    sums = totals()
    free = records((RESHARD, 0, 800, 0))
    sums.feed(free)  # opened before the recording began: nothing is known of its use
    assert sums.take() == {}
    sums.feed(records((UNSHARD, 0, 800, 0)))
    sums.take()
    sums.feed(free)  # the same records, after a gather that nothing used
    assert sums.take() == {MESH: {"wasted": 1}}
    sums.feed(free)
    assert sums.take() == {}


def test_places_in_a_step_are_kept_apart() -> None:
    sums = totals()
    first, second = records((UNSHARD, 0, 800, 0)), records((UNSHARD, 1, 400, 0))
    for _ in range(2):
        sums.feed(first)
        sums.feed(second, len(first))
        assert sums.take()[MESH] == {"gathers_forward": 2, "gathered_bytes": 1200, "gather_wire_bytes": 600}


def test_another_map_of_the_model_is_used() -> None:
    sums = totals()
    step = records((UNSHARD, 0, 800, 0))
    sums.feed(step)
    data = made.model()
    for group in data["groups"]:
        group.update({"mesh": {"0": 4}, "world": 4})
    sums.use(ModelMap.from_json(data))
    sums.feed(step)
    assert {mesh: row["gathers_forward"] for mesh, row in sums.take().items()} == {MESH: 1, "0=4": 1}
