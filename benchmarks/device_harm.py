"""What being recorded costs on a GPU, and that nothing else changes by it: step times, peaks of memory, results bit for bit,
CUDA graphs captured meanwhile."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from device_common import DEFAULT, DEVICE, SETTINGS, TIMED, TIMED_FULL, UNTRACED, Setting, Table, layers
from device_reports import equal
from device_rounds import measure
from device_truth import carrying
from torch.nn.attention import SDPBackend, sdpa_kernel

import fsdptrace
from fsdptrace.adapters.accelerator import api_for

PROGRAM = Path(__file__).with_name("device_check.py")


def check_cost(table: Table, rounds: int, seconds: float, out: str) -> None:
    """Step times and peaks of memory of each model; what cannot be told from noise is not judged."""
    begin = time.monotonic()
    for number, setting in enumerate(SETTINGS.values(), 1):
        found = measure(setting, rounds, begin + seconds * number / len(SETTINGS), out)
        for name in (DEFAULT, TIMED, TIMED_FULL):
            ordered = sorted(found[name].walls)
            low, high, budget = ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4], setting.budget
            good = None if budget is None or low <= budget < high else high <= budget
            table.row(f"{name}: step", f"quartiles {low:.3f}, {high:.3f}; budget {budget or 'none'}", good)
            usual, own = (found[way].peaks.most_common(1)[0][0] for way in (UNTRACED, name))
            table.row("    its usual peak of allocated memory", f"{own:,} B, untraced {usual:,} B", own == usual)
        gc.collect()
        torch.cuda.empty_cache()


def check_results(table: Table, out: str) -> None:
    """Losses and parameters with and without."""
    table.title("losses and parameters of 4 steps, with and without, every step timed and written in full")
    for setting in (SETTINGS["wide-4"], SETTINGS["tiny"]):
        plain, again, seen = (results(setting, trace, out) for trace in (False, False, True))
        if equal(plain, again):
            table.row(setting.title, "bit for bit", equal(plain, seen))
        else:
            table.row(setting.title, "not the same in two untraced runs: not judged")


def results(setting: Setting, trace: bool, out: str) -> list[torch.Tensor]:
    """Losses and shards after four steps."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = layers(setting)
    carrying(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    torch.manual_seed(1)
    found = []
    tracing = fsdptrace.record(model, out=out, device_timing="always", detail="full") if trace else nullcontext()
    with tracing, sdpa_kernel(SDPBackend.MATH):  # the others' backward adds up in any order
        for _ in range(4):
            loss = model(torch.randn(*setting.batch, setting.width, device=DEVICE)).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().cpu())
    torch.use_deterministic_algorithms(False)
    local: list[Any] = list(model.parameters())
    return found + [p.to_local().detach().cpu() for p in local]


# -- CUDA graphs -------------------------------------------------------------------------------------------------------
def check_capture(table: Table) -> None:
    """A CUDA graph captured while another thread asks for an event, in processes of their own: a broken capture leaves its
    process in a bad state."""
    table.title("a CUDA graph captured in the strictest mode while another thread asks for timing events")
    for way, text in (("relaxed", "as the drain thread asks"), ("plain", "without its exemption (for comparison)")):
        done = subprocess.run(
            [sys.executable, str(PROGRAM), "--capture", way], capture_output=True, text=True, check=False, timeout=120
        )
        said = (done.stdout.strip() or done.stderr.strip()).split("\n")[-1][:52]
        table.row(text, said, done.returncode == 0 if way == "relaxed" else None)


def capture(way: str) -> int:
    """Captures and replays a graph while a thread asks; returns the exit status."""
    event = torch.Event("cuda", enable_timing=True)
    event.record()
    asking = api_for(DEVICE).asking() if way == "relaxed" else nullcontext()
    begun, over, asked = threading.Event(), threading.Event(), 0

    def ask() -> None:
        nonlocal asked
        begun.wait()
        while not over.is_set():
            with asking:
                event.query()
            asked += 1

    x = torch.ones(1024, device=DEVICE)
    x + 1
    torch.cuda.synchronize()
    thread = threading.Thread(target=ask)
    thread.start()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="global"):
            begun.set()
            for _ in range(200):
                y = x + 1
                time.sleep(0.0005)
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"broken: {str(error).splitlines()[0]}", flush=True)
        return 1
    finally:
        begun.set()
        over.set()
        thread.join()
    print(f"captured and replayed, asked {asked} times meanwhile")
    return 0 if asked and bool((y == 2).all()) else 1


# -- pieces ------------------------------------------------------------------------------------------------------------
def costs(table: Table) -> None:
    """What the pieces cost on the thread that calls."""
    table.title("host time of the pieces, ns")
    make: Any = torch.cuda.Event
    begin, event, other = (torch.Event("cuda", enable_timing=True) for _ in range(3))
    cuda, stream, asking = make(enable_timing=True), torch.Stream(DEVICE), api_for(DEVICE).asking()
    for one in (begin, event, cuda):
        one.record()
    other.record(stream)
    torch.cuda.synchronize()

    def ask() -> None:
        with asking:
            pass

    pieces: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("record a timing event on the current stream", event.record),
        ("record one on another stream", lambda: other.record(stream)),
        ("the same with torch.cuda.Event (not used)", lambda: cuda.record(stream)),
        ("query it", event.query),
        ("elapsed time of two", lambda: begin.elapsed_time(event)),
        ("the exemption from captures, there and back", ask),
        ("torch._C._cuda_memoryStats (chosen, in timed steps with detail)", lambda: torch._C._cuda_memoryStats(0)),
        ("torch.cuda.memory_stats (too slow)", torch.cuda.memory_stats),
    )
    for name, call in pieces:
        runs: list[float] = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for _ in range(200):
                call()
            runs.append((time.perf_counter_ns() - start) / 200)
        table.row(name, f"{min(runs):,.0f}")
