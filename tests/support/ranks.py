"""Runs a function as several ranks, each a process of its own, and brings back what each returned."""

from __future__ import annotations

import importlib.util
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


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60, backend: str = "gloo") -> list[Any]:
    """``fn(rank, *args)`` in ``world`` processes with an initialised process group; their results by rank.

    ``fn`` is a plain function of any test file: the child loads that file by its path. A child's exception fails the
    caller with the child's traceback; on a timeout all children are killed, none is left behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        where = (fn.__code__.co_filename, fn.__qualname__)
        context = mp.start_processes(
            _child, (world, backend, folder, where, args), nprocs=world, join=False, start_method="spawn"
        )
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
        return [pickle.loads((Path(folder) / f"{rank}.result").read_bytes()) for rank in range(world)]


def load(path: str) -> Any:
    """The module in the file ``path``, imported under a name of its own."""
    name = f"_ranks_{Path(path).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def _child(rank: int, world: int, backend: str, folder: str, where: tuple[str, str], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT),
    )
    fn = load(where[0])
    for part in where[1].split("."):
        fn = getattr(fn, part)
    result = fn(rank, *args)
    (Path(folder) / f"{rank}.result").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()
