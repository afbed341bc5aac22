"""What is recorded of checkpointed regions: every kind of checkpointing, with numbers worked out by hand.

``Block`` is ``x + down(relu(up(x)))`` with two ``Linear(8, 8)`` on 4 rows. Autograd saves five tensors of it: up's input
(4*8*4 = 128 bytes) and weight (8*8*4 = 256), relu's result (128), down's input, which is the same tensor again (128), and
weight (256): 896 bytes. Where its input needs no grad, up's weight is not saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.utils.checkpoint as pytorch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import fsdptrace
from fsdptrace.analysis import load
from support.models import Block, Calls, Checkpointed, train
from support.show import trace

OTHER = (
    "state", "step", "flag", "unshard", "wait", "reshard", "prefetch", "pre_forward", "post_forward", "pre_backward",
    "post_backward", "reduce_scatter", "optimizer_step", "param_change",
)  # fmt: skip


def regions_of(rec: fsdptrace.Recording) -> trace:
    assert rec.faults == 0
    return trace(rec.steps[-1], drop=OTHER)


def units(model: Any, blocks: Any, mesh: Any) -> Any:
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def x(rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 8, requires_grad=True)


def save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    save = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def test_checkpoint(fake_pg: Any, record: Any) -> None:
    model = Checkpointed([Block(), Block()], use_reentrant=False)
    units(model, model.blocks, fake_pg(4))
    with record(model) as rec:
        train(model)
    regions_of(rec).reads("""
        forward (root)
            region blocks.0 blocks.0 saved=4 bytes=640  # its input needs no grad
            region blocks.1 blocks.1 saved=5 bytes=896
        backward
            recompute blocks.1 blocks.1 saved=5 early_stop [recompute]
            recompute blocks.0 blocks.0 saved=4 early_stop [recompute]
    """)
    region, again = (
        next(e for e in rec.steps[0] if e.kind == kind and e["name"] == "blocks.1") for kind in ("region", "recompute")
    )
    assert region["region"] == again["region"] == region.seq
    assert region.t0 < region.t1 < again.t0 < again.t1
    # What happened in them lies in them.
    inside = {event.seq for event in rec.steps[0] if event.parent == region.seq and event.kind == "pre_forward"}
    assert len(inside) == 1


def test_early_stop_off(fake_pg: Any, record: Any) -> None:
    model = Checkpointed([Block()], use_reentrant=False)
    units(model, model.blocks, fake_pg(4))
    with record(model) as rec, set_checkpoint_early_stop(False):
        train(model, inputs=x())
    regions_of(rec).reads("""
        forward (root)
            region blocks.0 blocks.0 saved=5 bytes=896
        backward
            recompute blocks.0 blocks.0 saved=5 [recompute]
    """)


def test_reentrant(fake_pg: Any, record: Any) -> None:
    # PyTorch does not tell what it saved: the forward runs without grad.
    model = Checkpointed([Block(), Block()], use_reentrant=True)
    units(model, model.blocks, fake_pg(4))
    with record(model) as rec:
        train(model, inputs=x())
    regions_of(rec).reads("""
        forward (root)
            region blocks.0 blocks.0 reentrant
            region blocks.1 blocks.1 reentrant
        backward
            recompute blocks.1 blocks.1 reentrant [recompute]
            recompute blocks.0 blocks.0 reentrant [recompute]
    """)


def test_selective(fake_pg: Any, record: Any) -> None:
    how = functools.partial(create_selective_checkpoint_contexts, save_products)
    model = Checkpointed([Block()], use_reentrant=False, context_fn=how)
    units(model, model.blocks, fake_pg(4))
    with record(model) as rec:
        train(model, inputs=x())
    regions_of(rec).reads("""
        forward (root)
            region blocks.0 blocks.0 saved=5 bytes=896 selective
        backward
            recompute blocks.0 blocks.0 saved=5 early_stop selective [recompute]
    """)


@pytest.mark.parametrize("impl", [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT])
def test_checkpoint_wrapper(fake_pg: Any, record: Any, impl: Any) -> None:
    # Outside and inside of the unit; the wrapper's own part is not in the name.
    mesh = fake_pg(4)
    model = nn.Sequential(checkpoint_wrapper(Block(), impl), fully_shard(Block(), mesh=mesh))
    fully_shard(model[0], mesh=mesh)
    model[1] = checkpoint_wrapper(model[1], impl)
    fully_shard(model, mesh=mesh)
    with record(model) as rec:
        train(model, inputs=x())
    more = "saved=5 bytes=896" if impl == CheckpointImpl.NO_REENTRANT else "reentrant"
    end = "saved=5 early_stop" if impl == CheckpointImpl.NO_REENTRANT else "reentrant"
    regions_of(rec).reads(f"""
        forward (root)
            region 0 0 {more}
            region 1 1 {more}
        backward
            recompute 1 1 {end} [recompute]
            recompute 0 0 {end} [recompute]
    """)


def test_checkpoint_sequential(fake_pg: Any, record: Any) -> None:
    # Two segments of two blocks; the last segment is not checkpointed.
    model = Calls(
        lambda self, x: checkpoint_sequential(self.seq, 2, x, use_reentrant=False),
        seq=nn.Sequential(*[Block() for _ in range(4)]),
    )
    units(model, model.seq, fake_pg(4))
    with record(model) as rec:
        train(model, inputs=x())
    regions_of(rec).reads("""
        forward (root)
            region seq.0 to seq.1 saved=10 bytes=1792
        backward
            recompute seq.0 to seq.1 saved=10 early_stop [recompute]
    """)


def inner(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.post(checkpoint(self.a, self.pre(x), use_reentrant=False)).relu()


def test_nested(fake_pg: Any, record: Any) -> None:
    # Of the outer one: pre's input and weight, the inner one's input, post's input and weight, relu's result. The outer
    # recomputation runs the inner region's forward again, whose tensors are not needed; then the inner one is recomputed.
    block = Calls(inner, pre=nn.Linear(8, 8), a=Block(), post=nn.Linear(8, 8))
    model = Checkpointed([block], use_reentrant=False)
    units(model, model.blocks, fake_pg(4))
    with record(model, checks=None, on_violation="raise") as rec:
        train(model, inputs=x())
    regions_of(rec).reads("""
        forward (root)
            region blocks.0 blocks.0 saved=6 bytes=1024
                region blocks.0 blocks.0.a saved=5 bytes=896
        backward
            recompute blocks.0 blocks.0 saved=6 early_stop [recompute]
                region blocks.0 blocks.0.a saved=5 bytes=896
            recompute blocks.0 blocks.0.a saved=5 early_stop [recompute]
    """)


def test_two_forwards_before_one_backward(fake_pg: Any, record: Any) -> None:
    model = Checkpointed([Block()], use_reentrant=False)
    units(model, model.blocks, fake_pg(4))
    with record(model) as rec:
        (model(x()) * model(x(4))).sum().backward()
    events = [event for event in rec.steps[0] if event.kind in ("region", "recompute")]
    first, second = (event["region"] for event in events if event.kind == "region")
    # The product's backward comes to the second forward first, or to the first: each once, with its own number.
    assert sorted(event["region"] for event in events if event.kind == "recompute") == [first, second]


def test_retain_graph(fake_pg: Any, record: Any) -> None:
    model = Checkpointed([Block()], use_reentrant=False)
    units(model, model.blocks, fake_pg(4))
    with record(model, checks=None, on_violation="raise") as rec:
        loss = model(x()).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    regions_of(rec).reads("""
        forward (root)
            region blocks.0 blocks.0 saved=5 bytes=896
        backward
            recompute blocks.0 blocks.0 saved=5 early_stop [recompute]
        backward
            recompute blocks.0 blocks.0 saved=5 early_stop [recompute]
    """)


def test_without_grad_there_is_no_region(fake_pg: Any, record: Any) -> None:
    model = Checkpointed([Block()], use_reentrant=False)
    units(model, model.blocks, fake_pg(4))
    with record(model) as rec, torch.no_grad():
        model(x())
    assert "region" not in rec.steps[0].counts


def test_without_metadata_bytes_are_not_known(fake_pg: Any, record: Any) -> None:
    model = Checkpointed([Block()], use_reentrant=False, determinism_check="none")
    units(model, model.blocks, fake_pg(4))
    with record(model) as rec:
        train(model, inputs=x())
    (region,) = (event for event in rec.steps[0] if event.kind == "region")
    assert (region["saved"], region["saved_bytes"]) == (5, None)


# -- names ---------------------------------------------------------------------------------------------------------
def by_lambda(self: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: self.b(y), x, use_reentrant=False)


def by_partial(self: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(functools.partial(self.b.__call__), x, use_reentrant=False)


def by_unbound(self: Any, x: torch.Tensor) -> torch.Tensor:
    call = nn.Module.__call__  # not bound to its module, as transformers 5 has it (modeling_layers.py)
    return checkpoint(functools.partial(call, self.b), x, use_reentrant=False)


def by_custom_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    def create(module: nn.Module) -> Callable[..., Any]:
        def custom_forward(*inputs: Any) -> Any:
            return module(*inputs)

        return custom_forward

    return checkpoint(create(self.b), x, use_reentrant=False)


def by_function(self: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(torch.tanh, self.b(x), use_reentrant=False)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (by_lambda, "(root) (<lambda>)"),  # what it closes over is the root, `self`
        (by_partial, "b"),
        (by_unbound, "b"),
        (by_custom_forward, "b (custom_forward)"),
        (by_function, "tanh"),
    ],
)
def test_names(fake_pg: Any, record: Any, run: Any, name: str) -> None:
    model = Calls(run, b=Block())
    units(model, [model.b], fake_pg(4))
    with record(model) as rec:
        train(model, inputs=x())
    assert {event["name"] for event in rec.steps[0] if event.kind in ("region", "recompute")} == {name}


# -- whose it is ---------------------------------------------------------------------------------------------------
def test_called_from_outside_of_the_model(fake_pg: Any, record: Any) -> None:
    model = Calls(lambda self, x: self.b(x), b=Block())
    units(model, [model.b], fake_pg(4))
    with record(model) as rec:
        checkpoint(model.b, x(), use_reentrant=False).sum().backward()
    regions_of(rec).reads("""
        region b b saved=5 bytes=896 [forward]
        forward b
        backward
            recompute b b saved=5 early_stop [recompute]
    """)


def test_other_models_are_nobodys_business(fake_pg: Any, record: Any) -> None:
    mesh = fake_pg(4)
    model = Checkpointed([Block()], use_reentrant=False)
    units(model, model.blocks, mesh)
    other = Checkpointed([Block()], use_reentrant=False)
    reentrant = Checkpointed([Block()], use_reentrant=True)
    with record(model) as rec:
        for foreign in (other, reentrant):
            train(foreign, inputs=x())
        train(model, inputs=x())
    counts = rec.steps[0].counts
    assert (counts["region"], counts["recompute"]) == (1, 1)


def test_two_recorded_models(fake_pg: Any, record: Any) -> None:
    mesh = fake_pg(4)
    models = [Checkpointed([Block()] * (i + 1), use_reentrant=False) for i in range(2)]
    for model in models:
        units(model, {id(block): block for block in model.blocks}.values(), mesh)
    with record(models) as rec:
        (models[0](x()).sum() + models[1](x()).sum()).backward()
        rec.step()
    # One block in the first model, one that is run twice in the second.
    assert [(step.map.model, step.counts["region"], step.counts["recompute"]) for step in rec.steps] == [(0, 1, 1), (1, 2, 2)]


def test_a_backward_after_the_recording(fake_pg: Any, record: Any) -> None:
    model = Checkpointed([Block(), Block()], use_reentrant=False)
    units(model, model.blocks, fake_pg(4))
    frame, function = pytorch._CheckpointFrame, pytorch.CheckpointFunction
    with record(model) as rec:
        assert pytorch._CheckpointFrame is not frame
        loss = model(x()).sum()
    assert (pytorch._CheckpointFrame, pytorch.CheckpointFunction) == (frame, function)
    loss.backward()  # through frames of ours, which do what PyTorch's do
    assert rec.faults == 0
    assert "recompute" not in rec.steps[0].counts
    loss = model(x()).sum()
    with record(model) as rec:  # and a recording that begins between a forward and its backward sees no region
        loss.backward()
    assert "recompute" not in rec.steps[0].counts
    assert rec.faults == 0


def test_an_exception_in_a_region(fake_pg: Any, record: Any) -> None:
    def fails(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.up(x)
        raise KeyError("no")

    model = Checkpointed([Block(), Calls(fails, up=nn.Linear(8, 8))], use_reentrant=False)
    units(model, model.blocks, fake_pg(4))
    with record(model) as rec:
        with pytest.raises(KeyError):
            model(x())
        rec.step()
        model.blocks[1] = model.blocks[0]
        train(model, inputs=x())
    regions = [event for event in rec.steps[0] if event.kind == "region"]
    assert [(event["name"], event["saved"]) for event in regions] == [("blocks.0", 5), ("blocks.1", None)]
    # Nothing of it is left in the next step.
    assert [event["saved"] for event in rec.steps[1] if event.kind == "region"] == [5, 5]


# -- torch.compile -----------------------------------------------------------------------------------------------------
def test_compiled_inside_of_the_region(fake_pg: Any, record: Any) -> None:
    model = Checkpointed([Block()], use_reentrant=False)
    model.blocks[0].compile(backend="aot_eager")
    units(model, model.blocks, fake_pg(4))
    with record(model) as rec:
        train(model, inputs=x())
    counts = rec.steps[0].counts
    assert (counts["region"], counts["recompute"]) == (1, 1)
    assert rec.faults == 0


def test_compiled_around_the_checkpoint(fake_pg: Any, record: Any) -> None:
    # It becomes a part of the graph and is recomputed inside of it: frames are made while tracing only. The file says so.
    model = nn.Sequential(checkpoint_wrapper(Block()))
    model[0].compile(backend="aot_eager")
    units(model, [model[0]], fake_pg(4))
    with record(model) as rec:
        train(model, inputs=x())
        train(model, inputs=x())
    assert "region" not in rec.steps[0].counts
    rec.close()
    (line,) = load(rec.path).coverage
    assert line == "recompute: not visible where torch.compile was put around a checkpoint"
