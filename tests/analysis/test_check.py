"""The rules over files: the verdicts that the run gave, and honesty where that cannot be known."""

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

import fsdptrace
from fsdptrace.adapters.legacy import old_bookkeeping
from fsdptrace.analysis import check, load
from support.made import Made

BUDGET = {"options": {"budget_bytes": 3500, "checks": ["unsharded-budget"]}}


def test_a_budget_that_is_exceeded(tmp_path: Path) -> None:
    """Layers.1 is open with 3,000 B when the prefetch at event 11 gathers 1,000 B more."""
    made = Made(0, 1, **BUDGET)
    made.step()
    made.end()
    made.write(tmp_path)
    result = check(tmp_path)
    (finding,) = result.findings
    assert result.failed
    assert (finding.rule, finding.severity, finding.source) == ("unsharded-budget", "error", "file")
    assert (finding.bytes, finding.first.seq, finding.first.step, finding.first.fqn) == (4000, 11, 0, "layers.0")
    assert "4,000 B" in finding.first.message
    assert "layers.1 3,000 B" in finding.first.message
    assert (result.judged, result.incomplete) == (1, 0)
    assert (result.new, result.gone) == (1, 0)  # the file has no line of it: it was not found while recording


def test_a_verdict_that_is_found_again_is_said_once(tmp_path: Path) -> None:
    made = Made(0, 1, **BUDGET)
    made.step()
    online = {"rule": "unsharded-budget", "fqn": "layers.0", "evidence": [6, 11], "group": 0}
    made.lines.insert(-1, json.dumps({
        "seq": 12, "kind": "violation", "t0": 1, "t1": 1, "step": 0, "severity": "error", "message": "over", "hint": "",
        "bytes": 4000, "cause": "", **online,
    }))  # fmt: skip
    made.end()
    made.write(tmp_path)
    result = check(tmp_path)
    assert [finding.times for finding in result.findings] == [1]
    assert (result.new, result.gone) == (0, 0)


def test_steps_after_a_gap_are_incomplete_and_repeated(tmp_path: Path) -> None:
    made = Made(0, 1, **BUDGET)
    made.step()
    made.one_line_step()
    made.violation("unsharded-budget", "layers.0", group=0, bytes=5000, message="over the budget later")
    made.step()
    made.end()
    made.write(tmp_path)
    result = check(tmp_path)
    assert (result.judged, result.incomplete) == (1, 2)
    assert {finding.source: finding.first.step for finding in result.findings} == {"file": 0, "online": 2}
    assert result.notes[0].startswith("2 steps (summed over ranks) cannot be judged again")
    assert result.missing == []  # the rule saw them while they ran: its verdict is whole
    others = check(tmp_path, select=["illegal-state"])
    assert others.verdict == "incomplete"
    (line,) = others.missing
    assert line.startswith("illegal-state did not run while recording, so nothing is known of the 2 steps")


def test_what_is_missing_keeps_it_from_passing(tmp_path: Path) -> None:
    for rank, ends in ((0, True), (3, False)):
        made = Made(rank, 4)
        made.step()
        if ends:
            made.end()
        else:
            made.lines[4] = "@@@"
        path = made.write(tmp_path)
    result = check(tmp_path)
    assert (result.verdict, result.findings) == ("incomplete", [])
    assert result.missing == [
        "no file of ranks 1-2 (2 of 4 ranks are here)",
        "rank 3: no end line, so that what came last may be missing",
        "rank 3: lines that cannot be read",
    ]
    assert check(path.with_name("rank00000.node-100.jsonl")).verdict == "passed"  # one file: that rank was asked for
    empty = Made(0, 1, "empty")
    empty.end()
    assert check(empty.write(tmp_path)).missing == ["there is no step in the files"]


def test_where_a_finding_was_found(tmp_path: Path) -> None:
    """The same violation three times: in a file that has no line of it, in one that has, and where it cannot be judged."""
    sources = []
    for place in ("file", "both", "online"):
        made = Made(0, 1, place, **BUDGET)
        if place == "online":
            made.one_line_step()
        made.step()
        if place != "file":
            step = made.number - 1
            made.lines.insert(-1, json.dumps({
                "seq": made.seq, "kind": "violation", "t0": 1, "t1": 1, "step": step, "severity": "error", "message": "over",
                "hint": "", "bytes": 4000, "cause": "", "rule": "unsharded-budget", "fqn": "layers.0", "evidence": [6, 11],
                "group": 0,
            }))  # fmt: skip
        made.end()
        (finding,) = check(made.write(tmp_path)).findings
        sources.append(finding.source)
    assert sources == ["file", "both", "online"]


