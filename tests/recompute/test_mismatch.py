"""Recomputations that do not match: what the CheckpointError is told to say, and what the trace holds."""

from __future__ import annotations

import concurrent.futures
import contextvars
import pickle
import re
import sys
import traceback
from typing import Any

import pytest
import torch
import torch.nn as nn
from gallery.verdict import verdict
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

import fsdptrace
from support.experts import DIM, EXPERTS, TOP, sharded
from support.models import Block, Calls, Checkpointed, train


@pytest.fixture
def mesh(fake_pg: Any) -> Any:
    return fake_pg(4)


@pytest.fixture
def watch(record: Any) -> Any:
    def make(model: Any, **options: Any) -> fsdptrace.Recording:
        return record(model, **{"checks": None, "on_violation": "record", "detail": "full", **options})

    return make


def note_of(error: BaseException) -> str:
    """Our note on the recomputation."""
    return next(note for note in error.__notes__ if note.startswith("fsdptrace: ") and "recomputation" in note)


def unit(run: Any, mesh: Any, how: dict[str, Any] | None = None, **children: nn.Module) -> Checkpointed:
    """A model whose second block, a unit, runs ``run`` under checkpoint; 4 x 8 inputs."""
    model = Checkpointed([Block(), Calls(run, **children)], **{"use_reentrant": False, **(how or {})})
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fails(model: nn.Module, kind: type[BaseException] = CheckpointError) -> BaseException:
    with pytest.raises(kind) as caught:
        train(model, inputs=torch.randn(4, 8, requires_grad=True))
    return caught.value


