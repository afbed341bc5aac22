"""``uncovered-parameter``: a parameter that no unit shards is trained, each rank for itself."""

from __future__ import annotations

from typing import ClassVar

from fsdptrace.checks.facts import FactRule
from fsdptrace.checks.text import size as show_size


class UncoveredParameter(FactRule):
    name: ClassVar[str] = "uncovered-parameter"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = (
        "a trainable parameter belongs to no group while the mesh has more than one rank; those in a wrapped module (given to "
        "`ignored_params`, or added later) are a warning"
    )
    explanation: ClassVar[str] = (
        "`fully_shard` shards what lies in the module it is given. Where only the blocks are wrapped, the embedding, the last norm and "
        "the head stay plain parameters: each rank has its own, nobody reduces their gradients, and they drift apart from the first "
        "step on. Reported when such a parameter has a gradient: at the end of a backward, or, where its module is not part of "
        "what is recorded, when an optimizer steps it beside shards."
    )
    example: ClassVar[str] = (
        "for block in model.blocks:\n    fully_shard(block)\n"
        "# and nobody called fully_shard(model): model.emb and model.head are on their own"
    )
    mend: ClassVar[str] = (
        "Call `fully_shard(model)` on the root last. Parameters that you reduce yourself: pass them as `ignored_params`, and do it in a "
        "gradient hook, which is recognised."
    )
    silent: ClassVar[str] = (
        "frozen parameters, those without a gradient, DTensors of another parallelism, parameters under DistributedDataParallel or with "
        "a gradient hook, a mesh of one rank"
    )
    cost: ClassVar[str] = "nothing where there are none; else a look at their `.grad` at the end of a backward"

    def outside_with_gradient(self, seq: int, group: int, name: str, other: int, detail: str, size: int) -> None:
        """See :class:`FactRule`."""
        self._say(
            seq,
            name,
            int(detail),
            size,
            "got gradients",
            "Call fully_shard on the module that holds them, as a rule the root, last.",
        )

    def outside(self, seq: int, group: int, name: str, other: int, detail: str, size: int) -> None:
        """See :class:`FactRule`."""
        self._say(seq, name, int(detail), size, "", "Call fully_shard on the module that holds them, as a rule the root, last.")

    def ignored(self, seq: int, group: int, name: str, other: int, detail: str, size: int) -> None:
        """See :class:`FactRule`."""
        self._say(
            seq, name, int(detail), size, "though they lie in a wrapped module: given to ignored_params, or added after it",
            "Reduce their gradients in a hook (param.register_hook), or wrap the model after all its parameters are there.", "warning",
        )  # fmt: skip

    def outside_in_optimizer(self, seq: int, group: int, name: str, other: int, detail: str, size: int) -> None:
        """See :class:`FactRule`."""
        number, _, optimizer = detail.partition(" ")
        self._say(
            seq, name, int(number), size, f"got gradients and were stepped by {optimizer} beside sharded parameters",
            "Call fully_shard on the module that holds them, as a rule the root, last.",
        )  # fmt: skip

    def ignored_with_gradient(self, seq: int, group: int, name: str, other: int, detail: str, size: int) -> None:
        """See :class:`FactRule`."""
        self._say(
            seq, name, int(detail), size, "got gradients though they lie in a wrapped module: given to ignored_params, or added after it",
            "Reduce their gradients in a hook (param.register_hook), or wrap the model after all its parameters are there.",
            "warning",
        )  # fmt: skip

    def _say(self, seq: int, names: str, number: int, size: int, what: str, hint: str, severity: str = "error") -> None:
        them = "their gradients, and they differ" if number > 1 else "its gradients, and it differs"
        verb = "belong" if number > 1 else "belongs"
        what = what if number > 1 else what.replace("were", "was").replace("they lie", "it lies")
        link = "" if not what else " " if what.startswith("though") else " and "
        seen = f" (event {seq})" if seq else ""
        self.say(
            -1,
            f"{names} ({show_size(size)}) {verb} to no unit of fully_shard{link}{what}{seen}. Nobody reduces {them} from rank to rank.",
            hint, (seq,) if seq else (), names, severity=severity, bytes=size,
        )  # fmt: skip
