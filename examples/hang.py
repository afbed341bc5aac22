"""Two ranks that part ways: rank 1 has a batch without images and skips the sharded vision tower. Watched from outside.

`fsdptrace run --out traces -- python examples/hang.py`, then `fsdptrace postmortem traces`. Runs on the CPU; the collectives
give up after a few seconds, so that it ends by itself. `--dummy` mends it: every rank runs the tower.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

DIM = 16
HANGS_AT = 2  # the step in which rank 1 has no image


class Captioner(nn.Module):
    """A vision tower and a decoder; every layer is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(3)])

    def forward(self, text: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
        if image is not None:
            text = text + self.visual(image)
        for layer in self.layers:
            text = torch.relu(layer(text))
        return text


def train(rank: int, store: str, dummy: bool) -> None:
    """One rank."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    timeout = timedelta(seconds=5)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = Captioner()
    for layer in (*model.visual, *model.layers, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        for step in range(4):
            text, image = torch.randn(2, DIM), torch.randn(2, DIM)
            if rank == 1 and step == HANGS_AT:
                image = torch.zeros(2, DIM) if dummy else None  # type: ignore[assignment]
            model(text, image).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"rank {rank}: done")
    except RuntimeError as error:
        print(f"rank {rank}: {str(error).splitlines()[0][:100]}")


def main() -> None:
    """Starts both ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dummy", action="store_true", help="give the tower a dummy input where there is no image")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (f"{folder}/store", args.dummy), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
