"""``python -m fsdptrace_exporters DIR --to NAME``: ``fsdptrace export`` without the packages that the command needs."""

from __future__ import annotations

import argparse
import gc
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdptrace.files import NotATrace
from fsdptrace_exporters.following import Export, make_sinks, sources_of
from fsdptrace_exporters.sinks import Settings, Unusable
from fsdptrace_exporters.worker import here

PREFIX = "fsdptrace export: "  # fsdptrace.exporting looks for it


def say(text: str) -> None:
    """One line on standard error. Notes are for the log; anything else a trainer hands on to its own."""
    print(text if text.startswith("note: ") else f"{PREFIX}{text}", file=sys.stderr, flush=True)


def ranks(text: str) -> frozenset[int] | None:
    """``0,8``; ``all`` (None); ``none``.

    Raises:
        ValueError: it is none of these.
    """
    if text == "all":
        return None
    if text == "none":
        return frozenset()
    try:
        return frozenset(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"--detail-ranks: {text!r} is none of 0,8 or all or none") from None


def export(
    folder: Path,
    to: Sequence[str],
    follow: bool = False,
    run: str | None = None,
    detail_ranks: str | None = None,
    remove: bool = False,
    again: bool = False,
    exit_after: float | None = None,
    spawned: bool = False,
) -> int:
    """Exports ``folder`` and returns the exit status: 0, or 2 when something could not be used or delivered.

    Raises:
        Unusable, NotATrace, ValueError: with one clear line.
    """
    chosen = detail_ranks if detail_ranks is not None else os.environ.get("FSDPTRACE_DETAIL_RANKS") or "0"
    settings = Settings(ranks(chosen), live=follow, say=say)
    if not to:
        raise Unusable("--to is missing: otlp, prometheus or otlp-json:FILE")
    if not follow and not folder.exists():
        raise NotATrace(f"{folder}: no such file or folder")
    only = None if follow else sources_of(folder, run)[0]
    if follow and run is not None:
        raise Unusable("--run goes with a finished run; --follow takes every run of the folder: give the run's own folder")
    sinks = make_sinks(to, settings)
    keep = all(getattr(sink, "keeps_position", True) for sink in sinks)
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)  # thousands of spans at a time, and no cycles in them
    exporting = Export(
        folder, sinks, settings, exit_after, remove, host=here() if spawned else "", keep=keep, again=again, only=only
    )  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: settings.stop.set())
    exporting.run()
    return _result(exporting, folder, to, follow)


def _result(exporting: Export, folder: Path, to: Sequence[str], follow: bool) -> int:
    failed = [worker.failed for worker in exporting.workers if worker.failed]
    for text in failed:
        say(text)
    steps = max((worker.steps for worker in exporting.workers), default=0)
    skipped = max((worker.skipped for worker in exporting.workers), default=0)
    before = f"; {skipped} processes were delivered before (--again sends them again)" if skipped else ""
    left = exporting.left
    if left and not failed:
        say(f"{', '.join(left)}: not everything is delivered; the rest goes out with: fsdptrace export {folder} --to {to[0]}")
    running = sorted({text for worker in exporting.workers for text in worker.running})
    if running:
        say(f"{', '.join(running)} still run: what they have finished is delivered; --follow waits for the rest")
    print(f"note: {steps} steps delivered{before}", file=sys.stderr, flush=True)
    return 2 if failed or (left and not follow) else 0


def _many_files() -> None:
    """As many open files as we may have: a folder can hold those of hundreds of processes, each read by several sinks."""
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):
        pass


def _free() -> None:
    """A spawned exporter inherits what the trainer was pinned to, and would compete with it there."""
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    except (AttributeError, OSError):
        pass
    try:
        os.nice(5)
    except OSError:
        pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fsdptrace_exporters", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--to", action="append", default=[], metavar="NAME[:ARGUMENT]")
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--run")
    parser.add_argument("--detail-ranks")
    parser.add_argument("--remove", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--exit-after", type=float)
    parser.add_argument("--spawned", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=int, help=argparse.SUPPRESS)  # kept open until this process ends
    given = vars(parser.parse_args(arguments))
    _many_files()
    given.pop("lock")
    if given["spawned"]:
        _free()
        given["exit_after"] = given["exit_after"] or 30.0
    try:
        status = export(**given)
    except (Unusable, NotATrace, ValueError) as error:
        say(str(error))
        return 2
    except OSError as error:
        say(f"{error.filename or 'input'}: {error.strerror or error}")
        return 2
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that wait for a back end are not waited for.
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
