"""A run as Parquet files, laid out so that Spark, Dask, Ray Data, ClickHouse and DuckDB read the same ones.

``OUT/events/run=…/step=…/rank=…/*.parquet`` has one row per event (columns as in ``fsdptrace.load(DIR).events``); the smaller
tables of the report lie beside it, ``OUT/units/run=…/units.parquet`` and so on. Several runs go into one ``OUT``.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import quote

from fsdptrace.analysis import tables, workers
from fsdptrace.analysis.sql import quoted

MEMORY = "1GB"  # for DuckDB's own buffers; what does not fit goes to disk


def write(
    folder: str | Path,
    out: str | Path,
    run: str | None = None,
    jobs: int | None = 1,
    progress: workers.Progress | None = None,
) -> Path:
    """Writes a run's tables; the folder of its events.

    Args:
        folder, run, jobs, progress: as for :func:`fsdptrace.load`.
        out: where to; made if it does not exist.

    Raises:
        ImportError: duckdb is not installed; the message says what to install.
        NotATrace: there is nothing to read.
        ValueError: this run is in ``out`` already.
        OSError: ``out`` cannot be written.
    """
    out = Path(out)
    with tables.load(folder, run, jobs, progress) as loaded:
        part = f"run={quote(loaded.run.label, safe='')}"
        events = out / "events" / part
        if events.exists():
            raise ValueError(f"{events}: this run is there already; remove it, or give another folder")
        out.mkdir(parents=True, exist_ok=True)
        loaded.connection.execute(f"SET memory_limit = '{MEMORY}'; SET threads = {workers.cores()}")
        try:
            sizes = [Path(file).stat().st_size for file in loaded.files]
            for i, file in enumerate(loaded.files):
                _events(loaded, file, out / "events")
                if progress is not None:
                    progress(sum(sizes[: i + 1]), sum(sizes))
            for name in tables.TABLES:
                if name != "events":
                    _table(loaded, name, out / name / part / f"{name}.parquet")
        except BaseException:  # half a run would be taken for a whole one
            for name in tables.TABLES:
                shutil.rmtree(out / name / part, ignore_errors=True)
            raise
        events.mkdir(parents=True, exist_ok=True)
        return events


def _events(loaded: tables.Tables, file: str, out: Path) -> None:
    """One file at a time, so that no more than one process's steps are open."""
    _execute(
        loaded,
        f"COPY ({loaded.events_of([file])}) TO '{quoted(str(out))}' "
        "(FORMAT parquet, COMPRESSION zstd, PARTITION_BY (run, step, rank), APPEND)",
    )


def _table(loaded: tables.Tables, name: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _execute(loaded, f"COPY (FROM {name}) TO '{quoted(str(path))}' (FORMAT parquet, COMPRESSION zstd)")


def _execute(loaded: tables.Tables, query: str) -> None:
    try:
        loaded.connection.execute(query)
    except RuntimeError as error:
        if "interrupted" in str(error).lower():  # what DuckDB makes of Ctrl-C
            raise KeyboardInterrupt from None
        raise
