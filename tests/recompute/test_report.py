"""The report on regions: calls, saved tensors and bytes, recomputations and the gathers in them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

from fsdptrace.analysis import load
from fsdptrace.cli.app import app
from support.models import Block, Checkpointed, train
from support.torches import RECOMPUTE


@RECOMPUTE
def test_regions(fake_pg: Any, record: Any) -> None:
    # Reentrant: the recomputation is what gathers each block; the second one is gathered by the first one's prefetch.
    # Non-reentrant: 4 and 5 tensors, 640 and 896 bytes (see test_regions.py), gathered before the recomputation begins.
    mesh = fake_pg(4)
    for reentrant in (False, True):
        model = Checkpointed([Block(), Block()], use_reentrant=reentrant)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with record(model, detail="full") as rec:
            for _ in range(2):
                train(model, inputs=torch.randn(4, 8, requires_grad=reentrant))
                rec.step()
    rec.close()
    run = load(rec.path)
    plain, again = run.models
    assert {name: (e.calls, e.saved, e.saved_bytes, e.recomputes, e.gathers) for name, e in plain.regions.items()} == {
        "blocks.0": (2, 8, 1280, 2, 0), "blocks.1": (2, 10, 1792, 2, 0),
    }  # fmt: skip
    assert {name: (e.calls, e.saved, e.saved_bytes, e.recomputes, e.gathers) for name, e in again.regions.items()} == {
        "blocks.0": (2, 0, 0, 2, 0), "blocks.1": (2, 0, 0, 2, 2),
    }  # fmt: skip
    assert all(entry.recompute_ns > 0 for entry in (*plain.regions.values(), *again.regions.values()))
    assert plain.to_json()["regions"][0]["name"] == "blocks.0"
    text = CliRunner().invoke(app, ["report", rec.path], env={"COLUMNS": "160"}).output
    assert "checkpointed regions, per step and rank:" in text
    (row,) = [line.split() for line in text.splitlines() if line.split()[:2] == ["blocks.*", "2"]][:1]
    assert row[2:6] == ["9", "1,536", "B", "2"]