class Once:
    """True at the first question."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.asked == 1


def test_fewer_tensors(mesh: Any, watch: Any) -> None:
    first = Once()

    # Of the linear layer: its input and weight. Of relu: its result. Of tanh: its result, in the forward only.
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x).relu()
        return x.tanh() if first() else x

    model = unit(run, mesh, lin=nn.Linear(8, 8))
    with watch(model) as rec:
        error = fails(model)
    assert note_of(error) == (
        "fsdptrace: blocks.1 (call 1 of it in step 0), in unit blocks.1, which is gathered (288 B), saved 4 tensors in its "
        "forward and 3 in its recomputation. First difference: position 3, (4, 8) float32 on cpu in the forward, which the "
        "recomputation did not reach. Cause unknown: global state and units used are the same, gathered parameters, inputs, "
        "random number state and state kept in modules were not recorded.\n  Run again with "
        "FSDPTRACE_FINGERPRINT=inputs,params to be told which of them differs, or call fsdptrace.diagnose(error) where the "
        "error is caught."
    )
    found = verdict(rec)
    found.reads("0 error saved-tensor-count blocks.1 0")
    (violation,) = found.violations
    events = {event.kind: event for event in rec.steps[0] if event.kind in ("recompute", "mismatch")}
    region = next(event for event in rec.steps[0] if event.kind == "region" and event["name"] == "blocks.1")
    assert violation.evidence == (region.seq, events["recompute"].seq, events["mismatch"].seq)
    assert violation.message == note_of(error).partition("\n")[0].removeprefix("fsdptrace: ")
    assert (events["mismatch"]["what"], events["mismatch"]["region"]) == ("count", region.seq)
    assert (events["mismatch"]["detail"]["forward"], events["mismatch"]["detail"]["recompute"]) == (4, 3)
    assert events["recompute"]["end"] == "returned"


def test_more_tensors_with_early_stop(mesh: Any, watch: Any) -> None:
    # Early stop ends the recomputation at the forward's third tensor, which is another one there.
    first = Once()

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x) if first() else self.a(x).relu().float())

    model = unit(run, mesh, a=nn.Linear(8, 12), b=nn.Linear(12, 8))
    with watch(model) as rec:
        error = fails(model)
    # Forward: a's input and weight, b's input and weight, which is (8, 12) transposed. Recomputation: a's two, relu's result,
    # b's input, where it is stopped.
    text = note_of(error)
    assert "saved 4 tensors in its forward and as many in its recomputation, 1 of them of another shape" in text
    assert "position 3, (12, 8) float32 on cpu in the forward, (4, 12) float32 on cpu in the recomputation" in text
    verdict(rec).reads("0 error saved-tensor-metadata blocks.1 0")


def test_more_tensors_without_early_stop(mesh: Any, watch: Any) -> None:
    first = Once()

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        return x if first() else x.tanh()

    model = unit(run, mesh, lin=nn.Linear(8, 8))
    with watch(model) as rec, set_checkpoint_early_stop(False):
        error = fails(model)
    assert "trying to save more tensors during recomputation" in str(error)
    assert "saved 2 tensors in its forward and was about to save more, at least 3, in its recomputation." in note_of(error)
    verdict(rec).reads("0 error saved-tensor-count blocks.1 0")


def test_other_shapes(mesh: Any, watch: Any) -> None:
    first = Once()
    model = unit(lambda self, x: self.lin(x[:2] if first() else x[:3]).sum() + x, mesh, lin=nn.Linear(8, 8))
    with watch(model) as rec:
        error = fails(model)
    text = note_of(error)
    assert "2 tensors in its forward and as many in its recomputation, 1 of them of another shape, dtype or device." in text
    assert "position 0, (2, 8) float32 on cpu in the forward, (3, 8) float32 on cpu in the recomputation." in text
    assert "Only the number of rows differs (the first dimension), as when a router sends tokens elsewhere." in text
    verdict(rec).reads("0 error saved-tensor-metadata blocks.1 0")


def test_which_call_of_which_step(mesh: Any, watch: Any) -> None:
    # The block is called three times a step; the second call of the second step goes wrong.
    calls: list[int] = []

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return self.lin(x).tanh() if len(calls) != 6 + 2 else self.lin(x).tanh().sin()

    block = Calls(run, lin=nn.Linear(8, 8))
    model = Calls(lambda self, x: sum(checkpoint(self.block, x, use_reentrant=False) for _ in range(3)), block=block)
    fully_shard(model.block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model) as rec:
        train(model, optimizer, torch.randn(4, 8, requires_grad=True))
        error = fails(model)
    assert "block (call 2 of it in step 1), in unit block" in note_of(error)
    assert [v.step for v in verdict(rec).violations] == [1]


# -- causes that are known without fingerprints ------------------------------------------------------------------------
def test_a_buffer_that_the_forward_writes(mesh: Any, watch: Any) -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen += 1
        x = self.lin(x)
        return x.tanh() if self.seen == 1 else x

    block = Calls(run, lin=nn.Linear(8, 8))
    block.register_buffer("seen", torch.zeros(()))
    block.register_buffer("other", torch.zeros(()))
    model = Checkpointed([block], use_reentrant=False)
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    with watch(model):
        error = fails(model)
    text = note_of(error)
    assert (
        "Cause: state kept in modules differs: buffer blocks.0.seen: as it was in the forward, written once since in the "
        "recomputation." in text
    )
    assert "update such state outside of the checkpointed function" in text
    assert "other" not in text


def test_global_state(mesh: Any, watch: Any) -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        return x.tanh() if torch.get_default_dtype() == torch.float64 else x

    model = unit(run, mesh, lin=nn.Linear(8, 8))
    with watch(model):
        torch.set_default_dtype(torch.float64)
        try:
            loss = model(torch.randn(4, 8, dtype=torch.float32, requires_grad=True)).sum()
        finally:
            torch.set_default_dtype(torch.float32)
        with pytest.raises(CheckpointError) as caught:
            loss.backward()
    text = note_of(caught.value)
    differs = "torch.get_default_dtype(): torch.float64 in the forward, torch.float32 in the recomputation."
    assert f"Cause: global state differs: {differs}" in text
    assert "around backward()" in text


def test_a_context_variable(mesh: Any, watch: Any) -> None:
    mode = contextvars.ContextVar("attention_mode", default="dense")

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        return x.tanh() if mode.get() == "sparse" else x

    model = unit(run, mesh, lin=nn.Linear(8, 8))
    with watch(model):
        token = mode.set("sparse")
        loss = model(torch.randn(4, 8, requires_grad=True)).sum()
        mode.reset(token)
        with pytest.raises(CheckpointError) as caught:
            loss.backward()
    assert "Cause: global state differs: context variable attention_mode" in note_of(caught.value)


def test_evaluation_mode(mesh: Any, watch: Any) -> None:
    model = unit(lambda self, x: self.lin(x).tanh() if self.training else self.lin(x), mesh, lin=nn.Linear(8, 8))
    with watch(model):
        loss = model(torch.randn(4, 8, requires_grad=True)).sum()
        model.eval()
        with pytest.raises(CheckpointError) as caught:
            loss.backward()
    assert "blocks.1.training: True in the forward, False in the recomputation" in note_of(caught.value)


def test_autocast_is_brought_back(mesh: Any, watch: Any) -> None:
    # The forward under autocast, the backward outside of it, as everyone writes it: checkpoint sees to it.
    model = unit(lambda self, x: self.lin(x).tanh().float(), mesh, lin=nn.Linear(8, 8))
    with watch(model, on_violation="raise") as rec:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(4, 8, requires_grad=True)).float().sum()
        loss.backward()
    verdict(rec).silent()


def test_units_used(mesh: Any, watch: Any) -> None:
    # Two units alike: PyTorch sees nothing, the gradients are those of another expert.
    first = Once()
    model = Calls(
        lambda self, x: checkpoint(self.moe, self.inp(x), use_reentrant=False),
        inp=nn.Linear(8, 8),
        moe=Calls(lambda self, x: (self.a if first() else self.b)(x).relu(), a=nn.Linear(8, 8), b=nn.Linear(8, 8)),
    )
    for one in (model.moe.a, model.moe.b, model):
        fully_shard(one, mesh=mesh)
    with watch(model, checks=["recompute-units", "saved-tensor-count", "saved-tensor-metadata"]) as rec:
        train(model)
    found = verdict(rec)
    found.reads("0 error recompute-units (root) 0")
    (violation,) = found.violations
    assert "the recomputation of moe (call 1 of it in step 0) (event" in violation.message
    parts = "used 1 unit, its forward 1, and they part at unit 1: moe.a in the forward, moe.b in the recomputation."
    assert parts in violation.message


def test_units_used_stop_the_run(mesh: Any, watch: Any) -> None:
    # Both: the CheckpointError comes first and has the note; where PyTorch sees nothing, the violation stops the run.
    for more in (False, True):
        first = Once()

        def run(self: Any, x: torch.Tensor, first: Any = first, more: bool = more) -> torch.Tensor:
            if first():
                return self.a(x).tanh() if more else self.a(x)
            return self.b(x)

        model = Calls(
            lambda self, x: checkpoint(self.moe, self.inp(x), use_reentrant=False), inp=nn.Linear(8, 8),
            moe=Calls(run, a=nn.Linear(8, 8), b=nn.Linear(8, 8)),
        )  # fmt: skip
        for one in (model.moe.a, model.moe.b, model):
            fully_shard(one, mesh=mesh)
        with watch(model, checks=["recompute-units", "saved-tensor-count"], on_violation="raise") as rec:
            error = fails(model, CheckpointError if more else fsdptrace.InvariantViolation)
        assert [v.rule for v in rec.violations] == ["recompute-units"] + ["saved-tensor-count"] * more
        if more:
            assert "Cause: units used differ: unit 1: moe.a in the forward, moe.b in the recomputation." in note_of(error)


# -- the note -----------------------------------------------------------------------------------------------------------
def mismatching(mesh: Any, **how: Any) -> Checkpointed:
    first = Once()
    return unit(lambda self, x: self.lin(x).tanh() if first() else self.lin(x), mesh, how, lin=nn.Linear(8, 8))


def test_the_note_survives_pickling(mesh: Any, watch: Any) -> None:
    model = mismatching(mesh)
    with watch(model):
        error = fails(model)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is CheckpointError
    assert note_of(again) == note_of(error)
    text = "".join(traceback.format_exception(again))
    assert "saved 3 tensors in its forward and 2 in its recomputation" in text


def test_the_note_without_rules(mesh: Any, watch: Any) -> None:
    model = mismatching(mesh)
    with watch(model, checks=False) as rec:
        error = fails(model)
    assert "saved 3 tensors in its forward and 2 in its recomputation" in note_of(error)
    assert rec.violations == []


def test_the_note_under_debug(mesh: Any, watch: Any) -> None:
    # debug=True: PyTorch raises another CheckpointError from the first one.
    model = mismatching(mesh, debug=True)
    with watch(model):
        error = fails(model)
    assert isinstance(error.__cause__, CheckpointError)
    assert "saved 3 tensors in its forward and 2 in its recomputation" in note_of(error)


def test_another_exception_in_a_recomputation(mesh: Any, watch: Any) -> None:
    first = Once()

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not first():
            raise ValueError("only once")
        return self.lin(x).tanh()

    model = unit(run, mesh, lin=nn.Linear(8, 8))
    with watch(model) as rec:
        error = fails(model, ValueError)
    assert note_of(error) == (
        "fsdptrace: this came out of the recomputation of blocks.1 (call 1 of it in step 0), in unit blocks.1, which is "
        "gathered (288 B)."
    )
    (again,) = (event for event in rec.steps[-1] if event.kind == "recompute") if rec.steps else ([],)
    assert again["end"] == "error"


def worker() -> None:
    raise_it = CheckpointError("two numbers")
    raise_it.add_note("fsdptrace: a note")
    raise raise_it


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes")
def test_the_driver_sees_the_note_of_a_worker() -> None:
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        error = pool.submit(worker).exception(timeout=60)
    assert isinstance(error, CheckpointError)
    assert error.__notes__ == ["fsdptrace: a note"]


def test_a_tensor_that_nobody_asks_for(mesh: Any, watch: Any) -> None:
    # index_add saves its index, which is let go with a part of the graph that is not used: the rest is compared all the same.
    first = Once()

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(2 if first() else 3)
        unused = self.lin(x).tanh()
        del unused
        return x + torch.zeros_like(x).index_add(0, rows, self.lin(x[rows]))

    model = unit(run, mesh, lin=nn.Linear(8, 8))
    with watch(model) as rec:
        error = fails(model)
    assert "(2) int64 on cpu in the forward, (3) int64 on cpu in the recomputation" in note_of(error)
    assert "Only the number of rows differs" in note_of(error)
    verdict(rec).reads("0 error saved-tensor-metadata blocks.1 0")


def test_the_loop_of_a_router_that_keeps_state(mesh: Any, watch: Any) -> None:
    # 128 experts, of which each of 256 tokens takes 8: a router whose bias has grown sends them all to the same.
    model = sharded(mesh, layers=1)
    experts = model.layers[0].mlp
    experts.register_buffer("bias", torch.zeros(EXPERTS))

    def noise(logits: torch.Tensor) -> torch.Tensor:
        out = logits + experts.bias
        with torch.no_grad():
            experts.bias[:TOP].add_(100)
        return out

    experts.noise = noise
    with watch(model) as rec, pytest.raises(CheckpointError) as caught:
        model(torch.randn(256, DIM)).sum().backward()
    text = note_of(caught.value)
    times = re.search(r"(\d+) tensors × (\d+) fewer: the loop in layers.0 ran 8 times instead of (\d+)\.", text)
    assert times is not None, text
    block, fewer, before = map(int, times.groups())
    assert before - fewer == TOP
    counts = re.search(r"saved ([\d,]+) tensors in its forward and ([\d,]+) in its recomputation", text)
    assert counts is not None
    assert int(counts[1].replace(",", "")) - int(counts[2].replace(",", "")) == block * fewer
    assert "buffer layers.0.mlp.bias: as it was in the forward, written once since in the recomputation" in text
    verdict(rec).reads("0 error saved-tensor-count layers.0 0")
