"""Six reasons for one CheckpointError are told apart by name, on the fake process group and on two real ranks."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fsdptrace
from support.experts import TOP, causes
from support.models import Calls
from support.ranks import run_ranks
from support.torches import since

SAID = {
    "parameters": "Cause: gathered parameters differ: layers.0.mlp.gate.weight (gathered by layers.0), float32 (128, 16): one "
    "value in the forward, another in the recomputation.",
    "dtype": "Cause: inputs differ: input 0 of layers.0, after FSDP2's cast: bfloat16 in the forward, float32 in the "
    "recomputation.",
    "state": "Cause: state kept in modules differs: buffer layers.0.mlp.bias, float32 (128,): one value in the forward, "
    "another in the recomputation.",
    "random": "Cause: random number state differs: torch's CPU generator: one state in the forward, another in the "
    "recomputation.",
    "context": "Cause: global state differs: torch.are_deterministic_algorithms_enabled(): True in the forward, False in the "
    "recomputation",
    "kernel": "Cause: none of what was recorded (gathered parameters, inputs, random number state, global state, state kept in "
    "modules and units used are the same): an operator that is not deterministic, or state that lies outside of the modules (a "
    "global variable, the environment, a generator of its own).",
}
# Without fingerprints: what is cheap enough to be recorded always. The others are not guessed at.
WITHOUT = {
    "dtype": SAID["dtype"],
    "state": "Cause: state kept in modules differs: buffer layers.0.mlp.bias: as it was in the forward, written once since in "
    "the recomputation.",
    "context": SAID["context"],
}
ONLY_OF_OLD = {"dtype"}  # brought back on releases that have mended it; the older ones have it by themselves


def case(name: str) -> Any:
    marks = [since(2, 9, "the cast can be patched")] if name in ONLY_OF_OLD else []
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", list(map(case, SAID)))
def test_with_fingerprints(fake_pg: Any, record: Any, name: str) -> None:
    note = causes.note_of(causes.CAUSES[name], fake_pg(2), record, fingerprint="params,inputs")
    assert SAID[name] in note
    assert "Also" not in note  # one cause, and no other is named


@pytest.mark.parametrize("name", list(map(case, SAID)))
def test_without_fingerprints(fake_pg: Any, record: Any, name: str) -> None:
    note = causes.note_of(causes.CAUSES[name], fake_pg(2), record, fingerprint=())
    if name in WITHOUT:
        assert WITHOUT[name] in note
        return
    assert "Cause unknown: global state and units used are the same" in note
    assert "FSDPTRACE_FINGERPRINT=inputs,params to be told which of them differs" in note


def test_the_loop_and_who_saved(fake_pg: Any, record: Any) -> None:
    """All tokens to the same 8 experts: whole passes of the loop are missing, and the first tensor that differs is the first
    index that torch.where gives in it."""
    note = causes.note_of(causes.CAUSES["parameters"], fake_pg(2), record, fingerprint="params", checkpoint_detail="modules")
    found = re.search(
        r"saved ([\d,]+) tensors in its forward and (\d+) in its recomputation.* (\d+) tensors × (\d+) fewer: the loop in "
        r"layers.0.mlp ran 8 times instead of (\d+)\.",
        note,
    )
    assert found is not None, note
    forward, again, block, fewer, before = (int(text.replace(",", "")) for text in found.groups())
    assert forward - again == block * fewer
    assert before == fewer + TOP
    assert "int64 on cpu saved by layers.0.mlp at recompute_causes.py:" in note


def test_the_first_value_that_differs(fake_pg: Any, record: Any) -> None:
    """Of the kernel that races: its result, which softmax saves as its own, is the first tensor with another value."""
    note = causes.note_of(causes.CAUSES["kernel"], fake_pg(2), record, fingerprint="all", checkpoint_detail="modules")
    assert "The first saved tensor whose value differs: position " in note
    assert "float32 (256, 128), saved by layers.0.mlp at recompute_causes.py:" in note


def on_two_ranks(rank: int, out: str) -> dict[str, str]:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,))
    return {
        name: causes.note_of(causes.CAUSES[name], mesh, out=out, fingerprint="params,inputs")
        for name in ("parameters", "state")
    }


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes")
@pytest.mark.multiprocess
def test_on_two_ranks(tmp_path: Path) -> None:
    for notes in run_ranks(on_two_ranks, 2, str(tmp_path), timeout=120):
        for name, note in notes.items():
            assert SAID[name] in note


# -- other reasons, such as nobody has planned for -------------------------------------------------------------------------
def noted(model: Any, record: Any, run: Any = None, **options: Any) -> str:
    def go(mesh: Any, watch: Any) -> None:
        with watch(model):
            (run or causes.step)(model)

    return causes.note_of(go, None, record, **{"fingerprint": "params,inputs", **options})


def test_a_counter_in_python(fake_pg: Any, record: Any) -> None:
    model = causes.sharded(fake_pg(2))
    experts = model.layers[0].mlp
    experts.calls = 0

    def noise(logits: torch.Tensor) -> torch.Tensor:
        experts.calls += 1
        return logits if experts.calls == 1 else logits * 0

    experts.noise = noise
    assert "Cause: state kept in modules differs: layers.0.mlp.calls: 0 in the forward, 1 in the recomputation." in noted(
        model, record
    )


def test_a_generator_of_the_module(fake_pg: Any, record: Any) -> None:
    model = causes.sharded(fake_pg(2))
    experts = model.layers[0].mlp
    experts.jitter = torch.Generator().manual_seed(3)
    experts.noise = lambda logits: logits + 100 * torch.randn(128, generator=experts.jitter)
    text = "random number state differs: generator layers.0.mlp.jitter: one state in the forward, another in the recomputation."
    assert text in noted(model, record)


def test_pythons_own_random(fake_pg: Any, record: Any) -> None:
    model = causes.sharded(fake_pg(2))
    model.layers[0].mlp.noise = lambda logits: logits if random.random() > 0.8 else logits * 0

    def run(model: Any) -> None:
        random.seed(0)  # draws 0.84 and 0.76
        causes.step(model)

    text = "Cause: random number state differs: random of Python: one state in the forward, another in the recomputation."
    assert text in noted(model, record, run)


def test_an_input_that_is_changed_in_place(fake_pg: Any, record: Any) -> None:
    """Not a tensor of its own among the arguments, which autograd would watch, but one in a dictionary."""
    mesh = fake_pg(2)
    mask = torch.ones(4)
    model = Calls(
        lambda self, x: checkpoint(self.block, x, {"mask": mask}, use_reentrant=False),
        block=Calls(lambda self, x, given: self.b(x).tanh() if given["mask"].sum() > 0 else self.b(x), b=nn.Linear(8, 8)),
    )
    fully_shard(model, mesh=mesh)

    def run(model: Any) -> None:
        loss = model(torch.randn(4, 8)).sum()
        mask.zero_()
        loss.backward()

    text = "Cause: inputs differ: input 1['mask'], float32 (4,): one value in the forward, another in the recomputation."
    assert text in noted(model, record, run)


def test_a_cache_that_the_forward_fills(fake_pg: Any, record: Any) -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys: list[torch.Tensor] = []

    def attend(self: Any, x: torch.Tensor, past: Cache) -> torch.Tensor:
        past.keys.append(self.key(x).detach())
        return x + self.query(x) @ torch.cat(past.keys).T @ torch.cat(past.keys)

    model = Calls(
        lambda self, x: checkpoint(self.attention, x, use_reentrant=False, past=Cache()),
        attention=Calls(attend, key=nn.Linear(8, 8), query=nn.Linear(8, 8)),
    )
    fully_shard(model, mesh=fake_pg(2))
    note = noted(model, record, lambda model: model(torch.randn(4, 8)).sum().backward())
    assert "Cause: inputs differ: len(input 'past'.keys): 0 in the forward, 1 in the recomputation." in note
    assert "a cache that the forward fills (past_key_values)" in note


# -- values that PyTorch does not look at ----------------------------------------------------------------------------------
def test_wrong_values_and_no_error(fake_pg: Any, record: Any) -> None:
    """One token has 8 experts whatever the router says: as many tensors of the same shapes, of other experts."""
    model = causes.sharded(fake_pg(2), layers=2)
    options = {"checks": None, "on_violation": "record", "detail": "full"}
    with record(model, **options, fingerprint=("params",)) as rec, causes.overwritten(model.layers[0]):
        model(torch.randn(1, 16)).sum().backward()
    found = [violation for violation in rec.violations if violation.rule == "recompute-values"]
    assert [(v.fqn, v.severity) for v in found] == [("layers.0", "error")]
    assert found[0].message == (
        "layers.0 (call 1 of it in step 0), in unit layers.0, which is not gathered, was recomputed from other values than its "
        "forward began with: gathered parameters differ: layers.0.mlp.gate.weight (gathered by layers.0), float32 (128, 16)."
    )


def test_fingerprints_of_a_healthy_model_are_silent(fake_pg: Any, record: Any) -> None:
    model = causes.sharded(fake_pg(2), layers=2)
    with record(model, checks=None, on_violation="raise", fingerprint="all", checkpoint_detail="modules") as rec:
        for _ in range(2):
            causes.step(model)
            rec.step()
    assert rec.violations == []
    assert rec.faults == 0


@pytest.mark.parametrize("given", ["weights", ("params", "weight")])
def test_unknown_kinds_are_refused(fake_pg: Any, given: Any) -> None:
    with pytest.raises(ValueError, match=r"fingerprint: 'weights?' is none of params, inputs, saved, all"):
        fsdptrace.record(causes.sharded(fake_pg(2)), fingerprint=given)
