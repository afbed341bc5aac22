"""Step time on a GPU with and without, in pairs: short blocks of steps in random order, each against the untraced block of the
same round, so that a clock that drifts takes both along. Prints medians of the ratios with their quartiles, and the peaks of
memory that were seen.

python benchmarks/device_pairs.py --rounds 40
"""

from __future__ import annotations

import argparse
import datetime
import gc
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from device_check import WORLD, later, layers, recorded
from models import fake_group

import fsdptrace

STEPS = 6  # of a block, after two that warm up
BASE = "untraced"

Variants = dict[str, Callable[[], AbstractContextManager[Any]]]


def pairs(
    step: Callable[[], Any], variants: Variants, rounds: int
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, Counter[int]]]:
    """Per variant and round the wall time of a step and the training thread's CPU time, as ratios to the untraced block of that
    round; and how often each peak of allocated bytes was seen."""
    rng = random.Random(0)
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    peaks: dict[str, Counter[int]] = {name: Counter() for name in variants}
    for _ in range(rounds):
        names = list(variants)
        rng.shuffle(names)
        took: dict[str, tuple[float, float]] = {}
        for name in names:
            with variants[name]():
                step()
                step()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                begin, own = time.perf_counter(), time.thread_time()
                for _ in range(STEPS):
                    step()
                own = time.thread_time() - own
                torch.cuda.synchronize()
                took[name] = (time.perf_counter() - begin) / STEPS, own / STEPS
                peaks[name][torch.cuda.max_memory_allocated()] += 1
        for name, (wall, cpu) in took.items():
            ratios[name].append((wall / took[BASE][0], cpu / took[BASE][1]))
    return ratios, peaks


def measure(title: str, count: int, width: int, dtype: Any, batch: tuple[int, int], rounds: int, out: str) -> None:
    """One model, all variants."""
    model = layers(fake_group(WORLD), count, width, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(*batch, width, device="cuda")

    def step() -> None:
        model(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(20):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    print(f"\n{title}: a step of {(time.perf_counter() - begin) * 100:.1f} ms, {rounds} rounds of {STEPS} steps")
    variants: Variants = {
        BASE: nullcontext,
        "untraced, against itself": nullcontext,
        "recording, no device timing": recorded(model, out, device_timing="off"),
        "recording, default, after the first ten steps": later(model, out),
        "recording, every step timed": recorded(model, out, device_timing="always", detail="summary"),
    }
    gc.collect()
    gc.freeze()
    ratios, peaks = pairs(step, variants, rounds)
    gc.unfreeze()
    for name in variants:
        walls, cpus = (sorted(values) for values in zip(*ratios[name], strict=True))
        low, high = walls[len(walls) // 4], walls[3 * len(walls) // 4]
        print(
            f"  {name:<48} {statistics.median(walls):.3f} [{low:.3f}, {high:.3f}]  CPU {statistics.median(cpus):.3f}  peaks "
            + ", ".join(f"{size:,} B x {times}" for size, times in sorted(peaks[name].items())),
            flush=True,
        )


def main() -> int:
    """Measures both models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore")
    print(
        f"{datetime.date.today()}, {torch.cuda.get_device_name()}, torch {torch.__version__}, fsdptrace {fsdptrace.__version__}"
    )
    out = tempfile.mkdtemp(prefix="fsdptrace-device-")
    measure("24 layers of width 2048, bf16", 24, 2048, torch.bfloat16, (4, 1024), options.rounds, out)
    measure("96 tiny layers (host-bound)", 96, 32, None, (2, 8), options.rounds, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
