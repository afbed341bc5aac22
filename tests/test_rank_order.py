"""What a rank keeps of its collectives, where two ranks differ, and what the leader makes of all ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fsdptrace import events as ev
from fsdptrace.leading import Leader
from fsdptrace.model_map import ModelMap, ranks_of, spans
from fsdptrace.parting import Marks, Parting, differ, parting
from fsdptrace.places import Standing, grouped
from fsdptrace.rank_order import KEPT, Issued, Item, Order, positions
from support import made

WORLD = "0:0-1"


def model(number: int = 0, root: str = "Net", **changes: Any) -> ModelMap:
    """layers.0 and layers.1 on the process group 0 of two ranks, with two parameters each."""
    data = made.model(number=number, root=root)
    for group in data["groups"]:
        params = [
            {"name": f"{group['fqn']}.{name}", "shape": [1], "dtype": "float32", "trainable": True, "bytes": 4} for name in "wb"
        ]
        group.update({"shard_group": WORLD, "params": params, **changes})
    return ModelMap.from_json(data)


def issue(order: Order, *what: tuple[int, int, int], model: int = 0, step: int = 0, world: int = 2, seq: int = 1) -> None:
    """Collectives as records: kind, group, and the last field (how, or operator and which)."""
    records: list[int] = []
    for i, (kind, group, last) in enumerate(what):
        records += [kind, seq + i, 0, 0, group, 0, ev.MODEL_UNIT * model, 8, world, 1, 2, last]
    order.take(model, step, records, records[:: ev.WIDTH])


def marks(order: Order, name: str = WORLD) -> Marks:
    return Marks(*order.state(None)[name][0])


def started(issued: int = 0, *models: ModelMap) -> Order:
    order = Order()
    for item in models or (model(),):
        order.start(item, {WORLD: issued})
    return order


G, R = ev.UNSHARD, ev.REDUCE_SCATTER


# -- one rank ----------------------------------------------------------------------------------------------------------
def test_spans_of_ranks() -> None:
    for ranks, text in ((range(8), "0-7"), (range(3, 68, 8), "3-67/8"), ([0, 1], "0,1"), ([5], "5"), ([0, 3, 4], "0,3,4")):
        assert spans(list(ranks)) == text
        assert ranks_of(f"mesh:0:{text}") == list(ranks)
    assert ranks_of("") == []


def test_only_collectives_count() -> None:
    order = started()
    issue(order, (G, 0, 0), (ev.WAIT, 0, 0), (ev.PRE_FORWARD, 0, 0), (G, 1, 0), (R, 1, 0))
    issue(order, (G, 0, ev.pack_how(noop=1)), (G, 0, ev.pack_how(noop=3)))  # open, disabled: nothing was issued
    issue(order, (G, 0, 0), world=4)  # on a smaller mesh than the group's: another process group, not followed
    excerpt = order.excerpt(WORLD, "0:Net", 0, 100, None)
    items = [Item(*excerpt["table"][number]) for number in excerpt["items"]]
    wanted = [("unshard", "layers.0"), ("unshard", "layers.1"), ("reduce_scatter", "layers.1")]
    assert [(item.kind, item.fqn) for item in items[1:]] == wanted
    assert excerpt["seqs"][1:] == [1, 4, 5]
    assert marks(order).count == 4  # and where recording began


def test_replicas_have_their_own_order() -> None:
    order = started(0, model(replicate_world=2, replicate_group="1:0-2/2"))
    issue(order, (G, 0, 0), (R, 0, 0), (ev.ALL_REDUCE, 0, 0))
    assert (marks(order).count, marks(order, "1:0-2/2").count) == (3, 2)


def test_checksums_find_every_difference_near_the_end() -> None:
    """Sequences that differ in one place, added bit by bit; one of them may be far ahead."""
    rng = random.Random(5)

    def sequence(values: list[int]) -> Marks:
        issued, i = Issued("x"), 0
        while i < len(values):
            part = values[i : i + rng.choice((1, 2, 7, 90))]
            issued.extend(part, part, part, [value.to_bytes(8, "big") for value in part])
            i += len(part)
        return Marks("x", issued.count, "".join(f"{issued.marks[at]:08x}" for at in positions(issued.count)))

    missed = 0
    for _ in range(300):
        count, ahead = rng.randint(1, 900), rng.choice((0, 1, 31, 32, 200))
        values = [rng.randint(0, 5) for _ in range(count + ahead)]
        short, long = sequence(values[:count]), sequence(values)
        assert differ(short, long) is differ(long, short) is None
        at = rng.randrange(count)
        values[at] += 10
        other = sequence(values)
        found = differ(short, other)
        assert found == differ(other, short)
        if found is None:  # only what lies nearer to the end than twice the distance
            assert ahead >= 32
            assert count - at <= 4 * ahead
            missed += 1
        else:
            assert found[0] <= at < found[1]
    assert missed < 100


def test_memory_is_bounded() -> None:
    order = started()
    for step in range(40):
        issue(order, *[(G, i % 2, 0) for i in range(1000)], step=step)
    issued = order.now[WORLD]
    assert issued.count == 40_001
    assert len(issued.items) <= 2 * KEPT
    assert len(issued.marks) < 100
    assert order.excerpt(WORLD, "0:Net", 0, 10, None)["items"] == []
    last = order.excerpt(WORLD, "0:Net", 40_000, 40_001, None)
    assert (last["first"], last["steps"], last["table"]) == (40_000, [39], [["unshard", "Net", "layers.1", ""]])


# -- two ranks ---------------------------------------------------------------------------------------------------------
def parted(a: Order, b: Order, label: str = "0:Net") -> Parting | None:
    found = differ(marks(a), marks(b))
    if found is None:
        return None
    return parting(*(order.excerpt(WORLD, label, *found, None) for order in (a, b)))


def test_the_first_difference_is_named() -> None:
    a, b = started(), started()
    for order in (a, b):
        issue(order, (G, 0, 0), (G, 1, 0), (R, 1, 0))
    issue(a, (R, 0, 0), step=1, seq=40)
    issue(b, (G, 1, 0), (R, 0, 0), step=1, seq=50)
    found = parted(a, b)
    assert found is not None
    assert (found.mine, found.other) == (Item("reduce_scatter", "Net", "layers.0"), Item("unshard", "Net", "layers.1"))
    assert (found.my_step, found.my_seq, found.other_step, found.other_seq) == (1, 40, 1, 50)
    assert found.position == 4


def test_parameters_of_a_reduction() -> None:
    a, b = started(), started()
    issue(a, (R, 0, ev.OP_UNIT * ev.pack_which([True, False])))
    issue(b, (R, 0, ev.OP_UNIT * ev.pack_which([False, True])))
    found = parted(a, b)
    assert found is not None
    assert (found.mine.which, found.other.which) == ("0", "1")
    assert a.params([found.mine.to_json()]) == {"layers.0": ["layers.0.w", "layers.0.b"]}


def test_ranks_that_record_other_parts_are_not_compared() -> None:
    """One rank began to record 500 collectives later: its first step is another one of the run."""
    a, b = started(issued=0), started(issued=500)
    issue(a, (G, 0, 0), (R, 0, 0))
    issue(b, (G, 1, 0), (R, 1, 0))
    assert differ(marks(a), marks(b)) is not None
    assert parted(a, b) is None


def test_a_new_model_begins_anew() -> None:
    """What one model's ranks did differently says nothing of the next model's."""
    a, b = started(), started()
    issue(a, (G, 0, 0))
    issue(b, (G, 1, 0))
    for order in (a, b):
        order.start(model(1, "Other"), {WORLD: 9})
        issue(order, (G, 0, 0), model=1)
    assert marks(a) == marks(b)
    assert marks(a).label == "1:Other"
    before = [Marks(*order.state(None)[WORLD][1]) for order in (a, b)]
    assert before[0].label == "0:Net"
    assert differ(*before) is not None


# -- all ranks ---------------------------------------------------------------------------------------------------------
class Job:
    """Ranks of a job and their leader, by hand: time goes on by :meth:`look`."""

    def __init__(self, world: int, stall: float = 60.0) -> None:
        self.name = f"0:{spans(list(range(world)))}"
        self.now = 100.0
        self.leader = Leader(0, world, stall, [], lambda: self.now)
        self.orders = [Order() for _ in range(world)]
        self.states: dict[int, dict[str, Any]] = {}
        for rank, order in enumerate(self.orders):
            order.start(self.map(), {self.name: 0})
            self.states[rank] = {"beat": 0, "last": 0, "idle": 0.0, "step": 0}

    def map(self) -> ModelMap:
        return model(shard_group=self.name)

    def issue(self, ranks: Any, *what: tuple[int, int, int]) -> None:
        for rank in ranks:
            issue(self.orders[rank], *what)
            self.states[rank]["last"] += len(what)

    def stuck(self, ranks: Any, kind: str, group: int) -> None:
        for rank in ranks:
            entered = self.orders[rank].entered({"kind": kind, "model": 0, "group": group})
            assert entered is not None
            place = f"in the all-gather of layers.{group}"
            self.states[rank].update(stuck=[entered[0], entered[1].to_json(), []], place=place, inside=True)

    def look(self, seconds: float = 0.25, silent: Any = ()) -> None:
        self.now += seconds
        for rank, state in self.states.items():
            stuck = state.get("stuck")
            if rank not in silent:
                state["beat"] += 1
                state["groups"] = self.orders[rank].state((stuck[0], Item(*stuck[1])) if stuck else None)
        question = self.leader.question
        answers = {}
        for rank in self.leader.asked:
            assert question is not None
            window = question["group"], question["label"], question["start"], question["stop"]
            answers[rank] = {"id": question["id"], **self.orders[rank].excerpt(*window, None), "params": {}}
        self.leader.look({rank: dict(state) for rank, state in self.states.items()}, answers)

    @property
    def found(self) -> Any:
        found = self.leader.to_say().get("found")
        return None if found is None else [(side["ranks"], side["item"][0], side["item"][2]) for side in found["sides"]]


def test_the_leader_names_both_sides() -> None:
    job = Job(8)
    job.issue(range(8), *[(G, i % 2, 0) for i in range(100)])
    job.look()
    job.issue([0, 1, 2, 4, 5, 6, 7], (G, 0, 0))
    job.issue([3], (G, 1, 0))
    job.look()
    assert job.leader.waits  # it asks two ranks
    job.look()
    assert job.found == [([0, 1, 2, 4, 5, 6, 7], "unshard", "layers.0"), ([3], "unshard", "layers.1")]
    before = job.leader.to_say()["found"]["id"]
    for _ in range(5):
        job.issue(range(8), (G, 1, 0))
        job.look()
    assert job.leader.to_say()["found"]["id"] == before  # once


def test_ranks_that_are_stuck_are_told_apart_without_a_question() -> None:
    job = Job(2)
    job.stuck([0], "unshard", 0)
    job.stuck([1], "unshard", 1)
    job.look()
    assert job.found == [([0], "unshard", "layers.0"), ([1], "unshard", "layers.1")]


@pytest.mark.parametrize("ahead", [1, 40, 700])
def test_ranks_that_are_ahead_are_not_apart(ahead: int) -> None:
    job = Job(4)
    for _ in range(30):
        job.issue([0, 1, 2, 3], *[(G, i % 2, 0) for i in range(10)])
        job.look()
    job.issue([2], *[(G, i % 2, 0) for i in range(ahead)])
    for _ in range(10):
        job.look()
        job.issue([0, 1, 3], *[(G, i % 2, 0) for i in range(ahead)][: ahead // 5])
    assert job.found is None
    assert not job.leader.waits


def test_an_answer_that_never_comes() -> None:
    job = Job(2)
    job.issue([0], (G, 0, 0), (G, 0, 0))
    job.issue([1], (G, 1, 0), (G, 0, 0))
    job.look()
    assert job.leader.waits
    job.orders[1] = Order()  # whoever it was, it knows nothing of it
    job.orders[1].start(job.map(), {job.name: 0})
    for _ in range(5):
        job.look(1.0, silent=[1])
    assert job.found is None


def test_a_standstill_is_said_once() -> None:
    job = Job(32, stall=60)
    job.issue(range(32), (G, 0, 0))
    job.look()
    job.stuck([rank for rank in range(32) if rank not in (3, 7)], "unshard", 1)
    job.states[7].update(place="in the backward of layers.0", code="train.py:88 in step")
    for _ in range(70):
        job.look(1.0, silent=[3])
        stall = job.leader.take_stall()
        if stall is not None:
            break
    assert stall is not None
    assert (stall.rule, stall.severity) == ("rank-stall", "error")
    assert stall.message == (
        "no rank has moved for 60 s in process group 0 of ranks 0-31: "
        "30 ranks (0-2, 4-6, 8-31) in the all-gather of layers.1, step 0 since 60 s; "
        "rank 7 in the backward of layers.0, step 0, at train.py:88 in step since 60 s; "
        "rank 3 has not breathed for 60 s; last moving, step 0 since 60 s."
    )
    for _ in range(200):
        job.look(1.0, silent=[3])
        assert job.leader.take_stall() is None
    # Another leader knows what was said.
    heir = Leader(1, 32, 60, job.leader.to_say()["told"], lambda: job.now)
    for _ in range(70):
        job.now += 1
        heir.look({rank: dict(state) for rank, state in job.states.items()}, {})
        assert heir.take_stall() is None


def test_a_pause_of_all_is_only_information() -> None:
    """A checkpoint: nobody is in a collective, all at the same place."""
    job = Job(4, stall=60)
    job.issue(range(4), (G, 0, 0))
    found = []
    for _ in range(100):
        job.look(1.0)
        found.append(job.leader.take_stall())
    assert [stall.severity for stall in found if stall is not None] == ["info"]


def test_skew_is_silent() -> None:
    """One rank comes ten seconds later to every step; the others wait in a collective."""
    job = Job(4, stall=60)
    for _ in range(20):
        job.issue([0, 1, 2], (G, 0, 0))
        job.stuck([0, 1, 2], "unshard", 1)
        for _ in range(40):
            job.look()
            assert job.leader.take_stall() is None
        for rank in (0, 1, 2):
            job.states[rank].pop("stuck")
        job.issue([3], (G, 0, 0))
        job.issue(range(4), (G, 1, 0))
        job.look()
        assert job.found is None


def test_a_rank_that_ended_is_waited_for_in_vain() -> None:
    job = Job(2, stall=600)
    job.issue([0, 1], (G, 0, 0))
    job.look()
    job.stuck([0], "unshard", 1)
    job.states[1].update(ended="ValueError at train.py:9 in load", exit=True, place="between two steps")
    stalls = []
    for _ in range(12):
        job.look()
        stalls.append(job.leader.take_stall())
    (stall,) = [stall for stall in stalls if stall is not None]
    assert stall.message.startswith("rank 1 ended and will not come in process group 0 of ranks 0,1: ")
    assert "rank 0 in the all-gather of layers.1" in stall.message
    assert "rank 1 ended by ValueError at train.py:9 in load; last between two steps, step 0" in stall.message


def test_many_ranks_are_few_lines() -> None:
    inside = [rank for rank in range(512) if rank not in (3, 7)]
    ranks = [Standing(rank, 7, "in the all-gather of layers.12", True, 94.0) for rank in inside]
    ranks.append(Standing(7, 7, "in the backward of layers.14", False, 96.2))
    ranks.append(Standing(3, 6, "after the forward", end="ended by SIGKILL"))
    assert [str(group) for group in grouped(ranks)] == [
        "510 ranks (0-2, 4-6, 8-511) in the all-gather of layers.12, step 7 since 94 s",
        "rank 7 in the backward of layers.14, step 7 since 96 s",
        "rank 3 ended by SIGKILL; last after the forward, step 6",
    ]
