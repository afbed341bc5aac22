"""``fsdptrace merge`` and ``fsdptrace view``: one Perfetto trace of all ranks, written or shown."""

from __future__ import annotations

import re
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptrace.analysis import load
from fsdptrace.checks.text import count
from fsdptrace.cli.output import Screen, clean
from fsdptrace.cli.progress import bar

if TYPE_CHECKING:
    from fsdptrace_exporters.perfetto import Merged

SCHEMA = "fsdptrace-merge/1"
TRACES = (".pftrace", ".json", ".json.gz", ".perfetto-trace")


def numbers(text: str | None, option: str) -> Callable[[int], bool] | None:
    """``0-7,12`` as a test of a number; None for all.

    Raises:
        ValueError: it is no list of numbers and ranges.
    """
    if text is None:
        return None
    ranges = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None:
            raise ValueError(f"{option}: {text!r} is no list of numbers and ranges such as 0-7,12")
        ranges.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return lambda number: any(number in one for one in ranges)


def write(
    folder: Path, out: Path, run: str | None, profiles: Sequence[Path], ranks: str | None, steps: str | None
) -> Merged:  # fmt: skip
    """Writes the trace, with a progress bar where somebody is looking.

    Raises:
        ValueError, OSError: as :func:`fsdptrace_exporters.perfetto.merge`.
    """
    from fsdptrace_exporters.perfetto import merge

    rank_wanted, step_wanted = numbers(ranks, "--ranks"), numbers(steps, "--steps")
    with bar() as progress:
        loaded = load(folder, run, None, progress)
    with bar("merging") as progress:
        return merge(loaded, out, profiles, rank_wanted, step_wanted, progress)


def show(screen: Screen, merged: Merged) -> None:
    """What was written."""
    profiled = f" ({merged.profiles:,} of torch.profiler)" if merged.profiles else ""
    screen.prose(
        f"wrote {clean(merged.path)}: {count(merged.ranks, 'rank')}, {count(merged.events, 'event')}, "
        f"{count(merged.slices, 'slice')}{profiled}, {count(merged.flows, 'arrow')}, {count(merged.violations, 'violation')}"
    )
    for note in merged.notes:
        screen.item(clean(note, 600))


def to_json(merged: Merged) -> dict[str, Any]:
    """Plain data."""
    return {"schema": SCHEMA, **asdict(merged), "path": str(merged.path)}


def view(
    screen: Screen, folder: Path, run: str | None, profiles: Sequence[Path], ranks: str | None, steps: str | None, port: int,
    browser: bool,
) -> None:  # fmt: skip
    """Serves the UI with the trace until interrupted.

    Raises:
        ValueError, OSError: as :func:`write`; the UI is not installed, or the port is taken.
    """
    from fsdptrace_exporters.perfetto.ui import Server, web_folder

    web_folder()  # said before anything is merged
    with tempfile.TemporaryDirectory(prefix="fsdptrace-view-") as temporary:
        trace = folder
        if not (folder.is_file() and folder.name.endswith(TRACES)):
            merged = write(folder, Path(temporary) / "trace.pftrace", run, profiles, ranks, steps)
            trace = merged.path
            for note in merged.notes:
                screen.item(clean(note, 600))
        try:
            server = Server(trace.absolute(), port)
        except OSError as error:
            raise ValueError(f"--port {port}: {error.strerror or error}; without --port a free one is taken") from None
        with server:
            screen.line(f"Perfetto UI with {clean(folder)}, on this machine only:")
            screen.line(f"  {server.url}")
            screen.prose("Ctrl-C ends it. On a cluster: ssh -L PORT:127.0.0.1:PORT with that port, then open the same address.")
            sys.stdout.flush()
            if browser:
                webbrowser.open(server.url)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                pass
