"""Ranks whose models differ: stages of a pipeline, or one rank that was wrapped in another way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fsdptrace
from fsdptrace.analysis import load
from fsdptrace.cli.app import app
from fsdptrace.html.data import page_data
from support.made import SIZES, Made, model, run

STAGES = ({"layers.0": 1000, "layers.1": 3000}, {"layers.2": 2000, "layers.3": 500, "head": 4000})


def made(rank: int, names: dict[str, int], groups: str = "", world: int = 4, **changed: Any) -> Made:
    """A rank with units ``names``, sharded over the process group ``groups``; the first unit's fields ``changed``."""
    out = Made(rank, world, names=names)
    data = model(names)
    for group in data["groups"]:
        group["shard_group"] = groups
    data["groups"][0].update(changed)
    out.lines[1] = json.dumps(data)
    return out


def step(made: Made, names: dict[str, int], late: int = 0) -> None:
    """Each unit gathered once in forward, used and freed; ``late`` ns later than the events' numbers say."""
    first = len(made.lines)
    for group, size in enumerate(names.values()):
        made.unshard(group, size, "forward")
        made.event("wait", group, bytes=size, **{"pass": "forward"})
        made.event("pre_forward", group, **{"pass": "forward"})
        made.event("reshard", group, bytes=size, **{"pass": "forward"})
        made.event("post_forward", group, **{"pass": "forward"})
    made.end_step(max(names.values()))
    for i in range(first, len(made.lines)):
        line = json.loads(made.lines[i])
        made.lines[i] = json.dumps({**line, "t0": line["t0"] + late, "t1": line["t1"] + late})


