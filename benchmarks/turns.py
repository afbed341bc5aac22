"""Steps with and without something, in turn: how the benchmarks compare on machines that others use too."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

Make = Callable[[], AbstractContextManager[Any]]


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """One ordinary step."""
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@dataclass(frozen=True, slots=True)
class Ratio:
    """CPU time of a step against untraced steps.

    Attributes:
        median, low, high: of the rounds' ratios, with their quartiles.
        quiet: of the lower quartiles of all steps: on a shared machine the quieter half says more.
        extra: difference of these lower quartiles, in ns.
    """

    median: float
    low: float
    high: float
    quiet: float
    extra: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]; {self.quiet:.3f}"


def interleaved(
    step: Callable[[], None], variants: dict[str, Make], rounds: int, steps: int, warm: int = 4
) -> dict[str, Ratio]:
    """CPU time of a step per variant, over ``rounds`` rounds in which the variants have blocks of ``steps`` steps in random
    order, after ``warm`` steps each. The first variant has two blocks a round, whose median is the round's measure."""
    rng = random.Random(0)
    base = next(iter(variants))
    times: dict[str, list[int]] = {name: [] for name in variants}
    ratios: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        names = [base, *variants]
        rng.shuffle(names)
        took: dict[str, list[int]] = {name: [] for name in variants}
        for name in names:
            with variants[name]():
                for _ in range(warm):
                    step()
                took[name] += [_cpu(step) for _ in range(steps)]
        for name, values in took.items():
            times[name] += values
            ratios[name].append(statistics.median(values) / statistics.median(took[base]))
    quarter = {name: sorted(values)[len(values) // 4] for name, values in times.items()}
    out = {}
    for name, found in ratios.items():
        ordered = sorted(found)
        out[name] = Ratio(
            statistics.median(ordered), ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4],
            quarter[name] / quarter[base], float(quarter[name] - quarter[base]),
        )  # fmt: skip
    return out


def _cpu(run: Callable[[], None]) -> int:
    # The training thread's own CPU time: the drain thread's is reported apart.
    start = time.thread_time_ns()
    run()
    return time.thread_time_ns() - start
