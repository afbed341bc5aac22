"""The subcommands: arguments in, exit status out. What they show is made in the modules beside this one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Optional

import typer

from fsdptrace._version import __version__
from fsdptrace.files import NotATrace

app = typer.Typer(
    name="fsdptrace", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=False,
    help="Reads what fsdptrace recorded of PyTorch FSDP2 (fully_shard), and says what went wrong, where and why.",
)  # fmt: skip

FOUND = 1
UNUSABLE = 2

Folder = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Argument(
        metavar="DIR", help="a run's folder, the out folder, or one file; else where recordings go", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print data instead of text")]
RunId = Annotated[Optional[str], typer.Option("--run", metavar="ID", help="which run of the folder; else the newest")]  # noqa: UP045


def default_folder() -> Path:
    """Where recordings go when nobody says otherwise."""
    return Path(os.environ.get("FSDPTRACE_OUT", "").strip() or "fsdptrace-out")


@contextmanager
def _clear() -> Iterator[None]:
    """Unusable input ends in one clear line on standard error and status 2."""
    from fsdptrace.cli.output import clean

    try:
        yield
    except (NotATrace, ValueError) as error:
        problem = str(error)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        problem = f"{error.filename or 'input'}: {error.strerror or error}"
    else:
        return
    print(f"fsdptrace: {clean(problem)}", file=sys.stderr)
    raise typer.Exit(UNUSABLE)


def _names(values: list[str] | None) -> list[str] | None:
    """Rule names given with repeated options or commas."""
    if values is None:
        return None
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
) -> None:
    if version:
        print(f"fsdptrace {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


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
    with _clear():
        from fsdptrace.analysis import load
        from fsdptrace.cli import report as view
        from fsdptrace.cli.output import Screen, clean, print_json
        from fsdptrace.cli.progress import bar

        with bar() as progress:
            loaded = load(folder or default_folder(), run, None, progress)
        if html is not None:
            from fsdptrace.html import write

            print(f"wrote {clean(write(loaded, html))}", file=sys.stderr if json else sys.stdout)
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
    with _clear():
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
    with _clear():
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
    with _clear():
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
    with _clear():
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
    with _clear():
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
    with _clear():
        from fsdptrace.cli.output import clean
        from fsdptrace.cli.progress import bar
        from fsdptrace_exporters.parquet import write

        try:
            with bar() as progress:
                print(f"wrote {clean(write(folder or default_folder(), out, run, None, progress))}")
        except ImportError as error:
            raise ValueError(f"parquet: {error}") from None


@app.command()
def inspect(
    target: Annotated[
        str, typer.Argument(metavar="SCRIPT:FUNCTION", help="a function without arguments that returns the wrapped model")
    ],
    world_size: Annotated[int, typer.Option("--world-size", metavar="N", min=1, help="ranks to pretend")] = 8,
    rank: Annotated[int, typer.Option("--rank", metavar="R", min=0, help="as which of them")] = 0,
    meta: Annotated[bool, typer.Option("--meta/--no-meta", help="build on the meta device: no memory, no values")] = True,
    every: Annotated[bool, typer.Option("--all", help="show every unit, however many")] = False,
    json: Json = False,
) -> None:
    """A wrap before it trains: units, bytes, the peak to expect, and what is wrong with it; exit status 1 with an error."""
    with _clear():
        from fsdptrace.cli import inspect as view
        from fsdptrace.cli.output import Screen, print_json

        found = view.build(target, world_size, rank, meta)
        if json:
            print_json([item.to_json() for item in found])
        for item in () if json else found:
            view.show(Screen(), item, world_size, rank, every)
    if any(violation.severity == "error" for item in found for violation in item.violations):
        raise typer.Exit(FOUND)


@app.command()
def postmortem(folder: Folder = None, json: Json = False, run: RunId = None) -> None:
    """Of a run that hangs or died: where each rank stood, who left the common order first, what was gathered."""
    with _clear():
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
def rules(
    rule: Annotated[Optional[str], typer.Argument(metavar="NAME", help="one rule, in full")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """The rules: what each means, an example, what to change, what it stays silent on."""
    with _clear():
        from fsdptrace.cli import rules as view
        from fsdptrace.cli.output import Screen, print_json

        chosen = view.choose(rule)
        if json:
            print_json([view.to_json(item) for item in chosen])
        elif rule is None:
            view.show_all(Screen(), chosen)
        else:
            view.show_one(Screen(), chosen[0])


@app.command()
def doctor(json: Json = False) -> None:
    """Whether recording works here: versions, PyTorch's names, the default folder; exit status 1 when it cannot."""
    with _clear():
        from fsdptrace.cli import doctor as view
        from fsdptrace.cli.output import Screen, print_json

        diagnosis = view.examine()
        if json:
            print_json(diagnosis.to_json())
        else:
            view.show(Screen(), diagnosis)
    if diagnosis.problems:
        raise typer.Exit(FOUND)


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
    with _clear():
        from fsdptrace_exporters.__main__ import export as run_export

        status = run_export(folder or default_folder(), to or [], follow, run, detail_ranks, remove, again, exit_after)
    sys.stdout.flush()
    os._exit(status)  # threads that wait for a back end are not waited for


@app.command()
def demo(
    leak: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option("--leak/--healthy", help="only the run with the fault, or only the healthy one; else both"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=100, help="training steps of each run")] = 3,
    layers: Annotated[int, typer.Option(min=2, max=64, help="blocks of the model")] = 6,
    out: Annotated[Optional[Path], typer.Option(metavar="DIR", help="folder for the files")] = None,  # noqa: UP045
) -> None:
    """Trains a nested mixture of experts in two processes under the recorder, with a fault and without, and shows both."""
    with _clear():
        from fsdptrace.cli import demo as view
        from fsdptrace.cli.output import Screen

        kinds = ("leak", "healthy") if leak is None else ("leak",) if leak else ("healthy",)
        as_expected = view.run(Screen(), kinds, steps, layers, out)
    if not as_expected:
        raise typer.Exit(FOUND)


@app.command(
    name="run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def run_command(
    context: typer.Context,
    out: Annotated[Optional[Path], typer.Option(metavar="DIR", help="folder for the files; else ./fsdptrace-out")] = None,  # noqa: UP045
    on_violation: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="raise|warn|record", help="what is done about a violation; or rule=action,*=action"),
    ] = None,
    export: Annotated[Optional[list[str]], typer.Option(metavar="NAME", help="exporters to start")] = None,  # noqa: UP045
    detail: Annotated[Optional[str], typer.Option(metavar="auto|full|summary", help="which events are written")] = None,  # noqa: UP045
) -> None:
    """Runs a command and records every Python process that it starts: `fsdptrace run -- torchrun train.py`.

    The exit status and the output are the command's own; one line at the end, on standard error, says what was seen.
    """
    from fsdptrace.cli import run as runner

    command = [argument for i, argument in enumerate(context.args) if i or argument != "--"]
    given = {"OUT": out, "ON_VIOLATION": on_violation, "EXPORT": ",".join(export or ()), "DETAIL": detail}
    environment = {f"FSDPTRACE_{name}": str(value) for name, value in given.items() if value}
    with _clear():
        if not command:
            raise ValueError("run: no command given; use `fsdptrace run -- python train.py`")
        from fsdptrace.options import check_environment

        check_environment(environment)
        code, seen = runner.run(command, environment)
    if seen is not None:
        print(seen.line(), file=sys.stderr)
    runner.end_like(code)


def run() -> None:
    """The command, as the console script calls it."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character gets an escape, not a traceback
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except BrokenPipeError:  # `fsdptrace report DIR | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(0) from None
