"""Runs a function in processes of their own, as ranks or alone, and brings back what each returned.

The processes are forked from a server that has imported torch and done nothing else, so that each costs little.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

COLLECTIVE_TIMEOUT = 20  # seconds
_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "fsdptrace.recording", "pytest"]


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60) -> list[Any]:
    """``fn(rank, *args)`` in ``world`` processes with a gloo process group; their results by rank.

    ``fn`` is a plain function of any test file: the child loads that file by its path. A child's exception fails the
    caller with the child's traceback; on a timeout all children are killed, none is left behind. The result of a child
    that ended itself by ``os._exit(0)`` is ``None``.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
        where = (fn.__code__.co_filename, fn.__qualname__)
        context = mp.start_processes(_rank, (world, folder, where, args), world, join=False, start_method="forkserver")
        deadline = time.monotonic() + timeout
        try:
            while not context.join(timeout=1):  # raises what a child raised, after ending the others
                if time.monotonic() > deadline:
                    alive = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
                    raise TimeoutError(f"ranks {alive} of {where[1]} did not end within {timeout} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [_result(Path(folder) / f"{rank}.result") for rank in range(world)]


def run_to_the_end(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60) -> list[tuple[int, Any]]:
    """Like :func:`run_ranks`, where ranks may die: each one's exit code (negative: a signal) and result (None without one)."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        where = (fn.__code__.co_filename, fn.__qualname__)
        processes = [context.Process(target=_rank, args=(rank, world, folder, where, args)) for rank in range(world)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        try:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            alive = [rank for rank, process in enumerate(processes) if process.exitcode is None]
            if alive:
                raise TimeoutError(f"ranks {alive} of {where[1]} did not end within {timeout} s")
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [(process.exitcode or 0, _result(Path(folder) / f"{rank}.result")) for rank, process in enumerate(processes)]


def run_alone(fn: Callable[..., Any], *args: Any, timeout: float = 60) -> tuple[int, Any]:
    """``fn(*args)`` in one process, without a process group: its exit code (negative: a signal) and result."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        path = Path(folder) / "result"
        process = context.Process(target=_alone, args=(str(path), (fn.__code__.co_filename, fn.__qualname__), args))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"{fn.__qualname__} did not end within {timeout} s")
        return process.exitcode, _result(path)


def _result(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _function(where: tuple[str, str]) -> Any:
    path, qualified = where
    name = f"_ranks_{Path(path).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    found: Any = sys.modules[name]
    for part in qualified.split("."):
        found = getattr(found, part)
    return found


def _prepare() -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _rank(rank: int, world: int, folder: str, where: tuple[str, str], args: tuple[Any, ...]) -> None:
    _prepare()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT),
    )
    result = _function(where)(rank, *args)
    (Path(folder) / f"{rank}.result").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


def _alone(path: str, where: tuple[str, str], args: tuple[Any, ...]) -> None:
    _prepare()
    Path(path).write_bytes(pickle.dumps(_function(where)(*args)))
