"""``write-to-temporary``: something was changed on a gathered copy, and FSDP2 gathers it anew."""

from __future__ import annotations

from typing import ClassVar

from fsdptrace.checks.facts import FactRule


class WriteToTemporary(FactRule):
    name: ClassVar[str] = "write-to-temporary"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = (
        "when a group closes, a gathered copy's requires_grad, hooks, values, or a gradient that the user set or cleared differ "
        "from when it was opened, and that change will be lost"
    )
    explanation: ClassVar[str] = (
        "While a unit is open its modules hold gathered copies: after an eval pass (the root), after `unshard()`, between forward "
        "and backward with reshard_after_forward=False. What is done to them goes with them. Freezing a parameter there does not "
        "freeze it, and values written there (an initialisation, a codebook that its own forward updates) are gone at the next "
        "gather. FSDP2's own gradients are no such change. Values are seen by the version counter, which writes through `.data` "
        "leave alone; what a forward writes is looked at in the first steps and then every 128th."
    )
    example: ClassVar[str] = (
        "with torch.no_grad():\n    model(batch)                          # leaves the root open\n"
        "model.emb.weight.requires_grad_(False)    # on the copy: trained on all the same"
    )
    mend: ClassVar[str] = (
        "Change parameters while they are sharded: call `unit.reshard()` first (on the root after an eval pass), or do it before "
        "the first forward; write values to the shards (`param.copy_()` on the DTensor, `load_state_dict`)."
    )
    silent: ClassVar[str] = (
        "changes of shards, changes that are taken back before the unit closes, gradients that FSDP2 keeps under no-sync, buffers"
    )
    unseen: ClassVar[str] = "gathered copies written through `.data` or through numpy, which bump no version counter"
    cost: ClassVar[str] = (
        "a look at each parameter of a unit that a pass left open, and a version counter per parameter in a few steps"
    )

    def requires_grad_of_copy(self, seq: int, group: int, name: str, other: int, detail: str, size: int) -> None:
        """See :class:`FactRule`."""
        call = f"requires_grad_({detail})"
        self._say(seq, group, name, f"{call} was called on its gathered copy", f"call {call} again", "requires_grad")

    def hooks_of_copy(self, seq: int, group: int, name: str, other: int, detail: str, size: int) -> None:
        """See :class:`FactRule`."""
        self._say(
            seq, group, name, "a hook was registered on its gathered copy, where it sees this rank's whole gradient and not the reduced one",
            "register the hook", "hooks",
        )  # fmt: skip

    def copy_written(self, seq: int, group: int, name: str, other: int, detail: str, size: int) -> None:
        """See :class:`FactRule`."""
        where = f" {detail}" if detail else ""
        self._say(
            seq, group, name, f"its gathered copy was written to{where}", "write to the shard (it is a DTensor)", "values", size
        )

    def gradient_of_copy(self, seq: int, group: int, name: str, other: int, detail: str, size: int) -> None:
        """See :class:`FactRule`."""
        self._say(
            seq, group, name, f"the gradient of its gathered copy was {detail} by hand", "do it on the shard's .grad", "grad"
        )

    def _say(self, seq: int, group: int, name: str, what: str, again: str, cause: str, size: int = 0) -> None:
        state = self.tracker.groups[group]
        on = state.fqn or "model"
        evidence = (state.opened, seq) if state.opened else (seq,)
        self.say(
            group,
            f"{name} (of {self.unit(group)}): {what} while the unit was open (since event {state.opened}; seen at event {seq}). The next "
            "gather makes the copy anew from the shard.",
            f"Call {on}.reshard() first and {again} then, while the unit is sharded.",
            evidence, f"{cause} {name}", bytes=size,
        )  # fmt: skip
