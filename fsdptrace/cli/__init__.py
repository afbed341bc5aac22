"""The command ``fsdptrace``. Its extra, ``fsdptrace[cli]``, brings typer and rich; recording works without them."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the command; the exit status is 0, 1 (a violation was found, by ``check``) or 2 (unusable input)."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        missing = f"the command needs {error.name}, which is not installed"
        print(f"fsdptrace: {missing}: pip install 'fsdptrace[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    from fsdptrace.cli.app import run

    run()
