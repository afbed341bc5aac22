"""What the programs that need a GPU share: the header of their output, the models, and the ways of running them."""

from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from models import TransformerBlock, fake_group
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerAction, ProfilerActivity, profile

import fsdptrace

DEVICE = torch.device("cuda", 0)
WORLD = 8

Make = Callable[[], AbstractContextManager[Any]]


class Table:
    """Rows of the result, printed as they come."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def title(self, text: str) -> None:
        print(f"\n{text}", flush=True)

    def row(self, name: str, text: str, good: bool | None = None) -> None:
        """One row; ``good`` is ``None`` where nothing is judged."""
        mark = "" if good is None else "ok" if good else "FAILED"
        if good is False:
            self.failed.append(name)
        print(f"  {name:<66} {text:<52} {mark}", flush=True)


def header() -> str:
    """Date, GPU, driver and versions."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip().split("\n")[0]
    except OSError:
        driver = ""
    return (
        f"{datetime.date.today()}, {torch.cuda.get_device_name()}, driver {driver or 'unknown'}, torch {torch.__version__}, "
        f"python {sys.version.split()[0]}, fsdptrace {fsdptrace.__version__}"
    )


@dataclass(frozen=True)
class Setting:
    """A model, its batch, and how it is measured.

    ``budget`` is the ratio of step times to stay within, ``None`` where host and device are about as slow and neither of
    the two budgets is meant; ``timed`` the steps of a block that count.
    """

    title: str
    layers: int
    width: int
    dtype: torch.dtype | None
    batch: tuple[int, int]
    budget: float | None
    timed: int


SETTINGS = {
    "wide-4": Setting("24 layers of width 2048, bf16, 4 x 1024 tokens", 24, 2048, torch.bfloat16, (4, 1024), None, 6),
    "wide-16": Setting("24 layers of width 2048, bf16, 16 x 1024 tokens", 24, 2048, torch.bfloat16, (16, 1024), 1.01, 6),
    "tiny": Setting("96 tiny layers (host-bound)", 96, 32, None, (2, 8), 1.05, 4),
}


def layers(setting: Setting) -> nn.Module:
    """A stack of transformer blocks on the device, each a unit."""
    mesh = fake_group(WORLD)
    torch.manual_seed(0)
    with DEVICE:
        heads = 16 if setting.width > 64 else 4
        model = nn.Sequential(*(TransformerBlock(setting.width, heads) for _ in range(setting.layers)))
    policy = MixedPrecisionPolicy(param_dtype=setting.dtype) if setting.dtype else MixedPrecisionPolicy()
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def training(model: nn.Module, setting: Setting) -> Callable[[], torch.Tensor]:
    """One training step of ``model``, which returns the loss and waits for nothing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(*setting.batch, setting.width, device=DEVICE)

    def step() -> torch.Tensor:
        loss: Any = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out: torch.Tensor = loss.detach()
        return out

    return step


UNTRACED = "untraced"
DEFAULT = "recording, default, steps after the first ten (none is timed)"
TIMED = "recording, every step timed"
TIMED_FULL = "recording, every step timed, all events, memory"


def recordings(model: nn.Module, out: str) -> dict[str, Make]:
    """Ways of recording ``model``, each made anew for each block of steps; after it no thread of ours is left."""

    def recorded(**options: Any) -> Make:
        @contextmanager
        def recording() -> Iterator[None]:
            with fsdptrace.record(model, out=out, **options) as rec:
                yield
            rec.close()

        return recording

    return {
        "recording, no device timing": recorded(device_timing="off"),
        DEFAULT: recorded(schedule=lambda step: ProfilerAction.NONE),  # steps that are written as one line
        TIMED: recorded(device_timing="always", detail="summary"),
        TIMED_FULL: recorded(device_timing="always", detail="full"),
    }


def others() -> dict[str, Make]:
    """What else people run beside training, in the same run for comparison."""
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    return {
        "torch.profiler, CPU and CUDA": lambda: profile(activities=both),
        "torch.profiler, CPU and CUDA, with stacks": lambda: profile(activities=both, with_stack=True),
        "memory snapshots": snapshots,
    }


@contextmanager
def snapshots() -> Any:
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def untraced() -> AbstractContextManager[Any]:
    return nullcontext()
