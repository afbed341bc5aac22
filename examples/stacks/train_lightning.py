"""Lightning with FSDP2 (ModelParallelStrategy): checkpointed blocks, gradient accumulation, a validation between.

fsdptrace run --out traces -- python train_lightning.py
python train_lightning.py --callback traces
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    """A block of a residual network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Checkpointed blocks and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(4)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Lit(pl.LightningModule):
    """The network, wrapped where Lightning wants it."""

    def configure_model(self) -> None:
        """Called once the mesh is there."""
        if hasattr(self, "net"):
            return
        self.net = Net()
        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """The loss of a batch."""
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        """The loss of a batch that is not trained on."""
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer, over the sharded parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Trains two short epochs on two processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--callback", metavar="DIR", help="record by the callback, with the files there")
    parser.add_argument("--logs", default="lightning_logs", help="where the CSV logger writes")
    options = parser.parse_args()

    pl.seed_everything(0, verbose=False)
    callbacks: list[Any] = []
    if options.callback:
        from fsdptrace.integrations import LightningCallback

        callbacks.append(LightningCallback(out=options.callback))
    rows = TensorDataset(torch.randn(32, 32), torch.randn(32, 1))
    trainer = pl.Trainer(
        # All processes shard the data: the default is one group of tensor parallelism per node instead.
        accelerator="auto", devices=2, strategy=ModelParallelStrategy(2, 1), max_epochs=2, accumulate_grad_batches=2,
        log_every_n_steps=2, logger=CSVLogger(options.logs), callbacks=callbacks, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Lit(), DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=8))
    if trainer.is_global_zero:
        print(f"trained {trainer.global_step} steps")


if __name__ == "__main__":
    main()
