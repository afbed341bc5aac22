"""``optimizer-owns-temporary``: an optimizer holds a gathered copy instead of the shard."""

from __future__ import annotations

from typing import ClassVar

from fsdptrace.checks.facts import FactRule
from fsdptrace.checks.text import count


class OptimizerOwnsTemporary(FactRule):
    name: ClassVar[str] = "optimizer-owns-temporary"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = (
        "an optimizer holds a parameter that is a gathered copy, or that the model no longer has, not the shard"
    )
    explanation: ClassVar[str] = (
        "While a unit is open, `model.parameters()` gives its gathered copies: an eval pass leaves the root open, so that an "
        "optimizer built after it steps tensors that are overwritten at the next gather. The parameters never learn, their "
        "gradients pile up, and nothing is raised. So does one that was built before `fully_shard`, which puts shards into the "
        "place of parameters (seen from torch 2.13 on), or before `load_state_dict(assign=True)`."
    )
    example: ClassVar[str] = (
        "with torch.no_grad():\n    model(batch)                                  # leaves the root open\n"
        "optimizer = torch.optim.AdamW(model.parameters())  # the root's are copies"
    )
    mend: ClassVar[str] = (
        "Build the optimizer after `fully_shard` and before the first forward, or call `model.reshard()` on the root before you "
        "collect parameters."
    )
    silent: ClassVar[str] = "optimizers built while everything is sharded, parameters of modules that are no units"
    cost: ClassVar[str] = "a look at an optimizer's parameters when it first steps, and when they change"

    def copy_in_optimizer(self, seq: int, group: int, name: str, other: int, detail: str, size: int) -> None:
        """See :class:`FactRule`."""
        state = self.tracker.groups[group]
        on = state.fqn or "model"
        self.say(
            group,
            f"{detail} holds a gathered copy of {name} (of {self.unit(group)}) and not its shard (event {seq}): it was built, or given "
            "the parameter, while the unit was open. What it steps is overwritten at the next gather.",
            f"Build the optimizer while the unit is sharded: before the first forward, or after {on}.reshard().",
            (seq,), name, bytes=size,
        )  # fmt: skip

    def original_in_optimizer(self, seq: int, group: int, name: str, other: int, detail: str, size: int) -> None:
        """See :class:`FactRule`."""
        many, _, title = detail.partition(" ")
        self.say(
            group,
            f"{title} was built before fully_shard: it holds {count(int(many), 'parameter')} that fully_shard replaced by shards "
            f"({name}; event {seq}). It steps tensors that nothing uses, and the shards never learn.",
            f"Build the optimizer after fully_shard: torch.optim.{title.partition('#')[0]}(model.parameters(), ...).",
            (seq,), title, bytes=size,
        )  # fmt: skip

    def old_shard_in_optimizer(self, seq: int, group: int, name: str, other: int, detail: str, size: int) -> None:
        """See :class:`FactRule`."""
        many, _, title = detail.partition(" ")
        self.say(
            group,
            f"{title} holds {count(int(many), 'shard')} that were replaced since ({name}; event {seq}), as "
            "load_state_dict(assign=True) does. It steps tensors that nothing uses, and the shards that there are never learn.",
            "Build the optimizer after that, or load into the shards that there are: set_model_state_dict, or assign=False.",
            (seq,), title, bytes=size,
        )  # fmt: skip
