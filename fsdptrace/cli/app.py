"""The command as a whole: the application with all of its subcommands, and how the console script calls it."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from fsdptrace._version import __version__
from fsdptrace.cli import reading, tools  # noqa: F401  (they register themselves, and are shown in this order)
from fsdptrace.cli.frame import app

__all__ = ["app", "run"]


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


def run() -> None:
    """The command, as the console script calls it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started the command: `fsdptrace check DIR >&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character gets an escape, not a traceback
            stream.reconfigure(errors="backslashreplace")
    app()
