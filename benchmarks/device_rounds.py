"""Step times in rounds: blocks of steps in random order, each against the median of the untraced blocks of its round, so that a
clock that drifts takes all along. Garbage is collected between blocks, not in them."""

from __future__ import annotations

import gc
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from device_common import UNTRACED, Make, Setting, layers, others, recordings, training, untraced

WARM_UP = 4
"""Steps before those that count, in every block: in its first four a recording looks at more than later."""
SHARE = 0.75
"""Of the time, before profilers and snapshots have their turn."""
AGAIN = "untraced, against the others"


class Clock:
    """CPU time of the threads that train: the one that calls, and autograd's, in which backwards run on a GPU."""

    def __init__(self, step: Callable[[], torch.Tensor]) -> None:
        idents: list[int] = []
        x: Any = torch.ones(1, device=step().device, requires_grad=True)
        x.register_hook(lambda grad: idents.append(threading.get_ident()))
        (x * 2).sum().backward()
        own = threading.get_ident()
        self._others = [time.pthread_getcpuclockid(ident) for ident in idents if ident != own]

    def __call__(self) -> float:
        return time.thread_time() + sum(time.clock_gettime(other) for other in self._others)


@dataclass
class Found:
    """What was measured of one way of running: ratios per round of step time and of CPU time, and how often each peak of
    allocated bytes was seen in a block."""

    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)
    peaks: Counter[int] = field(default_factory=Counter)


def block(step: Callable[[], Any], make: Make, cpu: Clock, timed: int) -> tuple[float, float, int]:
    """Wall and CPU seconds of a step, and the peak of allocated bytes."""
    with make():
        for _ in range(WARM_UP):
            step()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begin, own = time.perf_counter(), cpu()
        for _ in range(timed):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / timed, (cpu() - own) / timed, torch.cuda.max_memory_allocated()


def rounds_of(
    step: Callable[[], Any], variants: dict[str, Make], setting: Setting, rounds: int, until: float, bases: int = 3
) -> tuple[dict[str, Found], list[float]]:
    """What was found in up to ``rounds`` rounds, begun as long as one of them fits before ``until`` (``time.monotonic()``),
    with ``bases`` untraced blocks in each; and the step times of those, in seconds."""
    rng, cpu = random.Random(0), Clock(step)
    found = {name: Found() for name in (UNTRACED, *variants)}
    steps: list[float] = []
    longest = 0.0
    for number in range(rounds):
        begin = time.monotonic()
        if number and begin + longest > until:
            break
        names = [UNTRACED] * bases + list(variants)
        rng.shuffle(names)
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        gc.disable()
        try:
            for name in names:
                wall, own, peak = block(step, variants.get(name, untraced), cpu, setting.timed)
                took[name].append((wall, own))
                found[name].peaks[peak] += 1
                gc.collect()
        finally:
            gc.enable()
        base, base_cpu = (statistics.median(values) for values in zip(*took[UNTRACED], strict=True))
        steps += [wall for wall, _ in took[UNTRACED]]
        for name in variants:
            found[name].walls.append(took[name][0][0] / base)
            found[name].cpus.append(took[name][0][1] / base_cpu)
        longest = max(longest, time.monotonic() - begin)
        print(f"round {number + 1}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return found, steps


def spread(values: list[float]) -> str:
    """Median and quartiles."""
    ordered = sorted(values)
    return f"{statistics.median(values):.3f} [{ordered[len(ordered) // 4]:.3f}, {ordered[3 * len(ordered) // 4]:.3f}]"


def sizes(peaks: Counter[int]) -> str:
    """Peaks and how often each was seen."""
    return ", ".join(f"{size:,} B x {times}" for size, times in sorted(peaks.items()))


def issuing(step: Callable[[], Any]) -> tuple[float, float]:
    """ms until the host has issued a step, and until the device is done with it: which of the two a step waits for."""
    took: list[tuple[float, float]] = []
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        issued = time.perf_counter()
        torch.cuda.synchronize()
        took.append(((issued - begin) * 1e3, (time.perf_counter() - begin) * 1e3))
    issued_in, done_in = (statistics.median(values) for values in zip(*took, strict=True))
    return issued_in, done_in


def measure(setting: Setting, rounds: int, until: float, out: str) -> dict[str, Found]:
    """One model, all ways of running it; prints what was found. Profilers come last, in a quarter of the time: what they load
    into the process stays there."""
    begin = time.monotonic()
    model = layers(setting)
    step = training(model, setting)
    for _ in range(10):
        step()
    issued, done = issuing(step)
    print(f"\n{setting.title}; budget {setting.budget or 'none'}", flush=True)
    print(f"  one step alone: issued by the host in {issued:.1f} ms, done by the device after {done:.1f} ms", flush=True)
    gc.collect()
    gc.freeze()
    try:
        ways = {AGAIN: untraced, **recordings(model, out)}
        found, steps = rounds_of(step, ways, setting, rounds, begin + SHARE * (until - begin))
        show(found, steps, setting)
        peers, steps = rounds_of(step, others(), setting, max(1, rounds // 4), until)
        print("  beside what else people run, later in the same process", flush=True)
        show(peers, steps, setting)
    finally:
        gc.unfreeze()
    return found


def show(found: dict[str, Found], steps: list[float], setting: Setting) -> None:
    """Prints step times, ratios and peaks."""
    print(f"  untraced: {spread([value * 1e3 for value in steps])} ms a step, in blocks of {setting.timed}", flush=True)
    for name, one in found.items():
        if one.walls:
            text = f"step {spread(one.walls)}  CPU {spread(one.cpus)}  {len(one.walls)} rounds"
            print(f"  {name:<62} {text}", flush=True)
    print("  peaks of allocated memory, in so many blocks")
    for name, one in found.items():
        print(f"  {name:<62} {sizes(one.peaks)}", flush=True)
