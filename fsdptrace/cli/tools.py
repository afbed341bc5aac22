"""The subcommands that need no files: they run a program, look at a wrap or at this machine, or tell what there is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from fsdptrace.cli.frame import FOUND, Json, app, clear


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
    with clear():
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
def rules(
    rule: Annotated[Optional[str], typer.Argument(metavar="NAME", help="one rule, in full")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """The rules: what each means, an example, what to change, what it stays silent on."""
    with clear():
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
    with clear():
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
    as_expected = False
    with clear():
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
    with clear():
        if not command:
            raise ValueError("run: no command given; use `fsdptrace run -- python train.py`")
        from fsdptrace.options import check_environment

        check_environment(environment)
        code, seen = runner.run(command, environment)
    if seen is not None:
        print(seen.line(), file=sys.stderr)
    runner.end_like(code)
