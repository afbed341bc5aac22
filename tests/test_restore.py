"""After a recording everything is as it was, whatever ended it, and nothing keeps the model alive."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import fsdptrace
from fsdptrace.adapters.context import Context
from support.models import chain, sharded_chain, train
from support.programs import Program, every_program
from support.snapshot import differences, snapshot
from support.torches import RELEASE


@every_program()
def test_everything_is_as_it_was(fake_pg: Any, record: Any, program: Program) -> None:
    running = program.build(fake_pg(*program.shape, names=program.names))
    running.step()
    running.step()
    before = snapshot(running.models, values=False)
    with record(running.models):
        running.step()
        assert differences(before, snapshot(running.models, values=False))
    assert differences(before, snapshot(running.models, values=False)) == []


def test_entering_and_leaving_changes_no_value(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4))
    for _ in range(2):  # before and after lazy initialisation
        before = snapshot([model])
        for _ in range(3):
            with record(model):
                pass
        assert differences(before, snapshot([model])) == []
        train(model)


def test_users_own_hooks_and_wrappers_stay(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 1)
    calls: list[str] = []
    group = model[0]._get_fsdp_state()._fsdp_param_group
    original = group.unshard

    def mine(async_op: bool = False) -> Any:
        calls.append("unshard")
        return original(async_op)

    group.unshard = mine
    model[0].register_forward_pre_hook(lambda module, args: calls.append("pre"))
    model[0].register_forward_hook(lambda module, args, output: calls.append("post"))
    train(model)
    before = snapshot([model], values=False)
    expected, calls[:] = list(calls), []
    with record(model) as rec:
        train(model)
        late = model[0].register_forward_pre_hook(lambda module, args: calls.append("late"))
    # Somebody else's wrapper is called through, and is back in its place.
    assert calls == expected
    assert group.__dict__["unshard"] is mine
    assert rec.steps[0].counts["unshard"] == 2
    late.remove()
    assert differences(before, snapshot([model], values=False)) == []
    calls.clear()
    with record(model):
        train(model)
    assert calls == expected


def test_after_an_exception_inside(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 2)
    train(model)
    before = snapshot([model], values=False)
    rec = record(model)
    with pytest.raises(ZeroDivisionError), rec:
        model(torch.randn(4, 1 // 0))
    assert differences(before, snapshot([model], values=False)) == []


def test_after_a_violation(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4))
    model[0].set_modules_to_backward_prefetch([model[2]])
    train(model)
    before = snapshot([model], values=False)
    with (
        pytest.raises(fsdptrace.InvariantViolation, match="gather-after-backward") as caught,
        record(model, checks="gather-after-backward", on_violation="raise") as rec,
    ):
        train(model)
    assert differences(before, snapshot([model], values=False)) == []
    assert caught.value.violation == rec.violations[0]
    # It is raised at the event, from inside the step: the prefetch has happened, what follows has not.
    step = rec.steps[0]
    last = [event.kind for event in step.events if event.kind not in ("step", "violation", "backward", "exception")][-1]
    assert last == "unshard"
    assert step.counts["violation"] == 1
    assert rec.faults == 0


@pytest.mark.parametrize("where", ["unshard", "wait", "reshard", "pre_forward", "post_backward", "forward", "backward"])
def test_after_a_fault_of_our_own(
    fake_pg: Any, record: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    from fsdptrace import events as ev

    made: list[Context] = []
    original = Context.__init__

    def init(self: Context, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.on[ev.KIND_NUMBER[where]] = fails
        made.append(self)

    def fails(*_: Any) -> None:
        raise LookupError("a fault of the tracer's own")

    monkeypatch.setattr(Context, "__init__", init)
    mesh = fake_pg(4)
    torch.manual_seed(1)
    alone = sharded_chain(mesh)
    torch.manual_seed(1)
    model = sharded_chain(mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    before = snapshot([model], values=False)
    inputs = [torch.randn(4, 8) for _ in range(3)]
    for x in inputs:
        train(alone, optimizers[0], x)
    with caplog.at_level(logging.WARNING), record(model, on_violation="raise") as rec:
        for x in inputs:
            train(model, optimizers[1], x)
        # Off already, within the recording.
        assert not rec.enabled
        after = snapshot([model], values=False)
    assert len(made) == 1
    assert rec.faults >= 1
    lines = [line for line in caplog.records if line.name == "fsdptrace"]
    assert len(lines) == 1
    assert lines[0].levelname == "ERROR"
    assert lines[0].getMessage() == (
        "fsdptrace failed and turned this recording off; training goes on: LookupError: a fault of the tracer's own"
    )
    # What lazy initialisation registered is PyTorch's; nothing of ours is left.
    assert [name for name in differences(before, after) if name.endswith(("unshard", "reshard", "forward", "backward"))] == []
    if RELEASE >= (2, 13):  # the fake process group of older ones leaves reduced gradients uninitialised
        for one, other in zip(alone.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.to_local(), other.to_local())
    # The next recording is none the worse.
    monkeypatch.undo()
    with record(model) as again:
        train(model)
    assert again.faults == 0
    assert again.steps[-1].counts["forward"] == 1


def test_close_ends_a_running_recording(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 1)
    train(model)
    before = snapshot([model], values=False)
    rec = record(model)
    rec.__enter__()
    train(model)
    rec.close()
    assert differences(before, snapshot([model], values=False)) == []
    assert rec.steps[0].counts["forward"] == 1
    rec.close()
    train(model)
    assert len(rec.steps) == 1


def test_backward_after_the_recording_ended(fake_pg: Any, record: Any) -> None:
    # The forward's outputs keep the hook that was on the state then: it must work on, and record nothing.
    model = sharded_chain(fake_pg(4), 2)
    with record(model) as rec:
        loss = model(torch.randn(4, 8)).sum()
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())
    assert "backward" not in rec.steps[0].counts
    assert rec.faults == 0
    with record(model) as again:
        loss = model(torch.randn(4, 8)).sum()
    with record(model) as again:
        loss.backward()
    assert again.steps[-1].counts["backward"] == 1
    assert again.steps[-1].counts["post_backward"] == 2


@pytest.mark.parametrize("keep", [False, True])
def test_models_are_collected(fake_pg: Any, tmp_path: Path, keep: bool) -> None:
    mesh = fake_pg(4)
    alive = []
    kept = []
    for _ in range(3):
        model = sharded_chain(mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fsdptrace.record(model, out=str(tmp_path)) as rec:
            train(model, optimizer)
            train(model, optimizer)
        alive += [weakref.ref(model), weakref.ref(model[0]), weakref.ref(model[0]._get_fsdp_state()._fsdp_param_group)]
        if keep:
            kept.append(rec)
        del model, optimizer, rec
    gc.collect()
    assert [reference() for reference in alive if reference() is not None] == []
    if keep:
        # What was recorded can be read all the same.
        assert kept[0].summary().root == "Sequential"
        kept[0].close()
    else:
        # Close the session: it is the same for all recordings with these options.
        other = fsdptrace.record(sharded_chain(mesh), out=str(tmp_path))
        with other:
            pass
        other.close()


def test_entering_again_goes_on(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers, seqs = [], []
    for _ in range(4):
        with record(model) as rec:
            train(model, optimizer)
        numbers.append(rec.steps[-1].number)
        seqs += [event.seq for event in rec.steps[-1]]
    # One step per recording, counted on, in one file, with sequence numbers that go on.
    assert numbers == [0, 1, 2, 3]
    assert seqs == sorted(set(seqs))
    assert rec.model_map().model == 0
    rec.close()
    assert len(list(Path(rec.path).parent.glob("*.jsonl"))) == 1
    # The group's state is told once; afterwards it is known.
    assert sum(event.kind == "state" for event in fsdptrace_events(rec.path)) == 1


def fsdptrace_events(path: str) -> Any:
    from fsdptrace.files import read_file

    return read_file(path).events


def test_the_same_recording_can_be_entered_again(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 1)
    rec = record(model)
    for _ in range(3):
        with rec:
            train(model)
    assert [step.number for step in rec.steps] == [0, 1, 2]


def test_what_happened_between_two_recordings_is_noticed(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 2)
    with record(model):
        train(model)
    model[1].unshard()
    with record(model) as rec:
        train(model)
    states = [(event.group, event["sharded"], event["bytes"]) for event in rec.steps[-1] if event.kind == "state"]
    assert states == [(1, "unsharded", 288)]


def test_wrapped_anew_between_two_recordings(fake_pg: Any, record: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = fake_pg(4)
    model = chain(2)
    fully_shard(model[0], mesh=mesh)
    with record(model) as rec:
        pass
    assert [group.fqn for group in rec.model_map()] == ["0"]
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    with record(model) as rec:
        train(model)
    assert [group.fqn for group in rec.model_map()] == ["0", "1"]
    assert rec.steps[-1].counts["reduce_scatter"] == 2


def test_recording_twice_at_once_is_refused(fake_pg: Any, record: Any) -> None:
    model = sharded_chain(fake_pg(4), 2)
    outer = nn.Sequential(model)
    train(model)
    with record(model) as rec:
        during = snapshot([model], values=False)
        for other in (model, model[0], outer, [nn.Sequential(model[1])]):
            with pytest.raises(fsdptrace.AlreadyRecorded, match="is being recorded already"), record(other):
                pass
        assert differences(during, snapshot([model], values=False)) == []
        train(model)
    assert rec.steps[0].counts["forward"] == 1
    with record(outer) as rec:  # and now it may be
        train(outer)
    assert rec.steps[-1].counts["forward"] == 1
    with pytest.raises(fsdptrace.AlreadyRecorded), record([model, model]):
        pass


def test_switched_off(fake_pg: Any, record: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FSDPTRACE", "0")
    model = sharded_chain(fake_pg(4), 1)
    before = snapshot([model])
    with record(model, on_violation="raise") as rec:
        assert differences(before, snapshot([model])) == []
        train(model)
        rec.step()
    assert not rec.enabled
    assert (rec.steps, rec.events, rec.violations, rec.counts(), rec.scalars(), rec.path) == ([], [], [], {}, {}, "")
    assert rec.summary() is None
    rec.flush()
    rec.close()
    assert not (tmp_path / "out").exists()


def test_other_models_are_left_alone(fake_pg: Any, record: Any) -> None:
    mesh = fake_pg(4)
    recorded, other = sharded_chain(mesh, 1), sharded_chain(mesh, 1)
    before = snapshot([other])
    with record(recorded) as rec:
        mine = [key for key in differences(before, snapshot([other])) if key.startswith("0:")]
        train(other)
        assert rec.events == [] or {event.kind for event in rec.events} == {"state"}
    assert mine == []
    assert rec.steps == []  # nothing of the recorded model happened: no step
