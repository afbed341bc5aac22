"""``mixed-dtype-unit``, ``split-tie`` and ``inference-buffer``: what is wrong with a wrap before it trains."""

from __future__ import annotations

from typing import ClassVar

from fsdptrace.checks.facts import FactRule
from fsdptrace.model_map import show_name


class MixedDtypeUnit(FactRule):
    name: ClassVar[str] = "mixed-dtype-unit"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = "trainable parameters of one group have different original dtypes, where the release forbids it"
    explanation: ClassVar[str] = (
        "FSDP2 reduces a unit's gradients in one buffer and asserts, in the first forward and without names, that its trainable "
        "parameters have one dtype (`FSDP expects uniform original parameter dtype`); older releases ask it of frozen ones too. "
        "Adapters in fp32 beside weights in bf16 are the usual case. Reported when the first forward begins, before the assertion."
    )
    example: ClassVar[str] = (
        "block.linear.to(torch.bfloat16)           # trained as well\n"
        "block.lora_a = nn.Linear(dim, 8)          # fp32, in the same unit\n"
        "fully_shard(block)"
    )
    mend: ClassVar[str] = (
        "Cast the unit's parameters to one dtype before `fully_shard` (`MixedPrecisionPolicy(param_dtype=torch.bfloat16)` computes in "
        "bf16 with fp32 parameters), freeze the others, or give them a unit of their own."
    )
    silent: ClassVar[str] = "a frozen base in another dtype where the release allows it, dtypes that differ between units"
    cost: ClassVar[str] = "once, before the first forward"

    def dtype(self, seq: int, group: int, name: str, other: int, detail: str, size: int) -> None:
        """See :class:`FactRule`."""
        state = self.tracker.groups[group]
        self.say(
            group,
            f"the parameters of {state.name} that FSDP2 wants in one dtype have {detail}: {name}{_at(seq)}. The first forward "
            "fails with `FSDP expects uniform original parameter dtype`.",
            "Cast them to one dtype before fully_shard, freeze those of the other dtype (torch 2.13 looks at trainable ones alone), or "
            "call fully_shard on the modules that hold them first.",
            (seq,) if seq else (), "dtype",
        )  # fmt: skip


class SplitTie(FactRule):
    name: ClassVar[str] = "split-tie"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = "a parameter tied before sharding lies in two groups"
    explanation: ClassVar[str] = (
        "Two modules that share a parameter (embedding and head) share it no longer when two `fully_shard` calls shard them: each "
        "unit has its own copy, and they drift apart. torch 2.13 raises a ValueError in the first forward; older releases train on, "
        "and keep no mark by which it could be seen afterwards."
    )
    example: ClassVar[str] = (
        "model.head.weight = model.emb.weight\nfully_shard(model.head)\nfully_shard(model)     # emb is the root's: the tie is cut"
    )
    mend: ClassVar[str] = "`fully_shard([model.emb, model.head])`, one unit for both, or leave both to the root."
    silent: ClassVar[str] = "ties inside one unit, modules used twice"
    cost: ClassVar[str] = "once, before the first forward"

    def tied(self, seq: int, group: int, name: str, other: int, detail: str, size: int) -> None:
        """See :class:`FactRule`."""
        mine, its = self.tracker.groups[group], self.tracker.groups[other]
        self.say(
            group,
            f"{name} and {detail} were one parameter before fully_shard and lie in two units now, {mine.name} and {its.name}"
            f"{_at(seq)}: each has its own copy, and they will drift apart.",
            f"Call fully_shard([...]) with both modules, so that they are one unit, or leave both to the unit around them; do not wrap "
            f"{show_name(mine.fqn if mine.fqn else its.fqn)} alone.",
            (seq,) if seq else (), name,
        )  # fmt: skip


class InferenceBuffer(FactRule):
    name: ClassVar[str] = "inference-buffer"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = "a group's gather buffers were made under `inference_mode` and training follows"
    explanation: ClassVar[str] = (
        "FSDP2 makes a unit's buffers in its first forward and keeps them. Made under `torch.inference_mode()` they are inference "
        "tensors: every later forward outside it fails with `Inplace update to inference tensor outside InferenceMode`, or its "
        "backward with `Inference tensors cannot be saved for backward`."
    )
    example: ClassVar[str] = (
        "with torch.inference_mode():\n    model(batch)              # the very first forward\nmodel(batch).sum().backward()"
    )
    mend: ClassVar[str] = "Use `torch.no_grad()` for the first forward; once buffers are there, inference_mode does no harm."
    silent: ClassVar[str] = "inference_mode after a first forward outside it, a model that only ever runs under inference_mode"
    cost: ClassVar[str] = "once per unit, and after each pass under inference_mode for units that are not known to be fine"

    def inference_buffer(self, seq: int, group: int, name: str, other: int, detail: str, size: int) -> None:
        """See :class:`FactRule`."""
        state = self.tracker.groups[group]
        self.say(
            group,
            f"the buffers of {state.name} ({name}) were made under torch.inference_mode(), and a forward outside it begins now (event "
            f"{seq}): it fails, or its backward does.",
            "Run the model's first forward under torch.no_grad() instead of torch.inference_mode().",
            (seq,), "buffers",
        )  # fmt: skip


def _at(seq: int) -> str:
    return f" (event {seq})" if seq else ""  # fsdptrace.inspect() looks before there are events
