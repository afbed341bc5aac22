"""``fsdptrace.inspect`` and the command: numbers worked out by hand, and the predicted peak against a recorded one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from gallery.models import DIM, data, linear, shard
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdptrace
from support.models import Calls
from support.ranks import run_alone
from support.torches import HSDP, since

MARKED = since(2, 13, "older ones keep no mark of a tie")
ROOT, UNIT, INNER = 1280, 256, 288
"""Bytes: an embedding and a head of 20 x 8 floats each; a Linear(8, 8) without a bias, and one with."""


def ids() -> torch.Tensor:
    return torch.randint(0, 20, (4, 3))


def lm(mesh: Any, count: int = 3, **options: Any) -> Any:
    """Embedding and head in the root (1,280 bytes), ``count`` units of 256 bytes."""
    model = Calls(
        lambda self, i: self.head(self.layers(self.emb(i))), emb=nn.Embedding(20, DIM),
        layers=nn.Sequential(*[linear() for _ in range(count)]), head=nn.Linear(DIM, 20, bias=False),
    )  # fmt: skip
    return shard(model, list(model.layers), mesh, **options)


def nested(mesh: Any, count: int = 3) -> Any:
    """Units of 256 bytes, each with an inner one of 288 that runs last in it; the root has no parameters."""
    outer = [Calls(lambda self, x: self.inner(self.own(x)), own=linear(), inner=linear(True)) for _ in range(count)]
    for unit in outer:
        fully_shard(unit.inner, mesh=mesh)
    return shard(nn.Sequential(*outer), outer, mesh)


# -- numbers -----------------------------------------------------------------------------------------------------------
def test_units_and_bytes(fake_pg: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = fsdptrace.inspect(lm(fake_pg(4), mp_policy=policy))
    # In bf16 half of it: root 640, units 128 each. Shards stay fp32, a quarter of them here.
    assert [(g.fqn, g.tensors, g.bytes, g.sharded_bytes, g.dtype, g.reduce_dtype) for g in found.map] == [
        ("", 2, 640, 320, "bfloat16", "float32"),
        *[(f"layers.{i}", 1, 128, 64, "bfloat16", "float32") for i in range(3)],
    ]
    assert (found.sharded_bytes, found.gathered_bytes, found.outside_bytes) == (512, 1024, 0)
    assert (found.largest_gather, found.largest_reduction) == (("", 640), ("", 1280))
    # Root, a unit in its backward and the one before it, prefetched.
    assert (found.peak.bytes, found.peak.pass_, found.peak.unit) == (640 + 2 * 128, "backward", "layers.2")
    assert found.peak.groups == (("", 640), ("layers.2", 128), ("layers.1", 128))
    assert found.violations == ()
    assert str(found).splitlines() == [
        "Calls: 4 units with 1,024 B of parameters, 512 B on this rank",
        "gathered at most 896 B: in the backward of layers.2, (root) 640 B, layers.2 128 B, layers.1 128 B",
        "largest gather 640 B ((root)), largest reduction 1,280 B ((root))",
    ]
    assert json.loads(json.dumps(found.to_json()))["peak"]["bytes"] == 896


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lm, ROOT + 2 * UNIT),  # root open, two in flight
        (lambda mesh: lm(mesh, 1), ROOT + UNIT),
        (nested, 2 * UNIT + INNER),  # an outer unit, its inner one, and the outer unit before, prefetched
        (lambda mesh: lm(mesh, reshard_after_forward=False), ROOT + 3 * UNIT),  # all stay open
        (lambda mesh: lm(mesh, reshard_after_forward=True), ROOT + 2 * UNIT),  # the root is needed again
        (lambda mesh: shard(nn.Sequential(linear(), linear()), [], mesh), 2 * UNIT),  # one unit
    ],
)
def test_the_peak_and_a_recorded_one(fake_pg: Any, record: Any, build: Any, expected: int) -> None:
    model = build(fake_pg(2))
    found = fsdptrace.inspect(model)
    assert found.peak.bytes == expected
    assert sum(size for _, size in found.peak.groups) == expected
    with record(model) as rec:
        model(ids() if hasattr(model, "emb") else data()).sum().backward()
    assert rec.summary().unsharded_peak == expected


@HSDP
def test_smaller_meshes_and_replicas(fake_pg: Any) -> None:
    # Of 4 ranks to 2 after the forward: half of each of the three units stays until its backward, 3 * 128.
    found = fsdptrace.inspect(lm(fake_pg(4), reshard_after_forward=2))
    assert [group.reshard_after_forward for group in found.map] == [2, 2, 2, 2]
    # The root's too: 640. It is gathered anew for the backward, as are two units.
    assert found.peak.smaller == 640 + 3 * 128
    assert found.peak.bytes == ROOT + 2 * UNIT


def test_hundreds_of_ranks_on_the_meta_device(fake_pg: Any) -> None:
    # 60 x 8 over 256 ranks: one row on each of the first 60, a padded row on all, so that 256 rows are gathered.
    mesh = fake_pg(256, rank=200)
    with torch.device("meta"):
        model = shard(nn.Sequential(nn.Linear(DIM, 60, bias=False), nn.Linear(60, DIM, bias=False)), [], mesh)
    found = fsdptrace.inspect(model)
    (group,) = found.map
    assert group.bytes == 256 * 8 * 4 + 256 * 60 * 4
    assert group.sharded_bytes == 0  # rank 200 has none of the 60 rows, nor of the 8
    assert found.peak.bytes == group.bytes


# -- what the rules say before training --------------------------------------------------------------------------------
def test_a_root_that_is_not_wrapped(fake_pg: Any) -> None:
    mesh = fake_pg(2)
    model = Calls(lambda self, x: x, emb=nn.Embedding(20, DIM), layer=linear(), head=nn.Linear(DIM, 20, bias=False))
    model.head.weight.requires_grad_(False)
    fully_shard(model.layer, mesh=mesh)
    found = fsdptrace.inspect(model)
    (v,) = found.violations
    assert (v.rule, v.severity, found.outside_bytes) == ("uncovered-parameter", "error", 640)
    assert v.message == (
        "emb.weight (640 B) belongs to no unit of fully_shard. Nobody reduces its gradients, and it differs from rank to rank."
    )
    assert str(found).splitlines()[-2].startswith("error: uncovered-parameter: emb.weight")


def test_parameters_that_were_ignored(fake_pg: Any) -> None:
    model = nn.Sequential(linear(), linear())
    fully_shard(model, mesh=fake_pg(2), ignored_params={model[1].weight})
    (v,) = fsdptrace.inspect(model).violations
    assert (v.rule, v.severity) == ("uncovered-parameter", "warning")
    assert v.message.startswith("1.weight (256 B) belongs to no unit of fully_shard though it lies in a wrapped module")


def test_mixed_dtypes_and_ties(fake_pg: Any) -> None:
    mesh = fake_pg(2)
    model = nn.Sequential(nn.Sequential(linear().bfloat16(), linear()), linear())
    shard(model, list(model), mesh)
    (v,) = fsdptrace.inspect(model).violations
    assert (v.rule, v.fqn, v.evidence) == ("mixed-dtype-unit", "0", ())
    assert "0.0.weight (bfloat16), 0.1.weight (float32)" in v.message


@MARKED
def test_a_tie_that_was_cut(fake_pg: Any) -> None:
    model = nn.Sequential(linear(), linear())
    model[1].weight = model[0].weight
    shard(model, list(model), fake_pg(2))
    (v,) = fsdptrace.inspect(model).violations
    assert (v.rule, v.fqn) == ("split-tie", "1")
    assert v.message.startswith("1.weight and 0.weight were one parameter before fully_shard")


def test_nothing_to_look_at(fake_pg: Any) -> None:
    with pytest.raises(ValueError, match=r"inspect\(Linear\): no module of it was wrapped by fully_shard"):
        fsdptrace.inspect(linear())
    with pytest.raises(TypeError, match="a module is needed, not int"):
        fsdptrace.inspect(3)  # type: ignore[arg-type]


def test_changes_nothing(fake_pg: Any) -> None:
    model = lm(fake_pg(2))
    before = [(id(p), p._version) for p in model.parameters()]
    fsdptrace.inspect(model)
    assert [(id(p), p._version) for p in model.parameters()] == before
    assert model._get_fsdp_state()._is_root is None  # not initialised by it


# -- the command -------------------------------------------------------------------------------------------------------
SCRIPT = """
import torch, torch.nn as nn
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def build():
    dist.init_process_group("nccl")               # as training scripts do: there is one already
    mesh = init_device_mesh("cuda", (64,))        # a laptop has none
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(40)], nn.Linear(64, 100_000, bias=False))
    for layer in model[:40]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

