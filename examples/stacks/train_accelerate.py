"""A loop of Accelerate with FSDP2: a tiny Llama or Qwen3-MoE, random tokens, gradient checkpointing and accumulation.

Knows nothing of fsdptrace:

    fsdptrace run --out traces -- accelerate launch --config_file fsdp2.yaml train_accelerate.py qwen3-moe
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def main() -> None:
    """Trains for a few steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("llama", "qwen3-moe"))
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = (
        LlamaForCausalLM(LlamaConfig(**SIZES))
        if options.model == "llama"
        else Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS))
    )
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = [torch.randint(0, 128, (16,)) for _ in range(options.steps * 2 * 2 * accelerator.num_processes)]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(tokens, batch_size=2))
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"{type(model).__name__}: loss {loss.item():.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
