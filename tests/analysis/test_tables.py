"""`fsdptrace.load`: the report's numbers as DuckDB tables, and the events behind them; the same as Parquet."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

import fsdptrace
from fsdptrace import events as ev
from fsdptrace.analysis.tables import TABLES
from fsdptrace.cli.app import app
from fsdptrace.files import read_file
from fsdptrace_exporters.parquet import _execute, write
from support.made import Made, run

duckdb = pytest.importorskip("duckdb")


def test_events_with_what_lines_leave_out(tmp_path: Path) -> None:
    """The prefetch at event 11: world, dtype and issuer by name, bytes on the wire, times by the header's clock."""
    run(tmp_path, ranks=2, steps=2, clock={"perf_counter_ns": 100, "unix_ns": 5_000})
    with fsdptrace.load(tmp_path) as tables:
        columns = "rank, step, kind, pass, unit, bytes, world, dtype, wire_bytes, issuer, direction, mode, duration_ns, unix_ns"
        row = tables.sql(f"SELECT {columns} FROM events WHERE seq = 11 ORDER BY rank").fetchall()[1]
        assert row == (
            1, 0, "unshard", "backward", "layers.0", 1000, 2, "float32", 500, "layers.1", "backward", "implicit", 5,
            110 + 4_900,
        )  # fmt: skip
        hook = tables.sql('SELECT "before", "after", input_grad FROM events WHERE seq = 3 AND rank = 0').fetchall()[0]
        assert hook == ("idle", "forward", "hooked")
        assert tables.sql("SELECT count(*) FROM events").fetchall()[0] == (72,)
        assert tables.sql("SELECT sum(wire_bytes) FROM events").fetchall()[0] == (4 * 4500,)
        assert tables.events.filter("kind = 'step'").count("*").fetchall()[0] == (4,)


def test_numbers_are_numbers() -> None:
    from fsdptrace.analysis.sql import raw_columns

    columns = raw_columns()
    for spec in ev.SPECS.values():
        for field in spec.fields:
            if field.codec in ("int", "bytes", "ns", "count"):
                assert columns[field.name] == "BIGINT", field.name


def test_the_tables_are_those_of_the_report(tmp_path: Path) -> None:
    run(tmp_path, ranks=2, steps=3)
    with fsdptrace.load(tmp_path) as tables:
        for name in TABLES:
            assert getattr(tables, name).fetchall() is not None
            assert name in dir(tables)
        assert tables.sql("SELECT unit, rank_steps, gathered_bytes, wire_bytes, lifetime_ns FROM units").fetchall() == [
            ("layers.0", 6, 12_000, 6_000, 540), ("layers.1", 6, 18_000, 9_000, 420),
        ]  # fmt: skip
        assert tables.sql("SELECT unit, bytes FROM peak").fetchall() == [("layers.1", 3000), ("layers.0", 1000)]
        assert tables.sql("SELECT count(*), sum(events), max(unsharded_peak), bool_and(\"full\") FROM steps").fetchall()[0] == (
            6, 108, 4000, True,
        )  # fmt: skip
        assert tables.sql("SELECT collective, calls, expected_calls, wire_bytes FROM communication").fetchall() == [
            ("all-gather", 18, 24, 15_000), ("reduce-scatter", 12, 12, 12_000),
        ]  # fmt: skip
        assert tables.sql("SELECT mode, issued, late, distance_ns FROM prefetches").fetchall() == [("implicit", 6, 6, 180)]
        assert tables.sql("SELECT rank, steps, events FROM ranks").fetchall() == [(0, 3, 54), (1, 3, 54)]
        assert tables.sql("SELECT unit, bytes, mesh FROM models").fetchall()[1] == ("layers.1", 3000, '{"0": 2}')
        with pytest.raises(AttributeError, match="no table 'unit'; there are events, units, "):
            _ = tables.unit


def test_findings_and_notes(tmp_path: Path) -> None:
    made = Made(0, 2)
    made.step()
    made.violation("unused-gather", "layers.1", group=1, severity="warning", bytes=3000, message='it\'s "quoted"')
    made.end_step(0)
    made.write(tmp_path)
    with fsdptrace.load(tmp_path) as tables:
        finding = tables.sql("SELECT rule, severity, pattern, times, ranks, step, bytes, message FROM findings").fetchall()[0]
        assert finding == ("unused-gather", "warning", "layers.*", 1, [0], 1, 3000, 'it\'s "quoted"')
        assert tables.sql("SELECT rank, step, unit, rule, bytes FROM violations").fetchall() == [
            (0, 1, "layers.1", "unused-gather", 3000)
        ]
        notes = dict(tables.notes.fetchall())
        assert "no file of rank 1" in notes["note"] or "no end line" in notes["note"]


