"""Device times worked out from timing events, on scripted streams whose times a person chose, and the whole path on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from fsdptrace import events as ev
from fsdptrace import notes
from fsdptrace.adapters import device
from fsdptrace.adapters.accelerator import RelaxedCapture
from fsdptrace.adapters.device import Timing
from fsdptrace.checks.base import Violation
from fsdptrace.checks.engine import Engine
from fsdptrace.checks.exposed_communication import ExposedCommunication
from fsdptrace.checks.unsharded_budget import UnshardedBudget
from fsdptrace.files import read_file
from fsdptrace.model_map import GroupInfo, ModelMap, UnitInfo


class Stream:
    """A stream on which work has been queued up to ``at`` ns."""

    def __init__(self) -> None:
        self.at = 0


class Event:
    def __init__(self, api: Api) -> None:
        self._api = api
        self.at = -1

    def record(self, stream: Stream | None = None) -> None:
        self.at = (self._api.stream if stream is None else stream).at
        self._api.recorded += 1

    def query(self) -> bool:
        self._api.asked += 1
        if self._api.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.at <= self._api.reached


class Api:
    """Events complete when ``reached`` has passed the time at which their stream gets to them: the host is ahead of the device
    until a test says otherwise."""

    def __init__(self) -> None:
        self.stream = Stream()
        self.reached = -1
        self.made = self.recorded = self.asked = 0
        self.broken = self.relaxed = False
        self.allocated = 500
        self.in_capture = False

    def idle(self) -> Stream:
        return Stream()

    def event(self) -> Event:
        self.made += 1
        return Event(self)

    def elapsed(self, begin: Event, end: Event) -> int:
        if max(begin.at, end.at) > self.reached or self.broken:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end.at - begin.at

    def capturing(self) -> bool:
        return self.in_capture

    @contextmanager
    def asking(self) -> Iterator[None]:
        self.relaxed = True
        yield
        self.relaxed = False

    def memory(self) -> tuple[int, int]:
        return self.allocated, 7000


class Comm:
    """What Timing looks at on FSDP2's communication context."""

    def __init__(self, api: Api) -> None:
        self.copy_in, self.gather, self.reduce_scatter_stream, self.all_reduce_stream = (Stream() for _ in range(4))
        self.reduce_scatter_states: list[Any] = []
        self._api = api

    def get_all_gather_streams(self, async_op: bool, state: Any) -> tuple[Stream, Stream]:
        return (self._api.stream, self._api.stream) if async_op else (self.copy_in, self.gather)


ALL = 10**12


@pytest.fixture
def api() -> Api:
    return Api()


def begun(api: Api, wanted: bool = True) -> Timing:
    timing = Timing(api, lambda step: wanted, lambda step: False)
    timing.begin_step(0)
    return timing


def rows(timing: Timing, api: Api) -> dict[int, tuple[int, int, int]]:
    """(begin, end, exposed) by seq, with times from the step's begin, once the device has caught up."""
    api.reached = ALL
    (times,) = timing.poll()
    return {
        seq: (begin - times.begin, end - times.begin, exposed)
        for seq, begin, end, exposed in zip(times.seqs, times.begins, times.ends, times.exposed, strict=True)
    }


def gather(timing: Timing, comm: Comm, seq: int, gid: int, copied: int, ended: int, async_op: bool = False) -> None:
    comm.copy_in.at, comm.gather.at = copied, ended
    timing.gather(seq, gid, 1, SimpleNamespace(comm_ctx=comm, _training_state=None), async_op)


def test_a_gather_begins_after_its_copy_in_and_after_the_gather_before(api: Api) -> None:
    timing, comm = begun(api), Comm(api)
    gather(timing, comm, 10, 0, copied=100, ended=400)
    gather(timing, comm, 11, 1, copied=150, ended=650)  # its copy-in is long done when the stream is free at 400
    api.stream.at = 300
    timing.wait(20, 0, 1)  # compute is there at 300, the gather ends at 400: 100 exposed
    api.stream.at = 900
    timing.wait(21, 1, 1)  # long done
    timing.end_step()
    assert rows(timing, api) == {
        10: (100, 400, 100), 11: (400, 650, 0), 20: (300, 400, -1), 21: (900, 900, -1),
    }  # fmt: skip
    (times,) = timing.results
    assert (times.gather, times.reduce, times.exposed_total, times.missing) == (300 + 250, 0, 100, 0)


