"""verl's own FSDP2 engine and worker on the CPU: Ray, one ``TrainingWorker`` per rank, a tiny Llama, ``sft_loss``.

verl has no CPU among its platforms. Its registry of platforms takes new ones, and so gets one here: the CPU, with gloo; the
engine is the one that it registers for CUDA (``VERL_ENGINE_DEVICE``).
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path
from typing import Any

import ray
import torch

RANKS, STEPS = 2, 4


def use_cpu() -> None:
    """Registers the CPU as a platform of verl; before anything else of verl is imported."""
    import types
    from contextlib import nullcontext

    from verl.plugin.platform.platform_cuda import PlatformCUDA
    from verl.plugin.platform.platform_manager import set_platform

    class Cpu(PlatformCUDA):
        device_name = "cpu"
        vendor_name = "cpu"
        device_module = types.SimpleNamespace(
            **{name: getattr(torch.cpu, name) for name in torch.cpu.__all__},
            max_memory_allocated=lambda *args: 0, max_memory_reserved=lambda *args: 0, memory_allocated=lambda *args: 0,
            memory_reserved=lambda *args: 0, empty_cache=lambda: None,
            get_device_name=lambda: "CPU", mem_get_info=lambda *args: (0, 0),
        )  # fmt: skip

        def is_available(self) -> bool:
            return True

        def current_device(self) -> str:
            return "cpu"

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: Any) -> None:
            pass

        def synchronize(self, device_index: Any = None) -> None:
            pass

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        manual_seed_all = manual_seed

        def empty_cache(self) -> None:
            pass

        def communication_backend_name(self) -> str:
            return "gloo"

        def nvtx_range(self, msg: str) -> Any:
            return nullcontext()

    set_platform(Cpu())


@ray.remote(num_cpus=0.5)
class Rank:
    """One rank; verl makes an actor of the worker itself."""

    def train(self, rank: int, port: int, model: str) -> list[float]:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port), VERL_ENGINE_DEVICE="cuda", WG_BACKEND="ray",
        )  # fmt: skip
        torch.set_num_threads(1)
        use_cpu()
        torch.distributed.init_process_group("gloo")
        worker = made(model)
        worker.reset()
        return [steps(worker, seed, rank) for seed in range(STEPS)]


def made(model: str) -> Any:
    """verl's worker around its FSDP2 engine, with gradient checkpointing."""
    from functools import partial

    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import sft_loss

    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=model, load_tokenizer=False, use_remove_padding=False, enable_gradient_checkpointing=True,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2", use_torch_compile=False, use_dynamic_bsz=False, micro_batch_size_per_gpu=2,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}, use_remove_padding=False,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=STEPS),
        checkpoint_config=CheckpointConfig(),
    )  # fmt: skip
    worker = TrainingWorker(config)
    worker.set_loss_fn(partial(sft_loss, config=None))
    return worker


def steps(worker: Any, seed: int, rank: int) -> float:
    """One optimizer's step of two micro-batches; its loss."""
    from verl.utils import tensordict_utils as tu

    random = torch.Generator().manual_seed(seed * RANKS + rank)
    rows = [torch.randint(0, 128, (length,), generator=random) for length in (12, 16, 9, 14)]

    def nested(of: Any) -> torch.Tensor:
        return torch.nested.as_nested_tensor([of(row) for row in rows], layout=torch.jagged)

    data = tu.get_tensordict(
        {
            "input_ids": nested(lambda row: row),
            "position_ids": nested(lambda row: torch.arange(len(row))),
            "loss_mask": nested(torch.ones_like),
        },
        {"temperature": 1.0, "global_token_num": [len(row) for row in rows] * RANKS, "update_lr_scheduler": True},
    )
    output = worker.train_batch(data)
    return float(tu.get(output, "metrics")["loss"])


def main() -> None:
    """Makes the model's folder and the actors, waits for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="record into this folder")
    given = parser.parse_args()
    from transformers import LlamaConfig, LlamaForCausalLM

    path = Path("tiny-llama").absolute()
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
        )
    ).save_pretrained(path)  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"FSDPTRACE": "1", "FSDPTRACE_OUT": str(Path(given.out).absolute())} if given.out else {}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables})
    ranks = [Rank.remote() for _ in range(RANKS)]
    losses = ray.get([actor.train.remote(rank, port, str(path)) for rank, actor in enumerate(ranks)])
    ray.shutdown()
    print("trained", len(losses[0]), "steps; losses", *(f"{loss:.3f}" for loss in losses[0]))


if __name__ == "__main__":
    main()
