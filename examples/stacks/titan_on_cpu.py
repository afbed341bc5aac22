"""Runs torchtitan's own training program on the CPU, over gloo: ``titan_on_cpu.py [ARGUMENTS OF torchtitan.train]``.

Without arguments: four steps of two micro-batches of the Llama debug model, full activation checkpointing.

torchtitan asks for an accelerator. This gives it the CPU in its place, and changes what a CPU or gloo cannot do:

* ``torchtitan.tools.utils.device_type`` and ``device_module``: the CPU, with a memory monitor that reads zeros;
* attention: its ``ScaledDotProductAttention`` for FlexAttention, which has no backward on a CPU; documents that share a row
  are not masked from each other;
* gradients: summed, where FSDP would ask the group for a scaled sum, which gloo lacks;
* its change of the groups' timeouts after the first step is left out: the barrier before it names devices, which gloo refuses;
* tokenizer and text: made here, in ``titan-assets``, as the wheel brings none.

``Trainer``, the model, its wrap, activation checkpointing, loss, optimizer and loader are torchtitan's. For trying things out.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

ASSETS = Path("titan-assets")
DEBUG = (
    f"--module llama3 --config llama3_debugmodel --hf-assets-path {ASSETS} --dataloader.dataset-path {ASSETS}/text "
    "--parallelism.spmd-backend partial_dtensor --training.steps 4 --training.seq-len 128 --training.local-batch-size 2 "
    "--training.global-batch-size 8 activation-checkpoint:full"
)  # partial_dtensor: FSDP2 of torch 2.13 refuses the default's parameters


def cpu() -> Any:
    """``torch.cpu`` with what the Trainer and its metrics ask of a device module."""
    module = types.SimpleNamespace(**{name: getattr(torch.cpu, name) for name in torch.cpu.__all__})
    module.set_device = lambda device: None
    module.get_device_name = lambda device=None: "cpu"
    module.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=1 << 30)
    module.memory_stats = lambda device=None: {}
    module.reset_peak_memory_stats = module.empty_cache = lambda *args: None
    module.manual_seed = module.manual_seed_all = torch.manual_seed
    return module


def assets() -> None:
    """A byte-level tokenizer and a few lines of text, where torchtitan looks for its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    (ASSETS / "text").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(ASSETS / "tokenizer.json"))
    (ASSETS / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    lines = (json.dumps({"text": f"{n} units are gathered, used and freed again. " * 8}) for n in range(64))
    (ASSETS / "text" / "train.jsonl").write_text("\n".join(lines))


def main() -> None:
    """Changes torchtitan as said above, then starts it."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_CACHE", str(ASSETS / "cache"))
    if len(sys.argv) == 1:
        sys.argv += DEBUG.split()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        assets()

    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", cpu()
    utils.get_local_device = lambda: torch.device("cpu")

    from torchtitan import train
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.models.common import attention

    class Attention(attention.ScaledDotProductAttention):
        def forward(self, *args: Any, attention_masks: Any = None, **kwargs: Any) -> torch.Tensor:
            return super().forward(*args, **kwargs)

    attention.FlexAttention.Config._owner = Attention
    divide = FSDPModule.set_gradient_divide_factor

    def summed(self: FSDPModule, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = summed
    dist_utils.set_pg_timeouts = lambda *args, **kwargs: None
    train.main()


if __name__ == "__main__":
    main()
