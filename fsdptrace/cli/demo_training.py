"""What ``fsdptrace demo`` trains: one rank of a small nested mixture-of-experts model, under the real recorder.

Blocks and, inside them, their experts are FSDP2 units of their own; every block is checkpointed. Run as a module it is one
rank of the demo: it reads a :class:`Job` as JSON from its argument and writes what happened to the job's result file.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

VOCABULARY = 100
DIM = 32
SEQUENCE = 16
BATCH = 2
MENDED = (2, 10)  # the torch release from which on a recomputation leaves the post-forward order alone (PR #164009)
COLLECTIVE_TIMEOUT = 20  # seconds


@dataclass(frozen=True, slots=True)
class Job:
    """What one rank does.

    ``runs`` maps ``"leak"`` and ``"healthy"`` to the run ids to record them under, in the order of training. ``store`` is
    the rendezvous file, ``deadline`` the seconds after which the process ends itself, whatever happens.
    """

    rank: int
    world: int
    layers: int
    steps: int
    out: str
    store: str
    result: str
    deadline: int
    runs: dict[str, str]


@dataclass(slots=True)
class Result:
    """What one rank reports: torch's version, and per run the losses, the trace file and whether the old bookkeeping had
    to be brought back."""

    torch: str
    losses: dict[str, list[float]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, bool] = field(default_factory=dict)


def build(mesh: Any, layers: int) -> Any:
    """The model: ``layers`` checkpointed blocks, each an FSDP2 unit with its experts as a unit inside."""
    import torch
    from torch import nn
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1 = nn.Parameter(torch.randn(4 * DIM, DIM) * 0.02)
            self.w2 = nn.Parameter(torch.randn(DIM, 4 * DIM) * 0.02)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x @ self.w1.T) @ self.w2.T

    class MoE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(DIM, 4)
            self.experts = Experts()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights: torch.Tensor = self.router(x).softmax(-1)
            mixed: torch.Tensor = self.experts(x)
            return mixed * weights[..., :1]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.Linear(DIM, DIM)
            self.moe = MoE()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.attn(x)
            mixed: torch.Tensor = self.moe(x)
            return x + mixed

    class NestedMoE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
            self.layers = nn.ModuleList(Block() for _ in range(layers))
            self.output = nn.Linear(DIM, VOCABULARY)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x: torch.Tensor = self.tok_embeddings(tokens)
            for layer in self.layers:
                x = layer(x)
            logits: torch.Tensor = self.output(x.flatten(0, 1))  # one row per token, and no view of anything
            return logits

    torch.manual_seed(0)
    model = NestedMoE()
    for number in range(layers):
        block: Any = model.layers[number]
        fully_shard(block.moe.experts, mesh=mesh)
        model.layers[number] = checkpoint_wrapper(block)
        fully_shard(model.layers[number], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def say_what_comes_next(model: Any) -> None:
    """The mend for torch 2.9 and older: an explicit prefetch list, so that nothing follows the wrong order.

    In a backward the experts of block N run before block N itself is done, and block N-1 comes next.
    """
    blocks = list(model.layers)
    for number, block in enumerate(blocks):
        experts = block._checkpoint_wrapped_module.moe.experts
        experts.set_modules_to_backward_prefetch([blocks[number - 1] if number else block])


def train(mesh: Any, job: Job, kind: str, result: Result) -> None:
    """Trains ``job.steps`` steps under the recorder, as the run of ``kind``."""
    import torch
    import torch.nn.functional as F

    import fsdptrace
    from fsdptrace.adapters.compat import release_of
    from fsdptrace.adapters.legacy import old_bookkeeping

    with old_bookkeeping() if kind == "leak" else nullcontext(False) as replaced:
        model = build(mesh, job.layers)
        if kind == "healthy" and release_of(str(torch.__version__)) < MENDED:
            say_what_comes_next(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.Generator().manual_seed(1 + job.rank)
        losses = []
        recording = fsdptrace.record(model, out=job.out, run_id=job.runs[kind], on_violation="record", detail="full")
        with recording:
            for _ in range(job.steps):
                tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=data)
                loss: Any = F.cross_entropy(model(tokens), tokens.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        recording.close()
    result.losses[kind] = losses
    result.files[kind] = recording.path
    result.replaced[kind] = bool(replaced)


def work(job: Job) -> Result:
    """One rank: joins the process group and trains every run of the job."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from fsdptrace.adapters.compat import lacks_cpu

    if without := lacks_cpu():
        raise SystemExit(f"{without}; the demo trains on the CPU")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{job.store}", rank=job.rank, world_size=job.world,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT),
    )  # fmt: skip
    result = Result(str(torch.__version__))
    try:
        mesh = init_device_mesh("cpu", (job.world,))
        for kind in job.runs:
            train(mesh, job, kind, result)
    finally:
        dist.destroy_process_group()
    return result


def main() -> None:
    """One rank in a process of its own; ends itself at the deadline even when nobody is left to end it."""
    job = Job(**json.loads(sys.argv[1]))
    signal.alarm(job.deadline)
    result = work(job)
    path = Path(job.result)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(asdict(result)))
    temporary.replace(path)


if __name__ == "__main__":
    main()
