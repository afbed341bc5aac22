"""transformers.Trainer with FSDP2 and a tiny Llama: gradient checkpointing, accumulation, evaluation and checkpoints between.

fsdptrace run --out traces -- torchrun --nproc-per-node=2 train_trainer.py
torchrun --nproc-per-node=2 train_trainer.py --callback traces
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def main() -> None:
    """Trains for a few steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--callback", metavar="DIR", help="record by the callback, with the files there")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.config.use_cache = False
    tokens = [torch.randint(0, 128, (16,)) for _ in range(64)]
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=2,
            eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3, report_to="none", disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            fsdp=True, fsdp_config={"version": 2, "reshard_after_forward": True, "activation_checkpointing": True},
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8])
        if options.callback:
            from fsdptrace.integrations import TransformersCallback

            trainer.add_callback(TransformersCallback(trainer, out=options.callback))
        trainer.train()
        gathers = [entry["fsdp/gathers"] for entry in trainer.state.log_history if "fsdp/gathers" in entry]
        if trainer.is_world_process_zero():
            print(f"trained {trainer.state.global_step} steps; gathers logged: {gathers}")
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
