"""``fsdptrace demo``: real training in two processes, with the prefetch leak of torch 2.9 and older and without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from fsdptrace.analysis import Run, by_pattern, load
from fsdptrace.checks.text import count, size
from fsdptrace.cli import report
from fsdptrace.cli.demo_training import MENDED, Job, Result
from fsdptrace.cli.output import Column, Screen, clean, duration, name, number
from fsdptrace.files import read_file

if TYPE_CHECKING:
    from collections.abc import Iterator

WORLD = 2
DEADLINE = 120  # seconds for the whole training; it takes about ten
GRACE = 5.0  # seconds that the other rank gets when one has failed
RULE = "gather-after-backward"
_FOREIGN = ("FSDPTRACE", "TORCHELASTIC_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_")


class DemoFailed(ValueError):
    """The training of the demo did not come to its end; the message says why."""


@dataclass(slots=True)
class _Rank:
    process: subprocess.Popen[bytes]
    log: Path
    result: Path


def run(screen: Screen, kinds: Sequence[str], steps: int, layers: int, out: Path | None) -> bool:
    """Trains and shows; whether the leak was found and the healthy run was silent.

    Raises:
        DemoFailed: a process of the training failed or did not end in time.
    """
    folder = _folder(screen, out)
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid4().hex[:4]}"
    runs = {kind: f"demo-{kind}-{stamp}" for kind in kinds}
    _introduce(screen, kinds, steps, layers)
    started = time.monotonic()
    result = train(runs, steps, layers, folder)
    screen.prose(f"Trained in {time.monotonic() - started:.0f} s with torch {result.torch}.", style="dim")
    loaded = {kind: load(folder / run_id) for kind, run_id in runs.items()}
    for place, (kind, one) in enumerate(loaded.items(), 1):
        screen.line()
        screen.line((f"== {place}. {_TITLES[kind]} ".ljust(min(100, screen.width or 100), "="), "bold"))
        screen.prose(_says(kind, result))
        screen.line()
        report.show(screen, one)
        if kind == "leak":
            _each_gather(screen, one)
    if len(loaded) > 1:
        _side_by_side(screen, loaded, result)
    as_expected = _judge(screen, loaded, layers)
    _farewell(screen, loaded)
    return as_expected


_TITLES = {"leak": "Blocks that gather experts whose backward is over", "healthy": "The same model, healthy"}


def _introduce(screen: Screen, kinds: Sequence[str], steps: int, layers: int) -> None:
    screen.prose("fsdptrace demo: a nested mixture of experts under FSDP2", style="bold")
    screen.prose(
        f"{layers} blocks, each a fully_shard unit of its own, with its experts as a unit inside; every block under full "
        f"activation checkpointing. {WORLD} processes (gloo, CPU), {count(steps, 'step')} of real training "
        f"{'for each of two runs' if len(kinds) > 1 else ''}".rstrip()
        + ", recorded by fsdptrace.record()."
    )


def _says(kind: str, result: Result) -> str:
    """What is special about a run, said honestly."""
    from fsdptrace.adapters.compat import release_of

    old = release_of(result.torch) < MENDED
    if kind == "leak" and result.replaced[kind]:
        return (
            f"torch {result.torch}, which is installed here, does not have this fault any more: for this run the demo put the "
            "post-forward bookkeeping of torch 2.9 and older back (FSDPParamGroup.post_forward; mended in 2.10 by pytorch PR "
            "#164009). Everything else is as installed: model, training, recorder, rules."
        )
    if kind == "leak":
        return f"torch {result.torch}, which is installed here, has this fault by itself: nothing was changed for this run."
    if old:
        return (
            f"torch {result.torch} has the fault by itself, so this run says what comes next: every experts unit calls "
            "set_modules_to_backward_prefetch([the block before]). Same model, same data."
        )
    return f"torch {result.torch} as installed. Same model, same data."


def _each_gather(screen: Screen, one: Run) -> None:
    """Every wrong gather of rank 0's first backward: who asked, for whom, at which event, and what is held by then."""
    process = one.processes[0]
    model = process.models[0]
    wrong = {data["evidence"][-1] for data in process.violations if data["rule"] == RULE and data["step"] == 0}
    held = 0
    cells = []
    for event in read_file(process.source.path).events:
        if event.seq in wrong:
            held += event["bytes"]
            names = [name(model.fqn(group)) for group in (event["issuer"], event.group)]
            cells.append([str(event.seq), *names, size(event["bytes"]), size(held)])
    if cells:
        screen.title("each of them in step 0 of rank 0")
        columns = [Column("event"), Column("prefetch of", right=False), Column("gathered", right=False), Column("bytes"),
                   Column("held that way by then")]  # fmt: skip
        screen.table(columns, cells)


