"""What reading traces costs: time and memory of ``report``, ``check``, the tables and Parquet over ten million events, beside
pandas-style reading of the same files; and, for one same step, beside HolisticTraceAnalysis on a torch.profiler trace.

``python benchmarks/reading.py [--events N] [--keep DIR] [--pandas PYTHON] [--hta PYTHON]``: the last two name Pythons in which
pandas and HolisticTraceAnalysis are installed; without them these rows are left out. Memory is the sum over all processes of a
command, sampled ten times a second. docs/reading.md quotes it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import traces

COMMAND = [sys.executable, "-c", "from fsdptrace.cli import main; main()"]
QUERY = "SELECT unit, rank, count(*), quantile_cont(duration_ns, 0.95) FROM events WHERE kind = 'wait' GROUP BY ALL"
TABLES = f"import fsdptrace, sys\nwith fsdptrace.load(sys.argv[1]) as run: run.sql({QUERY!r}).fetchall()\n"
PANDAS = """
import sys, pathlib, pandas
frames = [pandas.read_json(path, lines=True) for path in sorted(pathlib.Path(sys.argv[1]).rglob("*.jsonl"))]
events = pandas.concat(frames)
events = events[events["kind"].isin(["unshard", "wait", "reshard", "reduce_scatter"])]
events.groupby(["group", "kind"]).agg(number=("seq", "size"), bytes=("bytes", "sum"))
"""
HTA = """
import sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]})
print(len(analysis.t.get_trace(0)), "rows")
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one command: wall and CPU time in s, and the most memory of all its processes together, in bytes."""

    wall: float
    cpu: float
    memory: int


def measure(command: list[str]) -> Cost:
    """Runs ``command`` and watches it.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    start = time.monotonic()
    with tempfile.TemporaryFile() as said:
        process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        most = 0
        cpu: dict[int, float] = {}
        while process.poll() is None:
            used = 0
            try:
                for each in (process, *process.children(recursive=True)):
                    used += each.memory_info().rss
                    times = each.cpu_times()
                    cpu[each.pid] = times.user + times.system
            except psutil.NoSuchProcess:
                pass
            most = max(most, used)
            time.sleep(0.1)
        wall = time.monotonic() - start
        if process.returncode not in (0, 1):  # 1: `check` found something
            said.seek(0)
            raise RuntimeError(f"{command[:4]} failed: {said.read().decode()[-2000:]}")
    return Cost(wall, sum(cpu.values()), most)


def row(what: str, cost: Cost, events: int) -> None:
    """One line of the table."""
    print(
        f"| {what} | {cost.wall:.1f} s | {cost.cpu:.1f} s | {cost.cpu / events * 1e6:.1f} µs "
        f"| {cost.memory / 2**20:,.0f} MiB |",
        flush=True,
    )


def large(folder: Path, events: int, small: Path, small_events: int, pandas: str) -> None:
    """The commands over a large trace; pandas over a small one, since it holds everything in memory."""
    print("| over a trace of | wall | CPU | CPU per event | memory at most |\n|---|---|---|---|---|")
    label = f"{events / 1e6:.1f} million events"
    row(f"{label}: `fsdptrace report`", measure([*COMMAND, "report", str(folder)]), events)
    row(f"{label}: `fsdptrace check`", measure([*COMMAND, "check", str(folder)]), events)
    row(f"{label}: `fsdptrace diff` with itself", measure([*COMMAND, "diff", str(folder), str(folder)]), 2 * events)
    row(f"{label}: `fsdptrace.load` and a query over all events", measure([sys.executable, "-c", TABLES, str(folder)]), events)
    label = f"{small_events / 1e6:.2f} million events"
    row(f"{label}: `fsdptrace report`", measure([*COMMAND, "report", str(small)]), small_events)
    out = small / "parquet"
    row(f"{label}: `fsdptrace parquet`", measure([*COMMAND, "parquet", str(small / "bench"), "-o", str(out)]), small_events)
    shutil.rmtree(out, ignore_errors=True)
    if pandas:
        row(f"{label}: pandas, `read_json` and one `groupby`", measure([pandas, "-c", PANDAS, str(small)]), small_events)


def one_step(folder: Path, hta: str) -> None:
    """The same training step under both; then each tool reads its own."""
    import torch
    from models import TransformerBlock, blocks, fake_group

    import fsdptrace

    torch.set_num_threads(1)
    model = blocks(fake_group(8), 24, 64, False, TransformerBlock)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(2, 16, 64)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with fsdptrace.record(model, out=str(folder / "step"), on_violation="record", detail="full") as recording:
        step()
    recording.close()
    profile = folder / "profile.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    profiler.export_chrome_trace(str(profile))
    ours = measure([*COMMAND, "report", recording.path])
    theirs = measure([hta, "-c", HTA, str(profile)])
    print("\n| one same step of 24 units | file | wall | CPU | memory at most |\n|---|---|---|---|---|")
    for what, path, cost in (
        ("fsdptrace trace, `fsdptrace report`", Path(recording.path), ours),
        ("torch.profiler trace, HolisticTraceAnalysis loads it", profile, theirs),
    ):
        size = path.stat().st_size / 2**20
        print(f"| {what} | {size:.2f} MiB | {cost.wall:.1f} s | {cost.cpu:.1f} s | {cost.memory / 2**20:,.0f} MiB |")


def main() -> None:
    """Makes the traces and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--keep", type=Path, help="a folder for the traces, kept and used again")
    parser.add_argument("--pandas", default="", help="a Python with pandas")
    parser.add_argument("--hta", default="", help="a Python with HolisticTraceAnalysis")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="fsdptrace-reading-"))
    try:
        small_events = traces.ensure(folder / "small", options.events // 10)
        events = traces.ensure(folder / "large", options.events)
        large(folder / "large", events, folder / "small", small_events, options.pandas)
        if options.hta:
            one_step(folder, options.hta)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
