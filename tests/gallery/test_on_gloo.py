"""Cases on two real ranks: the same verdicts on both, and the damage that the rules warn of is there in the values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import fsdptrace
from fsdptrace.adapters import legacy
from gallery.models import DIM, checkpointed_layers, data, layers, linear, sgd, shard, steps
from gallery.verdict import line
from support.models import Calls
from support.ranks import run_ranks
from support.torches import VALUES


def leak(mesh: Any, watch: Any) -> fsdptrace.Recording:
    with legacy.old_bookkeeping():
        model = checkpointed_layers(mesh, 3, use_reentrant=True)
        with watch(model) as rec:
            steps(model, 1)
    return rec


def repeated_prefetch(mesh: Any, watch: Any) -> fsdptrace.Recording:
    model = checkpointed_layers(mesh, 3, use_reentrant=True)
    for one, following in zip(model.layers, model.layers[1:], strict=False):
        one.set_modules_to_forward_prefetch([following])
    with watch(model) as rec:
        steps(model, 1)
    return rec


def pending(mesh: Any, watch: Any) -> fsdptrace.Recording:
    def run(self: Any, x: torch.Tensor, aux: bool = True) -> torch.Tensor:
        return self.aux(self.trunk(x)) if aux else self.trunk(x)

    model = Calls(run, trunk=linear(), aux=linear())
    shard(model, [model.trunk, model.aux], mesh)
    model.trunk.set_modules_to_forward_prefetch([model.aux])
    optimizer = sgd(model, lr=1.0)
    x = torch.ones(2, DIM)
    with watch(model) as rec:
        model(x).sum().backward()
        with torch.no_grad():
            model(x, aux=False)
        old = model.aux.weight.full_tensor().detach().clone()
        optimizer.step()
        with torch.no_grad():
            out = model(x)
    # What the rule says will happen: trunk computed with the new weights, aux with those of before the step.
    trunk, new = model.trunk.weight.full_tensor().detach(), model.aux.weight.full_tensor().detach()
    assert not torch.allclose(old, new)
    assert torch.allclose(out, x @ trunk.T @ old.T)
    return rec


def opened_by_hand(mesh: Any, watch: Any) -> fsdptrace.Recording:
    model = layers(mesh, 2)
    optimizer = sgd(model, lr=1.0)
    x = torch.ones(2, DIM)
    with watch(model) as rec:
        model(x).sum().backward()
        model[1].unshard()
        old = model[1].weight.detach().clone()
        optimizer.step()
        with torch.no_grad():
            out = model(x)
    first, new = model[0].weight.full_tensor().detach(), model[1].weight.full_tensor().detach()
    assert not torch.allclose(old, new)
    assert torch.allclose(out, x @ first.T @ old.T)
    return rec


def lost(mesh: Any, watch: Any) -> fsdptrace.Recording:
    model = nn.Sequential(linear(), Calls(lambda self, x: {self.a(x)}, a=linear()))
    shard(model, list(model), mesh)
    with watch(model) as rec:
        (out,) = model(data())
        with pytest.raises(RuntimeError, match="storage of size 0"):
            out.sum().backward()
    return rec


def healthy(mesh: Any, watch: Any) -> fsdptrace.Recording:
    model = checkpointed_layers(mesh, 3, use_reentrant=False)
    with watch(model, on_violation="raise") as rec:
        steps(model, 2)
    return rec


CASES: dict[Callable[..., fsdptrace.Recording], list[str]] = {
    leak: ["0 error gather-after-backward layers.2 256", "0 error gather-after-backward layers.1 256"],
    repeated_prefetch: ["0 error gather-after-backward layers.2 256", "0 error gather-after-backward layers.1 256"],
    pending: ["0 error pending-gather aux 256"],
    opened_by_hand: ["0 error unpaired-unshard 1 256"],
    lost: ["0 error lost-pre-backward 1 256"],
    healthy: [],
}


def on_two_ranks(rank: int, out: str) -> dict[str, list[str]]:
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for case in CASES:
        torch.manual_seed(0)

        def watch(model: Any, case: Any = case, **options: Any) -> fsdptrace.Recording:
            return fsdptrace.record(model, **{"on_violation": "record", **options}, out=f"{out}/{case.__name__}")

        rec = case(mesh, watch)
        assert rec.faults == 0
        rec.close()
        found[case.__name__] = [line(v) for v in rec.violations if v.rule != "stale-weights"]
    return found


@VALUES
@pytest.mark.multiprocess
def test_on_two_ranks(tmp_path: Path) -> None:
    expected = {case.__name__: lines for case, lines in CASES.items()}
    assert run_ranks(on_two_ranks, 2, str(tmp_path)) == [expected, expected]
