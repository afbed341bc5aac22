"""Many steps of a model with many groups: memory flat, disk bounded, log quiet. Prints a table.

python benchmarks/soak.py --steps 1000 --groups 400 [--leak] [--slow-disk SECONDS | --full-disk BYTES]

`--slow-disk 3`: every fiftieth write blocks for three seconds. `--full-disk`: the disk has so many bytes left (RLIMIT_FSIZE).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import resource
import shutil
import signal
import tempfile
import time
from pathlib import Path

import torch
from models import fake_group, nested

import fsdptrace
from fsdptrace import disk
from fsdptrace.adapters.legacy import old_bookkeeping
from fsdptrace.standing import newest


class Counter(logging.Handler):
    """Counts log lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += 1


def rss() -> float:
    """Resident memory now, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def block_writes(seconds: float) -> None:
    """A file system whose every fiftieth write takes ``seconds``."""
    write, calls = disk._write_all, itertools.count(1)

    def slow(fd: int, data: bytes, offset: int | None = None) -> None:
        if next(calls) % 50 == 0:
            time.sleep(seconds)
        write(fd, data, offset)

    disk._write_all = slow


def main() -> None:
    """Runs the soak and prints what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--groups", type=int, default=400)
    parser.add_argument("--max-bytes", type=int, default=64 << 20)
    parser.add_argument("--slow-disk", type=float, default=0, help="seconds that every fiftieth write blocks")
    parser.add_argument("--full-disk", type=int, default=0, help="bytes after which nothing can be written")
    parser.add_argument("--leak", action="store_true", help="the old bookkeeping: violations in every step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    log = Counter()
    logging.getLogger("fsdptrace").addHandler(log)
    out = tempfile.mkdtemp(prefix="fsdptrace-soak-")
    if args.slow_disk:
        block_writes(args.slow_disk)
    if args.full_disk:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (args.full_disk, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    mesh = fake_group(16)
    model = nested(mesh, args.groups // 2, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(1, 2, 8)
    bookkeeping = old_bookkeeping() if args.leak else contextlib.nullcontext(False)
    marks: list[tuple[int, float]] = []
    times: list[float] = []
    walls: list[float] = []
    largest = 0
    with bookkeeping, fsdptrace.record(model, out=out, max_bytes=args.max_bytes, on_violation="warn") as rec:
        for step in range(args.steps):
            start, wall = time.thread_time(), time.perf_counter()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.thread_time() - start)
            walls.append(time.perf_counter() - wall)
            if step + 1 in (50, args.steps // 2, args.steps):
                marks.append((step + 1, rss()))
            if step % 20 == 0:
                largest = max(largest, sum(path.stat().st_size for path in Path(out).rglob("*.jsonl")))
        kept = len(rec.violations)
    session = rec._session
    assert session is not None
    found = session.violation_count
    rec.close()
    size = sum(path.stat().st_size for path in Path(out).rglob("*.jsonl"))
    tenth = max(1, args.steps // 10)
    print(f"groups {args.groups}, steps {args.steps}, leak {args.leak}, torch {torch.__version__}")
    print("resident memory, MiB: " + ", ".join(f"step {step}: {value:.0f}" for step, value in marks))
    print(f"step time, last tenth against first: {sum(times[-tenth:]) / sum(times[:tenth]):.3f}")
    walls.sort()
    print(f"wall time of a step: median {1e3 * walls[len(walls) // 2]:.1f} ms, longest {1e3 * walls[-1]:.0f} ms")
    print(f"disk: {size / 2**20:.1f} MiB at the end, {largest / 2**20:.1f} at most, bound {args.max_bytes / 2**20:.0f}")
    print(f"events {newest(session):,}, dropped {session.ring.dropped:,}")
    print(f"violations {found:,} (kept in memory {kept:,}), log lines {log.lines}")
    shutil.rmtree(out, ignore_errors=True)


if __name__ == "__main__":
    main()
