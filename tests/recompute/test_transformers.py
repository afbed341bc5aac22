"""transformers' own Qwen3-MoE under fully_shard with its own gradient checkpointing: healthy, and no alarm.

Not among the test dependencies; ``nox -s tests_transformers`` installs it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("reentrant", [False, True])
def test_qwen3_moe(fake_pg: Any, record: Any, reentrant: bool) -> None:
    mesh = fake_pg(2)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=128, num_experts_per_tok=8,
        max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"checks": None, "on_violation": "raise", "detail": "full"}
    tokens = torch.randint(0, 64, (2, 16))
    with record(model, **options, fingerprint="all", checkpoint_detail="modules") as rec:
        for _ in range(2):
            if reentrant:
                model.enable_input_require_grads()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert rec.faults == 0
    assert [violation for violation in rec.violations if violation.severity != "info"] == []
    names = [event["name"] for event in rec.steps[0] if event.kind == "recompute"]
    assert names == ["model.layers.1", "model.layers.0"]
