"""Two runs beside each other: what differs is said with its numbers, and times never are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

import fsdptrace
from fsdptrace.analysis import NotATrace
from fsdptrace.analysis.diff import Changed, diff
from fsdptrace.cli.app import app
from support.made import Made, run

FORWARD, BACKWARD = {"pass": "forward"}, {"pass": "backward"}


def _step(made: Made, frees: bool) -> None:
    """One unit of 3,000 B on two ranks, that is freed after its forward and gathered again, or stays open."""
    made.event("forward", root=2, grad=True, inference=False, **FORWARD)
    made.unshard(1, 3000, "forward")
    made.event("pre_forward", 1, **FORWARD)
    if frees:
        made.event("reshard", 1, bytes=3000, **FORWARD)
    made.event("post_forward", 1, **FORWARD)
    if frees:
        made.unshard(1, 3000, "backward")
    made.event("pre_backward", 1, **BACKWARD)
    made.event("reshard", 1, bytes=3000, **BACKWARD)
    made.end_step(3000)


def _write(folder: Path, frees: list[bool], rank: int = 0, tick: int = 10, **header: Any) -> Made:
    made = Made(rank, 2, **header)
    made.tick = tick
    for value in frees:
        _step(made, value)
    made.end()
    made.write(folder)
    return made


def test_times_make_no_difference(tmp_path: Path) -> None:
    for rank in range(2):
        _write(tmp_path / "a", [True] * 3, rank)
        _write(tmp_path / "b", [True] * 4, rank, tick=30_000)
    result = diff(tmp_path / "a", tmp_path / "b")
    assert result.same
    assert (result.steps, result.line_steps) == (6, 6)  # the steps that both have, on two ranks
    assert (result.a.steps, result.b.steps) == (3, 4)
    assert result.notes == []


def test_what_the_device_took_makes_no_difference(tmp_path: Path) -> None:
    for name, ns in (("a", 5), ("b", 7)):
        made = Made(0, 1)
        made.unshard(0, 1000, "forward")
        made.event("memory", 0, allocated=ns, reserved=ns, parent=1)
        made.event("device", of_step=0, gather_ns=ns, reduce_ns=ns, exposed_ns=ns, span_ns=ns)
        made.end_step(1000)
        made.end()
        made.write(tmp_path / name)
    assert diff(tmp_path / "a", tmp_path / "b").same


def test_counts_bytes_and_the_first_event_that_is_another_one(tmp_path: Path) -> None:
    """In A the unit stays open from the second step on. Per step that is one gather of 3,000 B and 1,500 B received less."""
    _write(tmp_path / "a", [True, False, False])
    _write(tmp_path / "b", [True, True, True])
    result = diff(tmp_path / "a", tmp_path / "b")
    assert not result.same
    assert result.counts == [
        Changed("layers.1", "gathers_backward", 1, 3),
        Changed("layers.1", "gathered_bytes", 4 * 3000, 6 * 3000),
        Changed("layers.1", "wire_bytes", 4 * 1500, 6 * 1500),
    ]
    (parting,) = result.partings
    assert (parting.unit, parting.rank, parting.step, parting.steps) == ("layers.1", 0, 1, 2)
    # Step 0 has 9 events with its line; in step 1 these are 10: forward, 11: unshard, 12: pre_forward, 13: the unit's third.
    assert (parting.place, parting.a_seq, parting.b_seq) == (3, 13, 13)
    assert parting.before == "pre_forward, in forward, before idle, after forward, input_grad hooked, grad on"
    assert parting.a == "post_forward, in forward, before forward, after idle"
    assert parting.b == "reshard, in forward, 3000 B, to sharded, cause hook"
    assert (result.model, result.memory, result.findings_a, result.findings_b) == ([], [], [], [])


def test_a_sequence_that_ends_earlier(tmp_path: Path) -> None:
    _write(tmp_path / "a", [True])
    longer = Made(0, 2)
    _step(longer, True)
    end = 10 * longer.seq  # of which the step's line is
    step = {"seq": 99, "kind": "optimizer_step", "t0": end - 4, "t1": end - 3, "step": 0, "optimizer": "SGD 0"}
    longer.line({**step, "tensors": 1, "groups": 1, "temporary": 0, "foreign": 0})
    longer.lines[-2:] = longer.lines[:-3:-1]
    longer.end()
    longer.write(tmp_path / "b")
    (parting,) = diff(tmp_path / "a", tmp_path / "b").partings
    assert (parting.unit, parting.place, parting.a, parting.a_seq, parting.b_seq) == (None, 2, "", 0, 99)
    assert parting.b == "optimizer_step, SGD 0, tensors 1, groups 1, temporary 0, foreign 0"


def test_memory_by_step_lines(tmp_path: Path) -> None:
    for name, peak in (("a", 9000), ("b", 5000)):
        made = Made(0, 1)
        made.one_line_step(peak=peak, past_backward_peak=peak - 5000)
        made.end()
        made.write(tmp_path / name)
    result = diff(tmp_path / "a", tmp_path / "b")
    assert result.memory == [
        Changed("", "past_backward_peak", 4000, 0), Changed("", "unsharded_peak", 9000, 5000),
    ]  # fmt: skip
    assert result.notes == ['no step with all its events is in both (record with detail="full"): sequences were not compared']


def test_models_and_findings(tmp_path: Path) -> None:
    run(tmp_path / "a", ranks=1, steps=1)
    other = Made(0, 1, names={"layers.0": 2000, "head": 3000})
    other.violation("unused-gather", "head", severity="warning")
    other.end_step(0)
    other.end()
    other.write(tmp_path / "b")
    result = diff(tmp_path / "a", tmp_path / "b")
    assert result.model == [
        Changed("layers.0", "bytes", 1000, 2000), Changed("layers.1", "unit", True, False),
        Changed("head", "unit", False, True),
    ]  # fmt: skip
    assert [(finding.rule, finding.pattern) for finding in result.findings_b] == [("unused-gather", "head")]
    assert result.findings_a == []
    assert {item.unit for item in result.counts} == {"layers.0"}  # what only one has is not compared


def test_ranks_that_only_one_has(tmp_path: Path) -> None:
    for rank in range(3):
        _write(tmp_path / "a", [True], rank)
    _write(tmp_path / "b", [True], 1)
    result = diff(tmp_path / "a", tmp_path / "b")
    assert (result.same, result.steps, result.notes) == (True, 1, ["2 ranks only in A: not compared"])
    _write(tmp_path / "c", [True], 7)
    assert "no rank is in both: nothing was compared event by event" in diff(tmp_path / "b", tmp_path / "c").notes
    with pytest.raises(NotATrace):
        diff(tmp_path / "a", tmp_path / "nowhere")


def _train(record: Callable[..., fsdptrace.Recording], mesh: Any, keeps: bool, out: Path) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), checkpoint_wrapper(nn.Linear(8, 8)))
    for i, layer in enumerate(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=not (keeps and i == 1))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = record(model, detail="full", out=str(out))
    with recording:
        for _ in range(2):
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    recording.close()
    return recording.path


def test_real_runs(fake_pg: Callable[..., Any], record: Callable[..., fsdptrace.Recording], tmp_path: Path) -> None:
    """The same program twice is the same; with another `reshard_after_forward` that unit gathers less in the backward."""
    mesh = fake_pg(2)
    first, again, keeps = (_train(record, mesh, keeps, tmp_path / name) for name, keeps in (("a", 0), ("b", 0), ("c", 1)))
    assert diff(first, again).same
    result = diff(first, keeps)
    assert Changed("1", "reshard_after_forward", True, False) in result.model
    assert Changed("1", "gathers_backward", 2, 0) in result.counts
    assert "1" in {item.unit for item in result.partings}
    # 8 x 8 weights and 8 biases in float32 are 288 B; two steps save a gather each.
    assert Changed("1", "gathered_bytes", 4 * 288, 2 * 288) in result.counts


def test_the_command(tmp_path: Path) -> None:
    _write(tmp_path / "a", [True, False])
    _write(tmp_path / "b", [True, True])

    def call(*arguments: object) -> Any:
        return CliRunner(env={"COLUMNS": ""}).invoke(app, ["diff", *map(str, arguments)])

    same = call(tmp_path / "a", tmp_path / "a")
    assert (same.exit_code, same.output.splitlines()[-1]) == (0, "no difference")
    other = call(tmp_path / "a", tmp_path / "b")
    assert other.exit_code == 1
    lines = other.output.splitlines()
    rows = [line.split("  ") for line in lines if line.startswith("layers.1")]
    assert [[cell.strip() for cell in row if cell.strip()] for row in rows] == [
        ["layers.1", "gathers in backward", "0.50", "1", "(+100.0 %)"],
        ["layers.1", "bytes gathered", "4,500 B", "6,000 B", "(+33.3 %)"],
        ["layers.1", "bytes received by gathers", "2,250 B", "3,000 B", "(+33.3 %)"],
    ]
    assert "      B       reshard, in forward, 3000 B, to sharded, cause hook (event 13)" in lines
    assert lines[-1] == "they differ"
    data = json.loads(call(tmp_path / "a", tmp_path / "b", "--json").stdout)
    assert (data["schema"], data["same"], data["partings"][0]["unit"]) == ("fsdptrace-diff/1", False, "layers.1")
    assert call(tmp_path / "a", tmp_path / "nowhere").exit_code == 2
    assert call(tmp_path / "a", tmp_path / "b", "--run-b", "other").exit_code == 2