def _side_by_side(screen: Screen, loaded: dict[str, Run], result: Result) -> None:
    screen.line()
    screen.line(("== Side by side ".ljust(min(100, screen.width or 100), "="), "bold"))
    leak, healthy = (loaded[kind].models[0] for kind in ("leak", "healthy"))
    other = {row.name: row for row in by_pattern(healthy.rows)}
    columns = [
        Column("per step and unit", right=False), Column("gathers: leak"), Column("healthy"), Column("wasted: leak"),
        Column("healthy"), Column("gathered for: leak", keep=2), Column("healthy", keep=1),
    ]  # fmt: skip
    cells = []
    for row in by_pattern(leak.rows):
        twin = other[row.name]
        pair = [number(item.mean(key)) for key in ("gathers", "wasted") for item in (row, twin)]
        times = [duration(item.mean("lifetime_ns")) for item in (row, twin)]
        cells.append([name(row.name) + (f"  x{row.units}" if row.units > 1 else ""), *pair, *times])
    screen.table(columns, cells)
    peaks = f"{size(leak.peak.bytes)} with the leak, {size(healthy.peak.bytes)} without"
    screen.prose(f"peak of gathered parameters per rank: {peaks}")
    losses = {kind: result.losses[kind] for kind in loaded}
    shown = " -> ".join(f"{loss:.4f}" for loss in losses["leak"][:5])
    same = "the same to the last bit in both" if losses["leak"] == losses["healthy"] else "not the same in the other"
    screen.prose(f"losses of rank 0: {shown}; {same}. The leak costs memory and gathers, and nothing in the loss shows it.")


def _judge(screen: Screen, loaded: dict[str, Run], layers: int) -> bool:
    """Says so when the demo did not show what it is there for."""
    wrong = []
    if "leak" in loaded:
        found = next((finding for finding in loaded["leak"].findings if finding.rule == RULE), None)
        if found is None or found.unit_count != layers - 1:
            wrong.append(f"the leak should have shown as {RULE} on {layers - 1} units, and did not")
    if "healthy" in loaded and loaded["healthy"].findings:
        wrong.append("the healthy run should be silent, and is not")
    for line in wrong:
        screen.line()
        screen.prose(f"This is not what the demo should show: {line}. Please report it with the files below.", style="bold red")
    return not wrong


def _farewell(screen: Screen, loaded: dict[str, Run]) -> None:
    screen.title("the files, one per rank")
    for one in loaded.values():
        for process in one.processes:
            screen.line("  ", clean(_short(process.source.path)))
    screen.title("look again")
    for one in loaded.values():
        screen.line("  ", (f"fsdptrace report {clean(_short(one.folder))}", "cyan"))
    if "leak" in loaded:
        again = f"fsdptrace check {clean(_short(loaded['leak'].folder))}"
        screen.line("  ", (again, "cyan"), "    # the rules again over the files; exit status 1")
        screen.line("  ", (f"fsdptrace rules {RULE}", "cyan"))


def _short(path: Path) -> Path:
    """Relative to where the user stands, when it lies below."""
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path


def _folder(screen: Screen, out: Path | None) -> Path:
    from fsdptrace.disk import choose_folder

    return choose_folder(None if out is None else str(out), lambda message: screen.prose(message, style="yellow")).absolute()


# -- training ----------------------------------------------------------------------------------------------------------
def train(runs: dict[str, str], steps: int, layers: int, out: Path) -> Result:
    """Trains in :data:`WORLD` processes of their own; rank 0's result. None of them outlives the call.

    Raises:
        DemoFailed: one failed or did not end in time; the message has the last lines of its output.
    """
    with tempfile.TemporaryDirectory(prefix="fsdptrace-demo-") as place, _ranks(runs, steps, layers, out, Path(place)) as ranks:
        _wait(ranks)
        data: dict[str, Any] = json.loads(ranks[0].result.read_text())
    return Result(**data)


@contextmanager
def _ranks(runs: dict[str, str], steps: int, layers: int, out: Path, place: Path) -> Iterator[list[_Rank]]:
    ranks: list[_Rank] = []
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    environment.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo", PYTHONUNBUFFERED="1")
    try:
        for rank in range(WORLD):
            log, result = place / f"rank{rank}.log", place / f"rank{rank}.json"
            job = Job(rank, WORLD, layers, steps, str(out), str(place / "store"), str(result), DEADLINE + 10, runs)
            with open(log, "wb") as stream:
                process = subprocess.Popen(
                    [sys.executable, "-m", "fsdptrace.cli.demo_training", json.dumps(asdict(job))],
                    stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
                )  # fmt: skip
            ranks.append(_Rank(process, log, result))
        yield ranks
    finally:
        for one in ranks:
            if one.process.poll() is None:
                os.killpg(one.process.pid, signal.SIGKILL)  # its own session: nothing else is in the group
            one.process.wait()


def _wait(ranks: list[_Rank]) -> None:
    deadline = time.monotonic() + DEADLINE
    while any(one.process.poll() is None for one in ranks):
        if any(one.process.returncode for one in ranks if one.process.returncode is not None):
            deadline = min(deadline, time.monotonic() + GRACE)  # the others wait for the one that failed
            _failed_or_wait(ranks, deadline)
            break
        if time.monotonic() > deadline:
            late = [rank for rank, one in enumerate(ranks) if one.process.poll() is None]
            last = _tail(ranks[late[0]])
            raise DemoFailed(f"the training did not end within {DEADLINE} s (rank {late[0]}). Its last lines: {last}")
        time.sleep(0.05)
    for rank, one in enumerate(ranks):
        if one.process.returncode:
            raise DemoFailed(f"rank {rank} of the training {_how(one.process.returncode)}. Its last lines: {_tail(one)}")


def _failed_or_wait(ranks: list[_Rank], deadline: float) -> None:
    while any(one.process.poll() is None for one in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)


def _how(status: int) -> str:
    return f"was ended by signal {-status}" if status < 0 else f"failed with exit status {status}"


def _tail(one: _Rank, lines: int = 4) -> str:
    text = one.log.read_bytes()[-20_000:].decode("utf-8", "replace")
    last = [line.strip() for line in text.splitlines() if line.strip()][-lines:]
    return " | ".join(last) or "(none)"
