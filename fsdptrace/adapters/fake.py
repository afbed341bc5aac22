"""A process group that only pretends, so that one process can wrap a model for many ranks: for ``fsdptrace inspect``.

Changes the process for good (the default process group, functions that a script calls to make its own): for processes that do
nothing else.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh


def pretend(world_size: int, rank: int) -> None:
    """Makes this process ``rank`` of ``world_size`` ranks. A script's own ``init_process_group`` does nothing afterwards, and
    meshes for an accelerator that is not there are made on the CPU.

    Raises:
        ValueError: ``rank`` is not in the world.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not 0 <= rank < world_size:
        raise ValueError(f"--rank {rank}: there are ranks 0 to {world_size - 1}")
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="localhost",
        MASTER_PORT="29500",
    )  # fmt: skip
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    original = device_mesh.init_device_mesh

    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original(device_type if _there(device_type) else "cpu", *args, **kwargs)

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    for owner, name, function in (
        (dist, "init_process_group", nothing), (dist, "destroy_process_group", nothing),
        (dist, "init_device_mesh", init_device_mesh), (device_mesh, "init_device_mesh", init_device_mesh),
    ):  # fmt: skip
        setattr(owner, name, function)


def _there(device_type: str) -> bool:
    return device_type == "cpu" or bool(getattr(getattr(torch, device_type, None), "is_available", lambda: False)())