def pipeline(folder: Path) -> None:
    """Two stages on two ranks each, of two and three units, two steps; rank 3 issues 7 ns after rank 2."""
    for rank in range(4):
        names = STAGES[rank // 2]
        trace = made(rank, names, f"{rank // 2}:{rank // 2 * 2},{rank // 2 * 2 + 1}")
        for _ in range(2):
            step(trace, names, 7 if rank == 3 else 0)
        trace.end()
        trace.write(folder)


def test_each_stage_has_its_own_units(tmp_path: Path) -> None:
    pipeline(tmp_path)
    loaded = load(tmp_path)
    assert [report.stage.ranks for report in loaded.models] == [[0, 1], [2, 3]]
    assert [[row.name for row in report.rows] for report in loaded.models] == [list(names) for names in STAGES]
    # Two ranks, two steps, one gather of each unit: half of it is received.
    assert [[row.sums.wire_bytes for row in report.rows] for report in loaded.models] == [
        [4 * size // 2 for size in names.values()] for names in STAGES
    ]
    assert [report.peak.bytes for report in loaded.models] == [3000, 4000]
    for report, names in zip(loaded.models, STAGES, strict=True):
        assert report.steps == report.traffic.steps == 4
        assert report.traffic.wire_bytes == report.traffic.expected_wire_bytes == 4 * sum(names.values()) // 2
        assert report.traffic.differences == []
    assert [item["ranks"] for item in loaded.to_json()["models"]] == [[0, 1], [2, 3]]


def test_ranks_are_compared_with_those_of_their_stage(tmp_path: Path) -> None:
    pipeline(tmp_path)
    side = load(tmp_path).side_by_side
    # Two units on one stage and three on the other, twice.
    assert (side.compared, side.steps, side.different) == (10, 2, 0)
    assert [row.last for row in side.rows] == [0, 0, 0, 6]
    assert [row.behind_ns for row in side.rows] == [0, 0, 0, 7]
    assert sorted(item.unit for item in side.slowest) == ["head", "layers.2", "layers.3"]


def test_the_report_says_which_stage_is_where(tmp_path: Path) -> None:
    pipeline(tmp_path)
    text = CliRunner().invoke(app, ["report", str(tmp_path)]).output
    assert "units of Net on ranks 0-1 (layers.0 to layers.1): per step, mean of 4 steps over these ranks" in text
    assert "units of Net on ranks 2-3 (layers.2 to head): per step, mean of 4 steps over these ranks" in text
    assert (
        "- Net has other units on other ranks, as stages of a pipeline do, and has tables for each: "
        "ranks 0-1: layers.0 to layers.1 (2 units); ranks 2-3: layers.2 to head (3 units)"
    ) in text
    data = page_data(load(tmp_path))
    assert [table["title"] for table in data["tables"] if table["title"].startswith("Units")] == [
        "Units of Net on ranks 0-1 (layers.0 to layers.1)", "Units of Net on ranks 2-3 (layers.2 to head)",
    ]  # fmt: skip


def test_equal_stages_are_one_table_and_compared_apart(tmp_path: Path) -> None:
    """Stages whose units have the same names and sizes: the process groups tell them apart."""
    for rank in range(4):
        trace = made(rank, SIZES, f"{rank // 2}:{rank // 2 * 2},{rank // 2 * 2 + 1}")
        step(trace, SIZES, 1000 * (rank // 2) + rank % 2)
        trace.end()
        trace.write(tmp_path)
    loaded = load(tmp_path)
    assert [report.stage.ranks for report in loaded.models] == [[0, 1, 2, 3]]
    assert [row.behind_ns for row in loaded.side_by_side.rows] == [0, 1, 0, 1]
    assert not any("Net" in note for note in loaded.notes)


def test_replicas_of_one_model_are_compared_with_each_other(tmp_path: Path) -> None:
    for rank in range(4):
        trace = made(rank, SIZES)
        data = model(SIZES)
        for group in data["groups"]:
            group["shard_group"] = f"1:{rank // 2 * 2},{rank // 2 * 2 + 1}"
            group["replicate_group"] = f"2:{rank % 2},{rank % 2 + 2}"
        trace.lines[1] = json.dumps(data)
        step(trace, SIZES, rank)
        trace.end()
        trace.write(tmp_path)
    assert [row.behind_ns for row in load(tmp_path).side_by_side.rows] == [0, 1, 2, 3]


def test_a_rank_that_was_wrapped_in_another_way_is_named(tmp_path: Path) -> None:
    for rank in range(3):
        trace = made(rank, SIZES, world=3, **({"trainable": 0} if rank == 1 else {}))
        trace.step()
        trace.end()
        trace.write(tmp_path)
    loaded = load(tmp_path)
    assert [report.stage.ranks for report in loaded.models] == [[0, 2], [1]]
    assert (
        "Net is not the same on all ranks, and has tables for each: trainable of layers.0 is 0 on rank 1 and 1 on ranks 0, 2"
        in loaded.notes
    )


def test_shards_of_other_sizes_are_the_same_model(tmp_path: Path) -> None:
    for rank in range(2):
        trace = made(rank, SIZES, world=2, sharded_bytes=600 - 200 * rank)
        trace.step()
        trace.end()
        trace.write(tmp_path)
    assert [report.called(False) for report in load(tmp_path).models] == ["Net"]


def test_of_many_models_the_first_are_shown(tmp_path: Path) -> None:
    for rank in range(10):
        names = {f"layers.{rank}": 1000}
        trace = made(rank, names, world=10)
        step(trace, names)
        trace.end()
        trace.write(tmp_path)
    few = CliRunner().invoke(app, ["report", str(tmp_path)]).output
    assert few.count("units of Net on rank") == 8
    assert "(8 of 10 models and stages; --all shows each)" in few
    assert CliRunner().invoke(app, ["report", str(tmp_path), "--all"]).output.count("units of Net on rank") == 10


def test_an_ordinary_run_looks_as_before(tmp_path: Path) -> None:
    run(tmp_path, ranks=2, steps=2)
    text = CliRunner().invoke(app, ["report", str(tmp_path)]).output
    assert "\nunits of Net: per step, mean of 4 steps over all ranks\n" in text
    assert "on ranks" not in text


def test_tables_say_whose_rows_they_are(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    pipeline(tmp_path)
    with fsdptrace.load(tmp_path) as tables:
        assert tables.sql("SELECT ranks, count(*), sum(wire_bytes) FROM units GROUP BY ranks ORDER BY ranks").fetchall() == [
            ("0-1", 2, 8000), ("2-3", 3, 13000),
        ]  # fmt: skip
        assert tables.sql("SELECT DISTINCT ranks, wire_bytes FROM communication ORDER BY ranks").fetchall() == [
            ("0-1", 8000), ("2-3", 13000),
        ]  # fmt: skip