def test_a_baseline(tmp_path: Path) -> None:
    made = Made(0, 1, **BUDGET)
    made.step()
    made.end()
    made.write(tmp_path / "a")
    first = check(tmp_path / "a")
    baseline = tmp_path / "known.json"
    baseline.write_text(json.dumps(first.to_json()))
    again = check(tmp_path / "a", baseline=baseline)
    assert (again.verdict, len(again.findings), again.errors) == ("passed", 1, [])
    assert [item["known"] for item in again.to_json()["findings"]] == [True]
    other = Made(0, 1, names={"head": 1000, "layers.1": 3000}, **BUDGET)
    other.step()
    other.end()
    other.write(tmp_path / "b")
    assert check(tmp_path / "b", baseline=baseline).verdict == "failed"  # the same rule, another unit
    for text in ("[]", "{}", "nonsense", '{"schema": "fsdptrace-check/1"}'):
        baseline.write_text(text)
        with pytest.raises(ValueError, match="no baseline; make one with `fsdptrace check DIR --json > "):
            check(tmp_path / "a", baseline=baseline)


def test_the_options_of_rules_are_in_the_header(
    fake_pg: Callable[..., Any], record: Callable[..., fsdptrace.Recording], tmp_path: Path
) -> None:
    """A budget given as a rule's own option: found online, and found again from the file alone."""
    model = _nested(fake_pg(4), blocks=2)
    names = ["unsharded-budget"]
    with record(
        model, checks=names, on_violation="record", rule_options={"unsharded-budget": {"budget_bytes": 1}}
    ) as recording:
        model(torch.randn(2, 16)).sum().backward()
    recording.close()
    online = len(recording.violations)
    assert online > 0
    result = check(recording.path)
    assert (result.new, result.gone) == (0, 0)
    assert sum(finding.times for finding in result.findings) == online
    assert {finding.source for finding in result.findings} == {"both"}


def test_a_step_that_lost_its_line_ends_what_can_be_judged(tmp_path: Path) -> None:
    made = Made(0, 1, **BUDGET)
    for _ in range(3):
        made.step()
    made.end()
    made.lines = [line for line in made.lines if '"kind": "step", "t0": 360' not in line]
    assert len(made.lines) == 2 + 3 * 18 - 1 + 1
    made.write(tmp_path)
    result = check(tmp_path)
    assert (result.judged, result.incomplete) == (1, 2)


def test_select_and_ignore(tmp_path: Path) -> None:
    made = Made(0, 1, options={"budget_bytes": 3500})
    made.step()
    made.end()
    made.write(tmp_path)
    assert "unsharded-budget" in check(tmp_path).rules
    assert check(tmp_path, select=["late-reshard", "wrong-root"]).rules == ("late-reshard", "wrong-root")
    assert "wrong-root" not in check(tmp_path, ignore=["wrong-root"]).rules
    with pytest.raises(ValueError, match=r"--select: no rule named 'wrong'; there are gather-after-backward, "):
        check(tmp_path, select=["wrong"])
    with pytest.raises(ValueError, match="--ignore: no rule named 'wrong'"):
        check(tmp_path, ignore=["wrong"])


def test_a_file_that_no_recorder_writes_is_not_fatal(tmp_path: Path) -> None:
    made = Made(0, 1, **BUDGET)
    made.event("flag", 0, flag="is_last_backward", value=True)
    made.event("reshard", 0, bytes=-5)
    made.event("reduce_scatter", 0, bytes=1, world=0, tensors=1)
    made.event("state", 1, sharded="unsharded", pending=True, bytes=1 << 62)
    made.unshard(0, 1 << 62, "backward")
    made.end_step()
    made.end()
    made.write(tmp_path)
    load(tmp_path)
    check(tmp_path)


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.w)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(16, 16)
        self.experts = _Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return x + self.experts(x) * x.sigmoid()  # so that recomputation begins before the experts' backward


def _nested(mesh: Any, blocks: int = 4) -> nn.Sequential:
    model = nn.Sequential(*(_Block() for _ in range(blocks)))
    for i in range(blocks):
        fully_shard(model[i].experts, mesh=mesh)
        model[i] = checkpoint_wrapper(model[i])
        fully_shard(model[i], mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("leak", [True, False])
def test_the_same_verdicts_as_online(
    leak: bool, fake_pg: Callable[..., Any], record: Callable[..., fsdptrace.Recording], tmp_path: Path
) -> None:
    """A real program with a real fault: rule by rule and word by word what was said while it ran."""
    model = _nested(fake_pg(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with old_bookkeeping():
        recording = record(model, checks=None, on_violation="record", detail="full")
        with recording:
            for step in range(3):
                model(torch.randn(2, 16)).sum().backward()
                if leak and step == 1:
                    model[2].unshard()  # by hand, and never freed
                optimizer.step()
                optimizer.zero_grad()
        recording.close()
    assert not recording.faults
    online = recording.violations
    assert {violation.rule for violation in online} >= ({"gather-after-backward", "unpaired-unshard"} if leak else set())
    result = check(recording.path)
    assert (result.new, result.gone, result.incomplete) == (0, 0, 0)
    assert sum(finding.times for finding in result.findings) == len(online)
    firsts = {(finding.first.message, finding.first.hint, finding.first.evidence) for finding in result.findings}
    assert firsts <= {(violation.message, violation.hint, tuple(violation.evidence)) for violation in online}
    again = load(recording.path)
    assert sum(finding.times for finding in again.findings) == len(online)