def test_damaged_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    made = Made(0, 1, names={"it's": 1000, "layers.1": 3000})
    made.step()
    made.end()
    made.lines[5] = "@@@@"
    made.lines[6] = '{"seq":"x","kind":"wait","group":0,"t0":1,"t1":2,"step":0,"bytes":1}'
    made.lines[7] = '{"seq":6,"kind":"wait","group":77,"t0":1,"t1":2,"step":0,"bytes":1}'
    made.lines[8] = '{"kind":"aurora","seq":1,"t0":1,"t1":1,"step":0}'
    path = made.write(tmp_path / "a 'folder'")
    path.write_text(path.read_text() + '{"seq":20,"kind":"wai')
    with fsdptrace.load(path) as tables:
        assert tables.sql("SELECT count(*) FROM events").fetchall()[0] == (18 - 4,)
        assert tables.sql("SELECT count(*) FROM events WHERE unit = 'it''s'").fetchall()[0] == (10 - 2,)


def test_names_and_paths_that_are_no_text(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are half surrogate pairs in Python, and no JSON for DuckDB."""
    made = Made(0, 1, names={"a\udce9": 1000, "b": 3000})
    made.step()
    made.end()
    made.write(tmp_path / "good")
    with fsdptrace.load(tmp_path / "good") as tables:
        query = "SELECT unit, count(*) FROM events WHERE unit IS NOT NULL GROUP BY unit ORDER BY unit"
        assert tables.sql(query).fetchall() == [("a?", 10), ("b", 7)]
    bad = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    shutil.move(tmp_path / "good", bad)
    with pytest.raises(ValueError, match="DuckDB opens no file whose path is not UTF-8"):
        fsdptrace.load(bad)
    with pytest.raises(ValueError, match="no file whose path is not UTF-8"):
        write(bad, tmp_path / "out")


def test_every_event_of_a_real_run(
    fake_pg: Callable[..., Any], record: Callable[..., fsdptrace.Recording], tmp_path: Path
) -> None:
    """Field by field what the Python reader says."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    mesh = fake_pg(2)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, detail="full", checks=None) as recording:
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    recording.close()
    trace = read_file(recording.path)
    names = trace.models[0]
    with fsdptrace.load(recording.path) as tables:
        relation = tables.sql("SELECT * FROM events ORDER BY seq")
        rows = {
            row[relation.columns.index("seq")]: dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()
        }
    assert len(rows) == len(trace.events) > 40
    for event in trace.events:
        row = rows[event.seq]
        assert (row["kind"], row["t0"], row["t1"], row["pass"]) == (event.kind, event.t0, event.t1, event.pass_)
        unit = None if event.group is None else names.groups[event.group].fqn
        for spec in ev.SPECS[ev.KIND_NUMBER[event.kind]].fields:
            value = event.get(spec.name)
            if spec.codec == "group" and value is not None:
                value = names.groups[value].fqn
            elif spec.codec == "unit" and value is not None:
                value = names.units[value].fqn
            if spec.codec == "how" or spec.name == "counts" or (spec.codec == "derived" and spec.name == "tensors"):
                continue
            got = row[spec.name]
            assert got == value or (isinstance(value, bool) and got == str(value).lower()), (event, spec.name)
        assert row["unit"] == unit or event.group is None


def test_the_program_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "fsdptrace-out", ranks=1, steps=2, world=1)
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "reading.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    # Unshards of two steps: layers.0 twice a step, layers.1 once; each takes 5 ns.
    assert sorted(names["slow"]) == [("layers.0", 4, 5), ("layers.1", 2, 5)]
    assert "layers.1" in capsys.readouterr().out