def test_an_asynchronous_gather_is_not_to_be_seen(api: Api) -> None:
    timing, comm = begun(api), Comm(api)
    gather(timing, comm, 10, 0, 100, 400, async_op=True)
    timing.wait(20, 0, 1)
    timing.end_step()
    assert rows(timing, api) == {}


def test_a_reduction_is_exposed_where_the_next_post_backward_waits_for_it(api: Api) -> None:
    timing, comm = begun(api), Comm(api)
    api.stream.at, comm.reduce_scatter_stream.at = 1000, 1600
    timing.before_reduction()
    comm.reduce_scatter_states.append(1)
    timing.after_reduction(comm, 0, 30, 0)
    api.stream.at = 1450  # the next post-backward: compute gets there at 1450 and waits until 1600
    timing.before_reduction()
    api.stream.at, comm.reduce_scatter_stream.at = 1620, 1900
    comm.reduce_scatter_states[:] = [2]
    timing.after_reduction(comm, 1, 31, 0)
    api.stream.at = 1950  # the final callback: nothing to wait for any more
    timing.before_final()
    comm.reduce_scatter_states.clear()
    timing.after_final(comm)
    timing.end_step()
    assert rows(timing, api) == {30: (1000, 1600, 150), 31: (1620, 1900, 0)}


def test_what_one_wait_took_is_not_counted_for_the_next_reduction(api: Api) -> None:
    """Two reductions in flight (reduce_scatter_max_input_buffers), both waited for in the final callback at 100: the first
    takes until 300, the second from there until 450."""
    timing, comm = begun(api), Comm(api)
    for seq, end in ((30, 300), (31, 450)):
        comm.reduce_scatter_stream.at = end
        timing.before_reduction()
        comm.reduce_scatter_states.append(seq)
        timing.after_reduction(comm, 0, seq, 0)
    api.stream.at = 100
    timing.before_final()
    comm.reduce_scatter_states.clear()
    timing.after_final(comm)
    timing.end_step()
    assert rows(timing, api) == {30: (0, 300, 200), 31: (300, 450, 150)}


def test_an_all_reduce_begins_after_its_reduce_scatter(api: Api) -> None:
    timing, comm = begun(api), Comm(api)
    api.stream.at, comm.reduce_scatter_stream.at, comm.all_reduce_stream.at = 10, 60, 200
    timing.before_reduction()
    comm.reduce_scatter_states.append(1)
    timing.after_reduction(comm, 0, 30, 31)
    timing.end_step()
    assert rows(timing, api) == {30: (10, 60, 0), 31: (60, 200, -1)}


def test_a_reduction_that_has_completed_needs_no_event_where_compute_would_wait_for_it(api: Api) -> None:
    """What is said is the same whether the host sees that the device is done or is far ahead of it."""

    def recorded_when(host_at: tuple[int, int]) -> tuple[int, dict[int, tuple[int, int, int]]]:
        timing, comm, before = begun(api), Comm(api), api.recorded
        for seq, (copied, ended, host) in enumerate(((1000, 1600, host_at[0]), (2000, 2300, host_at[1])), 30):
            api.reached = host
            timing.before_reduction()
            api.stream.at, comm.reduce_scatter_stream.at = copied, ended
            comm.reduce_scatter_states[:] = [seq]
            timing.after_reduction(comm, 0, seq, 0)
            api.stream.at += 700  # the next unit's backward
        timing.end_step()
        return api.recorded - before, rows(timing, api)

    same = {30: (1000, 1600, 0), 31: (2000, 2300, 0)}
    assert recorded_when((-1, 1599)) == (2 * 2 + 1 + 1, same)  # two for each, where compute gets to the second, the step's end
    assert recorded_when((-1, 1600)) == (2 * 2 + 1, same)


def test_a_few_events_say_whether_a_step_has_completed(api: Api) -> None:
    timing, comm = begun(api), Comm(api)
    for seq in range(100):
        gather(timing, comm, seq + 1, 0, 10 * seq, 10 * seq + 5)
    api.stream.at = 2000
    timing.end_step()
    api.reached = 2000
    (times,) = timing.poll()
    assert (len(times.seqs), api.asked) == (100, 2)  # the last gather and the step's end


