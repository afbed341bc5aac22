"""``fsdptrace.load``: a run as DuckDB tables, the same numbers as the report's, and the events behind them.

Event lines stay in their files: DuckDB reads them when a query asks, in parallel and without loading them all.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fsdptrace.analysis import sql, workers
from fsdptrace.analysis.notes import spans
from fsdptrace.analysis.ranks import RankRow, Slowest
from fsdptrace.analysis.run import ModelReport, Run
from fsdptrace.analysis.run import load as load_run
from fsdptrace.analysis.steplines import StepLine
from fsdptrace.analysis.traffic import TrafficRow
from fsdptrace.summary import GroupSummary, Prefetches

if TYPE_CHECKING:
    import duckdb

LARGEST_LINE = 64 << 20  # bytes: a model line of some hundred thousand parameters
NEEDED = "this needs duckdb, which is not installed: pip install 'fsdptrace[analysis]'; `fsdptrace report` works without it"

_INT, _TEXT, _FLOAT, _BOOL = "BIGINT", "VARCHAR", "DOUBLE", "BOOLEAN"


class Tables:
    """A run as DuckDB relations. Each attribute is one: ``.df()`` (pandas), ``.pl()`` (polars), ``.arrow()``, ``.fetchall()``,
    ``.filter("...")``; :meth:`sql` takes any query over them by name. Times are ns, sizes bytes. Close it, or use it as a
    context manager; what was fetched stays.

    Attributes:
        run: what ``fsdptrace.analysis.load`` gives, the source of every table but ``events``; ``files`` are those read.
        events: one row per event; a killed process's ``.tail`` is not among them.
        units: per unit, sums over steps and ranks, as the report's table; divide by ``rank_steps`` for means. ``ranks``
            (``0-3``) says whose model it is, here and in the others by model: stages of a pipeline have rows of their own.
        peak: the units that held the most bytes at one time.
        steps: one row per finished step, rank and model, from the step lines.
        communication: by collective, mesh and dtype, beside the closed form.
        prefetches: by model, direction and mode.
        ranks: one row per rank; ``collectives`` how far its last rank was behind the first, per collective and unit.
        findings: what was found, put together by rule and name pattern; ``violations`` each of them.
        models: one row per unit of the model: bytes, dtypes, mesh, policy.
        notes: what a reader must know before believing the rest.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.connection = _duckdb().connect()
        self._sources()
        self._small_tables()

    def __enter__(self) -> Tables:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __getattr__(self, name: str) -> duckdb.DuckDBPyRelation:
        if name.startswith("_") or name not in TABLES:
            raise AttributeError(f"no table {name!r}; there are {', '.join(TABLES)}")
        found: duckdb.DuckDBPyRelation = (self.connection.view if name in _VIEWS else self.connection.table)(name)
        return found

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *TABLES]

    def sql(self, query: str) -> duckdb.DuckDBPyRelation:
        """A query over the tables by their names: ``tables.sql("SELECT unit, max(duration_ns) FROM events GROUP BY unit")``."""
        found: duckdb.DuckDBPyRelation = self.connection.sql(query)
        return found

    def events_of(self, files: Sequence[str]) -> str:
        """The query behind ``events``, over some of :attr:`files` only."""
        return sql.events_of(sql.lines_of(files, LARGEST_LINE))

    def close(self) -> None:
        """Closes the connection."""
        self.connection.close()

    # -- inside --------------------------------------------------------------------------------------------------------
    def _sources(self) -> None:
        files: list[dict[str, Any]] = []
        groups: list[dict[str, Any]] = []
        units: list[dict[str, Any]] = []
        for process in self.run.processes:
            header = process.header
            for part in process.source.parts:
                if not _is_text(str(part)):
                    raise ValueError(f"{part}: DuckDB opens no file whose path is not UTF-8; rename it, or lead a link to it")
                at = {"file": str(part)}
                clock = header.unix_ns - header.perf_counter_ns
                files.append({**at, "run": self.run.label, "rank": header.rank, "role": header.role, "clock": clock})
                for number, model in process.models.items():
                    groups += [
                        {**at, "model": number, "id": g.id, "fqn": g.fqn, "world": g.world, "dtype": g.dtype}
                        for g in model.groups
                    ]
                    units += [{**at, "model": number, "id": unit.id, "fqn": unit.fqn} for unit in model.units]
        self._table("sources", {"file": _TEXT, "run": _TEXT, "rank": _INT, "role": _TEXT, "clock": _INT}, files)
        columns = {"file": _TEXT, "model": _INT, "id": _INT, "fqn": _TEXT}
        self._table("groups", {**columns, "world": _INT, "dtype": _TEXT}, groups)
        self._table("units_of", columns, units)
        self.files = [str(item["file"]) for item in files]
        self.connection.execute(f"CREATE VIEW events AS {self.events_of(self.files)}")
        self.connection.execute(
            "CREATE VIEW violations AS SELECT run, rank, step, seq, model, unit, rule, severity, bytes, message, hint "
            "FROM events WHERE kind = 'violation'"
        )

    def _small_tables(self) -> None:
        for name, (columns, rows) in _rows(self.run).items():
            self._table(name, columns, rows)

    def _table(self, name: str, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> None:
        """A table of rows, through a file: DuckDB reads a million of them in a second, where inserts take minutes."""
        types = ", ".join(f"'{column}': '{kind}'" for column, kind in columns.items())
        with tempfile.NamedTemporaryFile(suffix=".jsonl", prefix="fsdptrace-") as out:
            for row in rows:  # what is no character in a name (half a surrogate pair) would be no JSON for DuckDB
                out.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            out.flush()
            self.connection.execute(
                f"CREATE TABLE {name} AS SELECT * FROM read_json('{sql.quoted(out.name)}', format='newline_delimited', "
                f"columns={{{types}}}, maximum_object_size={LARGEST_LINE})"
            )


def _is_text(path: str) -> bool:
    """Whether a path is UTF-8; bytes that are not are half surrogate pairs in Python."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError:
        raise ImportError(NEEDED) from None
    return duckdb


_Table = tuple[dict[str, str], Iterable[Mapping[str, Any]]]


def _rows(run: Run) -> dict[str, _Table]:
    """The small tables: columns and rows."""
    at: dict[str, str] = {"model": _INT, "root": _TEXT, "ranks": _TEXT}
    return {
        "units": ({**at, "rank_steps": _INT, "unit": _TEXT, **_UNIT}, _units(run)),
        "peak": ({**at, "rank": _INT, "step": _INT, "seq": _INT, "unit": _TEXT, "bytes": _INT}, _peak(run)),
        "steps": ({"rank": _INT, **_STEP}, ({"rank": rank, **line.to_json()} for rank, line in run.step_lines())),
        "communication": ({**at, "rank_steps": _INT, **_TRAFFIC}, (
            {**_at(m), "rank_steps": m.traffic.steps, **asdict(row)}
            for m in run.models for row in m.traffic.rows
        )),
        "prefetches": ({**at, "rank_steps": _INT, "direction": _TEXT, "mode": _TEXT, **_PREFETCH}, (
            {**_at(m), "rank_steps": m.steps, "direction": key[0], "mode": key[1], **asdict(entry)}
            for m in run.models for key, entry in m.prefetches.items()
        )),
        "ranks": (_RANK, (asdict(row) for row in run.side_by_side.rows)),
        "collectives": (_SLOWEST, (asdict(row) for row in run.side_by_side.slowest)),
        "findings": (_FINDING, (_finding(item) for item in run.findings)),
        "models": ({**at, **_MODEL}, _models(run)),
        "notes": ({"kind": _TEXT, "text": _TEXT}, [
            {"kind": kind, "text": str(text)}
            for kind, lines in (("note", run.notes), ("coverage", run.coverage), ("problem", run.problems)) for text in lines
        ]),
    }  # fmt: skip


_KINDS = {"int": _INT, "float": _FLOAT, "str": _TEXT, "bool": _BOOL}


def _columns(of: type, *without: str) -> dict[str, str]:
    """The fields of a dataclass as columns."""
    return {item.name: _KINDS[str(item.type)] for item in fields(of) if item.name not in without}


_SUMS = _columns(GroupSummary, "group", "fqn", "bytes")
_UNIT = {"bytes_low": _INT, "bytes_high": _INT, **_SUMS}
_STEP = _columns(StepLine)
_TRAFFIC = _columns(TrafficRow)
_PREFETCH = _columns(Prefetches)
_RANK = _columns(RankRow)
_SLOWEST = _columns(Slowest)
_FINDING = {
    "rule": _TEXT, "severity": _TEXT, "pattern": _TEXT, "model": _INT, "root": _TEXT, "times": _INT, "unit_count": _INT,
    "step_count": _INT, "ranks": "BIGINT[]", "bytes": _INT, "step_bytes": _INT, "rank": _INT, "step": _INT, "seq": _INT,
    "message": _TEXT, "hint": _TEXT,
}  # fmt: skip
_MODEL = {
    "unit": _TEXT, "tensors": _INT, "trainable": _INT, "bytes": _INT, "sharded_bytes": _INT, "dtype": _TEXT,
    "reduce_dtype": _TEXT, "world": _INT, "post_forward_world": _INT, "replicate_world": _INT, "mesh": _TEXT,
    "reshard_after_forward": _TEXT, "offload": _BOOL,
}  # fmt: skip
_VIEWS = ("events", "violations")
TABLES = (
    "events", "units", "peak", "steps", "communication", "prefetches", "ranks", "collectives", "findings", "violations",
    "models", "notes",
)  # fmt: skip


def _at(model: ModelReport) -> dict[str, Any]:
    return {"model": model.model, "root": model.root, "ranks": spans(model.stage.ranks, len(model.stage.ranks))}


def _units(run: Run) -> Iterable[dict[str, Any]]:
    for model in run.models:
        for row in model.rows:
            yield {
                **_at(model), "rank_steps": row.steps, "unit": row.name, "bytes_low": row.bytes_low,
                "bytes_high": row.bytes_high, **{name: getattr(row.sums, name) for name in _SUMS},
            }  # fmt: skip


def _peak(run: Run) -> Iterable[dict[str, Any]]:
    for model in run.models:
        peak = model.peak
        for unit, size in peak.units:
            yield {
                **_at(model), "rank": peak.rank, "step": peak.step, "seq": peak.seq, "unit": unit,
                "bytes": size,
            }  # fmt: skip


def _finding(item: Any) -> dict[str, Any]:
    data = {name: getattr(item, name) for name in _FINDING if hasattr(item, name)}
    first = item.first
    return {
        **data, "rank": first.rank, "step": first.step, "seq": first.seq, "message": first.message, "hint": first.hint,
    }  # fmt: skip


def _models(run: Run) -> Iterable[dict[str, Any]]:
    for model in run.models:
        for group in model.map.groups:
            data = {name: getattr(group, name) for name in _MODEL if name != "unit"}
            mesh, keeps = json.dumps(dict(group.mesh)), str(group.reshard_after_forward)
            own = {"unit": group.fqn, "mesh": mesh, "reshard_after_forward": keeps}
            yield {**_at(model), **data, **own}


def load(folder: str | Path, run: str | None = None, jobs: int | None = 1, progress: workers.Progress | None = None) -> Tables:
    """A run as DuckDB tables.

    Args:
        folder: a run's folder, the out folder (the newest run in it, or the one named ``run``), or one file.
        run: which run of the folder.
        jobs, progress: as for :func:`fsdptrace.analysis.workers.each`.

    Raises:
        ImportError: duckdb is not installed; the message says what to install.
        NotATrace: there is nothing to read, or no run of that name.
        ValueError: the path of a file is not UTF-8.

    Example:
        >>> with fsdptrace.load("fsdptrace-out") as tables:
        ...     frame = tables.sql("SELECT unit, sum(wire_bytes) FROM events GROUP BY unit").df()
    """
    _duckdb()
    return Tables(load_run(folder, run, jobs, progress))
