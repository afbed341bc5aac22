"""Peaks of allocated memory, each way of running in processes of its own, whose allocators begin empty."""

from __future__ import annotations

import ctypes
import gc
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from device_common import SETTINGS, TIMED, TIMED_FULL, UNTRACED, Setting, layers, recordings, training, untraced
from device_rounds import WARM_UP, sizes

PROGRAM = Path(__file__).with_name("device_pairs.py")
COLLECTING = "untraced, garbage collected as it comes"
LATE = "untraced, host held up for 20 ms now and then"
CHILDREN = {UNTRACED: 4, LATE: 3, COLLECTING: 3, TIMED: 3, TIMED_FULL: 4}
"""How many processes run each way."""


@contextmanager
def late() -> Iterator[None]:
    """Holds the interpreter's lock for 20 ms at random times, so that whichever thread trains then is late."""
    over = threading.Event()
    hold = ctypes.PyDLL(None).usleep  # with the lock held

    def hold_up() -> None:
        rng = random.Random(0)
        while not over.wait(rng.uniform(0.0, 0.2)):
            hold(20_000)

    thread = threading.Thread(target=hold_up, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def child(setting: Setting, way: str, steps: int) -> None:
    """Runs ``steps`` steps one way; prints how often each peak of allocated bytes was seen in a step."""
    model = layers(setting)
    step = training(model, setting)
    made = {UNTRACED: untraced, COLLECTING: untraced, LATE: late}
    with tempfile.TemporaryDirectory() as out:
        make = made.get(way) or recordings(model, out)[way]
        gc.collect()
        gc.freeze()
        if way != COLLECTING:
            gc.disable()
        with make():
            for _ in range(WARM_UP):
                step()
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            peaks: Counter[int] = Counter()
            for _ in range(steps):
                torch.cuda.reset_peak_memory_stats()
                step()
                peaks[torch.cuda.max_memory_allocated()] += 1
            torch.cuda.synchronize()
    print(json.dumps(list(peaks.items())))


def peaks_of(model: str, steps: int, until: float) -> int:
    """Starts the processes, the ways taking turns; prints the peaks of each. Returns how many failed."""
    print(f"\n{SETTINGS[model].title}: peaks of allocated memory in {steps} steps, a process per row", flush=True)
    left = dict(CHILDREN)
    failed, longest = 0, 0.0
    while any(left.values()):
        for way in (way for way in CHILDREN if left[way]):
            left[way] -= 1
            begin = time.monotonic()
            if begin + longest > until:
                print(f"  {way:<62} out of time")
                continue
            command = [sys.executable, str(PROGRAM), "--model", model, "--child", way, "--steps", str(steps)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            longest = max(longest, time.monotonic() - begin)
            if done.returncode:
                failed += 1
                print(f"  {way:<62} exit status {done.returncode}: {done.stderr[-500:]}", flush=True)
            else:
                print(f"  {way:<62} {sizes(Counter(dict(json.loads(done.stdout.splitlines()[-1]))))}", flush=True)
    return failed
