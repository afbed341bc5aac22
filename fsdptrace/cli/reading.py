"""The subcommands that read the files of a run: arguments in, exit status out. What they show is made in the modules beside
this one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from fsdptrace.cli.frame import FOUND, UNUSABLE, Folder, Json, RunId, app, clear, default_folder


def _names(values: list[str] | None) -> list[str] | None:
    """Rule names given with repeated options or commas."""
    if values is None:
        return None
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


@app.command()
def report(
    folder: Folder = None,
    json: Json = False,
    run: RunId = None,
    steps: Annotated[bool, typer.Option("--steps", help="add a table of steps")] = False,
    every: Annotated[bool, typer.Option("--all", help="show every unit and step, however many")] = False,
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--html", metavar="FILE", help="write one self-contained page: timeline, charts, tables"),
    ] = None,
) -> None:
    """What was found, then what every unit did, the memory, and what it is based on."""
    with clear():
        from fsdptrace.analysis import load
        from fsdptrace.cli import report as view
        from fsdptrace.cli.output import Screen, clean, print_json
        from fsdptrace.cli.progress import bar

        with bar() as progress:
            loaded = load(folder or default_folder(), run, None, progress)
        if html is not None:
            from fsdptrace.html import write

            with bar("drawing") as progress:
                write(loaded, html, progress=progress)
            print(f"wrote {clean(html)}", file=sys.stderr if json else sys.stdout)
        elif not json:
            view.show(Screen(), loaded, every, steps)
        if json:
            print_json(loaded.to_json(steps))


@app.command()
def check(
    folder: Folder = None,
    json: Json = False,
    run: RunId = None,
    select: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--select", metavar="RULES", help="rules to run (comma or repeated; `all`); else those that ran"),
    ] = None,
    ignore: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--ignore", metavar="RULES", help="rules to leave out"),
    ] = None,
    baseline: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--baseline", metavar="FILE", help="what `check --json` printed: findings in it are known and pass"),
    ] = None,
    incomplete: Annotated[
        bool, typer.Option("--allow-incomplete", help="pass although ranks, ends of files or lines are missing")
    ] = False,
) -> None:
    """Runs the rules over the files.

    Exit status 1 when a violation of severity error is found, 2 when none is but files, or parts of them, are missing.
    """
    with clear():
        from fsdptrace.analysis import check as run_check
        from fsdptrace.cli import check as view
        from fsdptrace.cli.output import Screen, print_json
        from fsdptrace.cli.progress import bar

        with bar() as progress:
            result = run_check(folder or default_folder(), run, _names(select), _names(ignore) or (), baseline, None, progress)
        if json:
            print_json(result.to_json())
        else:
            view.show(Screen(), result)
    if result.failed:
        raise typer.Exit(FOUND)
    if result.missing and not incomplete:
        raise typer.Exit(UNUSABLE)


@app.command()
def top(
    folder: Folder = None,
    json: Json = False,
    run: RunId = None,
    every: Annotated[float, typer.Option("--every", min=0.2, metavar="SECONDS", help="between two looks")] = 1.0,
) -> None:
    """A run while it goes on: step, gathered bytes, open units, findings and what it is at, by rank. Ctrl-C ends it."""
    with clear():
        from fsdptrace.analysis.live import RunWatch
        from fsdptrace.cli import top as view
        from fsdptrace.cli.output import print_json

        watch = RunWatch(folder or default_folder(), run)
        if json:
            print_json(view.to_json(watch.look()))
        else:
            view.follow(watch, every)


Profiles = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Option("--with", metavar="PROFILE", help="a trace that torch.profiler wrote of a rank of this run; repeatable"),
]
Ranks = Annotated[Optional[str], typer.Option("--ranks", metavar="LIST", help="which ranks: 0-7,12; else all")]  # noqa: UP045
Steps = Annotated[Optional[str], typer.Option("--steps", metavar="LIST", help="which steps: 0-7,12; else all")]  # noqa: UP045


@app.command()
def merge(
    folder: Folder = None,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE", help="ends in .pftrace (Perfetto's), .json.gz or .json (Chrome's)")
    ] = Path("trace.pftrace"),
    json: Json = False,
    run: RunId = None,
    profiles: Profiles = None,
    ranks: Ranks = None,
    steps: Steps = None,
) -> None:
    """Writes one Perfetto trace of all ranks: units, calls, collectives, prefetches, gathered bytes, violations."""
    with clear():
        from fsdptrace.cli import merge as view
        from fsdptrace.cli.output import Screen, print_json

        merged = view.write(folder or default_folder(), out, run, profiles or (), ranks, steps)
        if json:
            print_json(view.to_json(merged))
        else:
            view.show(Screen(), merged)


@app.command()
def view(
    folder: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(metavar="DIR", help="a run's folder, the out folder, one file, or a merged trace"),
    ] = None,
    run: RunId = None,
    profiles: Profiles = None,
    ranks: Ranks = None,
    steps: Steps = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="else a free one")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="open the page in a browser")] = True,
) -> None:
    """Shows the run in the Perfetto UI, served to this machine only; needs no network."""
    with clear():
        from fsdptrace.cli import merge as merging
        from fsdptrace.cli.output import Screen

        merging.view(Screen(), folder or default_folder(), run, profiles or (), ranks, steps, port, browser)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="one run: its folder, an out folder, or a file")],
    b: Annotated[Path, typer.Argument(metavar="B", help="the other one")],
    json: Json = False,
    run_a: Annotated[Optional[str], typer.Option("--run-a", metavar="ID", help="which run of A; else the newest")] = None,  # noqa: UP045
    run_b: Annotated[Optional[str], typer.Option("--run-b", metavar="ID", help="which run of B; else the newest")] = None,  # noqa: UP045
    every: Annotated[bool, typer.Option("--all", help="show every unit that differs")] = False,
) -> None:
    """What differs between two runs, times apart: model, findings, counts, bytes, memory, and where sequences part.

    Exit status 0 when nothing does, 1 when something does.
    """
    with clear():
        from fsdptrace.analysis.diff import diff as compare
        from fsdptrace.cli import diff as view
        from fsdptrace.cli.output import Screen, print_json
        from fsdptrace.cli.progress import bar

        with bar() as progress:
            result = compare(a, b, run_a, run_b, None, progress)
        if json:
            print_json(result.to_json())
        else:
            view.show(Screen(), result, every)
    if not result.same:
        raise typer.Exit(FOUND)


@app.command()
def parquet(
    folder: Folder = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="folder for the tables")] = Path("fsdptrace-parquet"),
    run: RunId = None,
) -> None:
    """Writes a run as Parquet, partitioned by run, step and rank, for Spark, Dask, Ray, ClickHouse or DuckDB."""
    with clear():
        from fsdptrace.cli.output import clean
        from fsdptrace.cli.progress import bar
        from fsdptrace_exporters.parquet import write

        try:
            with bar() as progress:
                print(f"wrote {clean(write(folder or default_folder(), out, run, None, progress))}")
        except ImportError as error:
            raise ValueError(f"parquet: {error}") from None


@app.command()
def postmortem(folder: Folder = None, json: Json = False, run: RunId = None) -> None:
    """Of a run that hangs or died: where each rank stood, who left the common order first, what was gathered."""
    with clear():
        from fsdptrace.analysis.postmortem import postmortem as read
        from fsdptrace.cli import postmortem as view
        from fsdptrace.cli.output import Screen, print_json
        from fsdptrace.cli.progress import bar

        with bar() as progress:
            dead = read(folder or default_folder(), run, None, progress)
        if json:
            print_json(dead.to_json())
        else:
            view.show(Screen(), dead)


@app.command()
def export(
    folder: Folder = None,
    to: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--to", metavar="NAME[:ARGUMENT]", help="otlp, prometheus[:HOST:PORT] or otlp-json:FILE; repeat for several"
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="go on while the files grow, until interrupted")] = False,
    run: RunId = None,
    detail_ranks: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="RANKS", help="ranks whose units are shown: 0,8, all or none; those with a violation always are"),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="send what was delivered before, too")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="remove files once they are delivered")] = False,
    exit_after: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(metavar="SECONDS", help="with --follow: stop so long after the last process ended"),
    ] = None,
) -> None:
    """Sends a run to OpenTelemetry or Prometheus, once or while it grows; where to, the OTEL_* variables say."""
    status = UNUSABLE
    with clear():
        from fsdptrace_exporters.__main__ import export as run_export

        status = run_export(folder or default_folder(), to or [], follow, run, detail_ranks, remove, again, exit_after)
    sys.stdout.flush()
    os._exit(status)  # threads that wait for a back end are not waited for