def test_an_event_on_another_current_stream_is_waited_for_too(api: Api) -> None:
    timing, comm = begun(api), Comm(api)
    gather(timing, comm, 10, 0, 100, 400)
    api.stream.at = 9000
    timing.wait(20, 0, 1)  # on a side stream of the program's own, which is behind
    api.stream.at = 500
    timing.end_step()
    api.reached = 8999
    assert timing.poll() == []
    assert timing.behind == 1
    assert rows(timing, api) == {10: (100, 400, 0), 20: (9000, 9000, -1)}


def test_a_thread_that_asks_is_exempt_from_a_capture_as_long_as_it_asks() -> None:
    mode, seen = ctypes.c_int(0), []  # CU_STREAM_CAPTURE_MODE_GLOBAL

    def exchange(given: Any) -> None:  # as cuThreadExchangeStreamCaptureMode
        mode.value, given._obj.value = given._obj.value, mode.value
        seen.append(mode.value)

    with RelaxedCapture(exchange):
        assert seen == [2]
    assert seen == [2, 0]


def test_events_are_asked_for_in_that_state(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    timing, comm = begun(api), Comm(api)
    gather(timing, comm, 10, 0, 100, 400)
    timing.end_step()
    states: list[bool] = []
    query, elapsed = Event.query, Api.elapsed
    monkeypatch.setattr(Event, "query", lambda event: bool(states.append(api.relaxed)) or query(event))
    monkeypatch.setattr(Api, "elapsed", lambda api, one, two: bool(states.append(api.relaxed)) or elapsed(api, one, two))
    assert rows(timing, api) == {10: (100, 400, 0)}
    assert (set(states), api.relaxed) == ({True}, False)


def test_a_device_that_has_failed_takes_nothing_else_along(api: Api) -> None:
    timing, comm = begun(api), Comm(api)
    gather(timing, comm, 10, 0, 100, 400)
    timing.end_step()
    api.broken = True
    (times,) = timing.poll()
    assert (times.seqs, times.missing, timing.behind) == ([], 1, 0)


def test_a_step_is_worked_out_only_when_everything_in_it_has_completed(api: Api) -> None:
    timing, comm = begun(api), Comm(api)
    gather(timing, comm, 10, 0, 100, 400)
    api.stream.at = 500
    timing.end_step()
    api.reached = 499  # the gather has ended, compute has not
    assert timing.poll() == []
    assert timing.behind == 1
    assert rows(timing, api) == {10: (100, 400, 0)}
    assert timing.behind == 0


def test_events_that_never_complete_are_counted(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    timing, comm = begun(api), Comm(api)
    gather(timing, comm, 10, 0, 100, 400)
    gather(timing, comm, 11, 1, 500, 10**13)
    timing.end_step()
    api.reached = ALL
    assert timing.poll() == []
    monkeypatch.setattr(device, "PATIENCE", -1.0)
    (times,) = timing.poll()
    assert (times.seqs, times.missing) == ([10], 1)


def test_a_device_far_behind_makes_steps_be_left_out_not_memory_grow(api: Api) -> None:
    timing, comm = begun(api), Comm(api)
    for step in range(20):
        gather(timing, comm, step + 1, 0, 100, 400)  # one step is timed more than may wait
        timing.end_step()
        timing.begin_step(step + 1)
    assert (timing.behind, timing.skipped, timing.on) == (device.MAX_WAITING, 20 - device.MAX_WAITING + 1, False)


def test_events_are_used_again(api: Api) -> None:
    timing, comm = begun(api), Comm(api)
    api.reached = ALL
    for step in range(50):
        gather(timing, comm, step + 1, 0, 100, 400)
        timing.end_step()
        timing.poll()
        timing.begin_step(step + 1)
    assert api.made == 4  # a reference, two for the gather, the end of the step


def test_nothing_is_recorded_in_a_graph_capture(api: Api) -> None:
    api.in_capture = True
    timing = begun(api)
    assert (timing.on, api.made) == (False, 0)
    api.in_capture = False
    timing.begin_step(1)
    assert timing.on
    api.in_capture = True
    timing.open(5)
    assert not timing.on


def test_a_step_that_is_not_wanted_costs_no_event(api: Api) -> None:
    timing = begun(api, wanted=False)
    timing.end_step()
    assert (timing.on, api.made, timing.poll()) == (False, 0, [])


def test_where_the_allocator_grew() -> None:
    groups = tuple(
        GroupInfo(i, f"layers.{i}", i, (), (), 1, 4, 1, "float32", "float32", 4, 4, 1, {}, True, True, 1, False)
        for i in range(3)
    )
    units = tuple(UnitInfo(i, f"layers.{i}", (f"layers.{i}",), (i,), True) for i in range(3))
    found: list[Violation] = []
    options = {"unsharded-budget": {"allocated_bytes": 900}}
    engine = Engine(ModelMap(0, "M", units, groups), [UnshardedBudget], found.append, options=options)
    for seq, (group, allocated) in enumerate(((0, 100), (1, 400), (0, 350), (2, 900), (1, 950)), 1):
        engine.handler(ev.MEMORY)(seq, group, 0, allocated, 7000, 0, 0, 0)
    grew = "grew most at layers.2 +550 B, layers.1 +350 B."
    text = notes.allocator(engine.tracker, 950, 7000)
    assert text == f" Allocator: 950 B allocated, 7,000 B reserved; in this step it {grew}"
    assert [(violation.fqn, violation.evidence, violation.bytes) for violation in found] == [("layers.1", (5,), 950)]
    assert found[0].message == (
        "The allocator has given out 950 B at event 5 (unit layers.1), limit 900 B; 0 B of it are gathered parameters. "
        f"In this step it {grew}"
    )


# -- the rule ----------------------------------------------------------------------------------------------------------
def share_found(events: list[tuple[int, int, int]], share: float = 0.2) -> list[str]:
    """What the rule says of (step, exposed, span) in us."""
    found: list[Violation] = []
    options = {"exposed-communication": {"share": share}}
    engine = Engine(ModelMap(0, "M", (), ()), [ExposedCommunication], found.append, options=options)
    for seq, (step, exposed, span) in enumerate(events, 1):
        engine.handler(ev.DEVICE)(seq, -1, 0, step, 4_000_000, 1_000_000, exposed * 1000, span * 1000 if span >= 0 else -1)
        engine.handler(ev.STEP)(seq + 100, -1, 0, 0, 0, 0, 0, 0)
    return [violation.message for violation in found]


def test_a_step_that_waits_for_more_than_its_share_is_reported() -> None:
    (message,) = share_found([(5, 3000, 10_000)])
    assert message == (
        "In step 5 compute waited 3.00 ms of 10.00 ms (30 %) for communication: all-gathers ran 4.00 ms, reductions 1.00 ms."
    )


def test_the_share_itself_first_steps_and_steps_that_never_completed_are_silent() -> None:
    assert share_found([(0, 9000, 10_000), (1, 9000, 10_000), (2, 2000, 10_000), (3, 9000, -1)]) == []
    assert share_found([(2, 3000, 10_000)], share=0.3) == []


# -- the whole path, on the CPU ----------------------------------------------------------------------------------------
def test_every_event_that_can_be_timed_is_in_the_file(fake_pg: Any, record: Any, tmp_path: Path) -> None:
    mesh = fake_pg(2)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, out=str(tmp_path), device_timing="always") as rec:
        for _ in range(2):
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rec.close()
    trace = read_file(rec.path)
    timed = [event for event in trace.events if "device_t0" in event.data]
    # Per step three units gather in forward and again in backward, each a gather and a wait; each reduces once.
    kinds = {kind: sum(event.kind == kind for event in timed) for kind in {event.kind for event in timed}}
    # The CPU has no allocator to ask, but is asked all the same: after each wait and each post-backward.
    assert sum(event.kind == "memory" for event in trace.events) == 12 + 6
    assert kinds == {"unshard": 12, "wait": 12, "reduce_scatter": 6, "forward": 2, "backward": 2}
    assert all(event["device_t0"] <= event["device_t1"] for event in timed)
    spans = [event for event in trace.events if event.kind == "device"]
    assert [event["of_step"] for event in spans] == [0, 1]
    assert all(event["span_ns"] > 0 for event in spans)
    assert trace.untimed == 0


def test_without_an_accelerator_nothing_is_timed_unless_asked(fake_pg: Any, record: Any, tmp_path: Path) -> None:
    model = fully_shard(nn.Linear(8, 8), mesh=fake_pg(2))
    with record(model, out=str(tmp_path)) as rec:
        model(torch.randn(2, 8)).sum().backward()
    rec.close()
    assert b"device" not in Path(rec.path).read_bytes().replace(b"device_timing", b"")
