"""What recording costs on a checkpointed model, beside ``checkpoint(debug=True)``: ratios of interleaved steps in one run."""

from __future__ import annotations

import argparse
import logging
import tempfile
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn as nn
import torch.utils.checkpoint as pytorch
from models import Block, TransformerBlock, fake_group
from torch.distributed.fsdp import fully_shard
from turns import interleaved, train_step

import fsdptrace


class Checkpointed(nn.Module):
    """Blocks under checkpoint, each a unit."""

    def __init__(self, count: int, dim: int, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(dim) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = pytorch.checkpoint(block, x, use_reentrant=False)
        return x


def main() -> None:
    """Prints one line per variant and model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=24)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    mesh = fake_group(8)
    for kind in (Block, TransformerBlock):
        model = Checkpointed(args.blocks, 64, kind)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.randn(4, 16, 64, device=mesh.device_type, requires_grad=True)
        with tempfile.TemporaryDirectory() as out:

            def record(out: str = out, model: Any = model, **options: Any) -> AbstractContextManager[Any]:
                return fsdptrace.record(model, out=f"{out}/{len(options)}", on_violation="record", detail="summary", **options)

            variants: Any = {
                "untraced": nullcontext,
                "untraced again": nullcontext,
                "recorded": record,
                "fingerprint=params": lambda: record(fingerprint="params"),
                "fingerprint=inputs": lambda: record(fingerprint="inputs"),
                "fingerprint=all": lambda: record(fingerprint="all"),
                "checkpoint_detail=modules": lambda: record(checkpoint_detail="modules"),
            }

            def step(model: nn.Module = model, optimizer: Any = optimizer, x: torch.Tensor = x) -> None:
                train_step(model, optimizer, x)

            results = interleaved(step, variants, args.rounds, 2)
            # So slow that it takes fewer turns.
            debug: Any = {
                "untraced": nullcontext,
                "checkpoint(debug=True)": lambda: pytorch.set_checkpoint_debug_enabled(True),
            }
            results["checkpoint(debug=True)"] = interleaved(step, debug, 2, 1, warm=0)["checkpoint(debug=True)"]
            print(f"{args.blocks} checkpointed blocks ({kind.__name__}), fake group of 8, torch {torch.__version__}")
            for name, ratio in results.items():
                print(f"  {name:<28} {ratio}", flush=True)


if __name__ == "__main__":
    main()
