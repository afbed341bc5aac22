"""A reinforcement-learning worker as verl sets it up: Ray actors, one per rank, with models of several roles in each process,
``LOCAL_RANK`` 0 everywhere, and variables that travel by ``runtime_env``. The models are tiny, the set-up is the real one.

    python train_ray.py --out traces
    fsdptrace report traces
"""

from __future__ import annotations

import argparse
import os
import socket
from typing import Any

WORLD = 2


class Worker:
    """One rank: an actor that is trained, a critic that is trained, and a reference that is only asked."""

    def __init__(self, rank: int, port: int) -> None:
        import torch
        import torch.distributed as dist

        os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.set_num_threads(1)
        dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
        torch.manual_seed(0)
        self.actor, self.critic, self.reference = self._model(), self._model(), self._model()
        self.reference.requires_grad_(False)
        self.actor_optimizer = torch.optim.AdamW(self.actor.parameters(), lr=1e-3)
        self.critic_optimizer = torch.optim.AdamW(self.critic.parameters(), lr=1e-3)

    def _model(self) -> Any:
        """Checkpointed blocks, each a unit, as ``apply_fsdp2`` of verl wraps them."""
        import torch.nn as nn
        from torch.distributed.fsdp import fully_shard
        from torch.utils.checkpoint import checkpoint

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)])

            def forward(self, x: Any) -> Any:
                for layer in self.layers:
                    x = x + (checkpoint(layer, x, use_reentrant=False) if self.training else layer(x))
                return x

        net = Net()
        for layer in net.layers:
            fully_shard(layer)
        return fully_shard(net)

    def step(self, seed: int) -> float:
        """Rollout, log-probabilities of the reference, values; then an update of critic and actor in two micro-batches each."""
        import torch

        torch.manual_seed(seed)
        batch = torch.randn(8, 32)
        for model in (self.actor, self.critic, self.reference):
            model.eval()
            with torch.no_grad():
                model(batch)
            model.reshard()
        loss = torch.zeros(())
        for model, optimizer in ((self.critic, self.critic_optimizer), (self.actor, self.actor_optimizer)):
            model.train()
            optimizer.zero_grad()
            for part in batch.chunk(2):
                loss = model(part).square().mean() / 2
                loss.backward()
            optimizer.step()
        weights = {name: value.full_tensor() for name, value in self.actor.state_dict().items()}  # to the inference engine
        assert all(torch.isfinite(value).all() for value in weights.values())
        return float(loss.detach())

    def close(self) -> None:
        """The end of training."""
        import torch.distributed as dist

        dist.destroy_process_group()


def main() -> None:
    """Trains a few steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="record, with the files there")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()

    import ray

    variables = {"FSDPTRACE": "1", "FSDPTRACE_OUT": os.path.abspath(options.out)} if options.out else {}
    ray.init(num_cpus=WORLD, include_dashboard=False, runtime_env={"env_vars": variables}, log_to_driver=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    remote = ray.remote(num_cpus=1)(Worker)
    workers = [remote.remote(rank, port) for rank in range(WORLD)]
    for seed in range(options.steps):
        losses = ray.get([worker.step.remote(seed) for worker in workers])
    ray.get([worker.close.remote() for worker in workers])
    print(f"trained {options.steps} steps; loss {losses[0]:.6f} on rank 0")
    ray.shutdown()


if __name__ == "__main__":
    main()
