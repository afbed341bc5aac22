"""What every subcommand shares: the application, arguments that several take, and how unusable input ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Optional

import typer

from fsdptrace.files import NotATrace
from fsdptrace.replacing import FULL

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
def clear() -> Iterator[None]:
    """Unusable input ends in one clear line on standard error and status 2. Where nobody reads on (`| head`), the rest is not
    printed, and the status is what it would have been."""
    from fsdptrace.cli.output import clean

    try:
        yield
        sys.stdout.flush()
        return
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return
    except (NotATrace, ValueError) as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename or ('output' if error.errno in FULL else 'input')}: {error.strerror or error}"
    print(f"fsdptrace: {clean(problem)}", file=sys.stderr)
    raise typer.Exit(UNUSABLE)