def test_where_duckdb_is_missing(tmp_path: Path) -> None:
    run(tmp_path)
    start = "import sys; sys.modules['duckdb'] = None; "
    for code in (
        "import fsdptrace; fsdptrace.load({!r})",
        "from fsdptrace.cli import main; sys.argv = ['f', 'parquet', {!r}]; main()",
    ):
        done = subprocess.run(
            [sys.executable, "-c", start + code.format(str(tmp_path))],
            capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode != 0
        assert (
            done.stderr.strip()
            .splitlines()[-1]
            .endswith("pip install 'fsdptrace[analysis]'; `fsdptrace report` works without it")
        )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


# -- Parquet -----------------------------------------------------------------------------------------------------------
def test_parquet_by_run_step_and_rank(tmp_path: Path) -> None:
    run(tmp_path / "in", ranks=2, steps=2, run_id="one")
    out = tmp_path / "out's"
    result = CliRunner().invoke(app, ["parquet", str(tmp_path / "in"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == f"wrote {out / 'events' / 'run=one'}"
    parts = {tuple(path.relative_to(out / "events").parts[:-1]) for path in (out / "events").rglob("*.parquet")}
    assert parts == {("run=one", f"step={step}", f"rank={rank}") for step in range(2) for rank in range(2)}
    again = CliRunner().invoke(app, ["parquet", str(tmp_path / "in"), "--out", str(out)])
    assert (again.exit_code, "this run is there already" in again.output) == (2, True)
    run(tmp_path / "in", ranks=1, steps=1, run_id="two", attempt=3)
    assert write(tmp_path / "in", out, "two:3").name == "run=two%3A3"  # a second run in the same place
    connection = duckdb.connect()
    source = f"read_parquet('{str(out).replace(chr(39), chr(39) * 2)}/events/**/*.parquet', hive_partitioning = true)"
    assert connection.sql(f"SELECT run, count(*), sum(wire_bytes) FROM {source} GROUP BY run ORDER BY run").fetchall() == [
        ("one", 72, 4 * 4500), ("two:3", 18, 4500),
    ]  # fmt: skip
    units = connection.sql(f"FROM '{str(out).replace(chr(39), chr(39) * 2)}/units/run=one/units.parquet'").fetchall()
    assert [row[4] for row in units] == ["layers.0", "layers.1"]


def test_a_run_that_cannot_be_written_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "in")

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fsdptrace_exporters.parquet._table", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "in", tmp_path / "out")
    assert list((tmp_path / "out").rglob("*.parquet")) == []


def test_dask_reads_the_same_files(tmp_path: Path) -> None:
    """As docs/reading.md shows it; in `nox -s tests_engines`, which installs dask."""
    pytest.importorskip("dask.dataframe")
    run(tmp_path / "in", ranks=2, steps=2)
    page = (Path(__file__).parents[2] / "docs" / "reading.md").read_text()
    code = page.split("<!-- dask -->")[1].split("```python\n")[1].split("```")[0]
    write(tmp_path / "in", tmp_path / "fsdptrace-parquet")
    done = subprocess.run(
        [sys.executable, "-c", code + "\nprint(received.to_json(orient='split'))"],
        capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path,
    )  # fmt: skip
    data = json.loads(done.stdout.splitlines()[-1])
    # Each of 2 ranks in each of 2 steps: 500 B per gather (two) and reduction of layers.0; 1,500 B each (one) for layers.1.
    assert dict(zip(data["index"], data["data"], strict=True)) == {"layers.0": 4 * 1500, "layers.1": 4 * 3000}


def test_relations_as_frames(tmp_path: Path) -> None:
    run(tmp_path, ranks=1, steps=1, world=1)
    with fsdptrace.load(tmp_path) as tables:
        pytest.importorskip("pandas")
        frame = tables.units.df()
        assert list(frame["unit"]) == ["layers.0", "layers.1"]
        pytest.importorskip("pyarrow")
        assert tables.units.arrow().read_all().num_rows == 2
        pytest.importorskip("polars")
        assert tables.units.pl()["gathered_bytes"].to_list() == [2000, 3000]


def test_ctrl_c_while_duckdb_works_is_ctrl_c() -> None:
    class Connection:
        def execute(self, query: str) -> None:
            raise RuntimeError(query)

    loaded: Any = SimpleNamespace(connection=Connection())
    with pytest.raises(KeyboardInterrupt):
        _execute(loaded, "Query interrupted")
    with pytest.raises(RuntimeError, match="another"):
        _execute(loaded, "another")