def blocks_alone():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fully_shard(model[0])
    return model

def nothing():
    return nn.Linear(2, 2)

def broken():
    raise RuntimeError("no checkpoint here")
"""


def commands(folder: str) -> list[tuple[int, str, str]]:
    """Exit status and both outputs of each command; in a process of its own, which pretends to be of 64 ranks."""
    from typer.testing import CliRunner

    from fsdptrace.cli.app import app

    script = Path(folder) / "wrap.py"
    script.write_text(SCRIPT)
    done = []
    for target, *options in (
        ["build"], ["blocks_alone", "--json"], ["nothing"], ["broken"], ["gone"], ["build", "--rank", "64"],
    ):  # fmt: skip
        result = CliRunner().invoke(app, ["inspect", f"{script}:{target}", "--world-size", "64", *options])
        done.append((result.exit_code, result.stdout, result.stderr))
    result = CliRunner().invoke(app, ["inspect", f"{folder}/absent.py:build"])
    return [*done, (result.exit_code, result.stdout, result.stderr)]


@pytest.mark.multiprocess
def test_command(tmp_path: Path) -> None:
    code, done = run_alone(commands, str(tmp_path), timeout=150)
    assert code == 0
    built, blocks, nothing, broken, gone, rank, absent = done
    status, out, _ = built
    lines = out.splitlines()
    # 64 x 64 floats are 16 KiB; 100,000 rows over 64 ranks are 1,563 padded ones on each: 100,032 rows of 256 bytes, 24.4 MiB.
    assert (status, lines[0]) == (0, "Sequential  as seen by rank 0 of 64")
    assert "gathered at most  24.5 MiB" in lines
    assert "  in the backward of 39, (root) 24.4 MiB, 39 16 KiB, 38 16 KiB" in lines
    rows = [line.split() for line in lines]
    assert ["(root)", "1", "24.4", "MiB", "391", "KiB", "float32", "float32", "0", "64", "open"] in rows
    assert ["*", "x40", "1", "16", "KiB", "256", "B", "float32", "float32", "0", "64", "freed"] in rows
    status, out, _ = blocks
    (found,) = json.loads(out)
    assert (status, found["violations"][0]["rule"], found["outside_bytes"]) == (1, "uncovered-parameter", 64 * 65 * 4)
    assert (nothing[0], broken[0], gone[0], rank[0], absent[0]) == (2, 2, 2, 2, 2)
    assert "wrap.py:nothing: inspect(Linear): no module of it was wrapped by fully_shard" in nothing[2]
    assert "wrap.py:broken: RuntimeError: no checkpoint here" in broken[2]
    assert gone[2].endswith("wrap.py: there is no function gone in it\n")
    assert rank[2] == "fsdptrace: --rank 64: there are ranks 0 to 63\n"
    assert absent[2] == f"fsdptrace: {tmp_path}/absent.py: no such file\n"
