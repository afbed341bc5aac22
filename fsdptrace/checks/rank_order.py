"""``rank-order``: what it says; the looking is done by :mod:`fsdptrace.watch`, live, and by ``postmortem`` and ``check``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdptrace.checks.base import Rule, Violation
from fsdptrace.parting import item_text
from fsdptrace.places import ranks_text
from fsdptrace.rank_order import Item


class RankOrder(Rule):
    """See the class variables."""

    name = "rank-order"
    severity = "error"
    summary = "Two ranks of a process group issue different collectives at the same place."
    explanation = (
        "Collectives of a process group are paired by their order alone. When ranks part ways, they hang if the sizes differ, "
        "and if the sizes happen to agree one module's parameters or gradients are silently mixed into another's. Each rank keeps "
        "a rolling checksum of what it issued (kind, module, the parameters in a reduction); a thread of its own compares them "
        "through the default c10d store, never by a collective, also while training is stuck."
    )
    example = (
        "# rank 1 has no image in its batch and skips the sharded vision tower\n"
        "h = text if image is None else text + model.visual(image)\n"
        "loss = model.layers(h).sum()"
    )
    mend = (
        "Run the same units in the same order on every rank: pass a dummy input through the module where there is none, and let "
        "every rank do the same number of passes. Where ranks use different parameters of one unit, call "
        "set_reduce_scatter_unused_params(True) on it (torch 2.13 and newer)."
    )
    silent = (
        "Units that all ranks skip; ranks that are ahead or behind; experts without a token where unused parameters are filled "
        "in; ranks that record other parts of the run; ranks that do not record."
    )
    cost = "nothing on the training thread; the drain thread spends about 0.2 µs per event more"


class RankStall(Rule):
    """See the class variables."""

    name = "rank-stall"
    severity = "error"
    summary = "No rank of a process group has moved for `stall_seconds`, or one waits for a rank that is gone."
    explanation = (
        "A hang shows on every rank but one as a collective that never ends; the rank that matters is the other one. The lowest "
        "rank that still breathes says for each rank where it stands: the collective it is in, its last module, the line of the "
        "program, or how it ended. Said once, to the log and the file."
    )
    example = "if rank == 0:\n    time.sleep(1000)      # or a data loader that is stuck, or a rank that was killed\nloss = model(batch).sum()"
    mend = (
        "Look at the rank that is not in the collective: the line named there is what the others wait for. "
        "`fsdptrace postmortem DIR` shows the same from the files, py-spy its whole stack."
    )
    silent = (
        "Ranks that wait less than `stall_seconds` (300 by default); a pause of all ranks at the same place outside of "
        "collectives, as for a checkpoint, is `info`."
    )
    cost = "nothing on the training thread"


@dataclass(frozen=True, slots=True)
class Side:
    """What some ranks issued: their ranks, the collective, the names of the group's parameters; of the first of them the step
    and the ``seq`` (0 while it is inside)."""

    ranks: tuple[int, ...]
    item: Item
    params: tuple[str, ...]
    step: int
    seq: int

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "ranks": list(self.ranks), "item": self.item.to_json(), "params": list(self.params), "step": self.step,
            "seq": self.seq,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Side:
        """The inverse of :meth:`to_json`."""
        return cls(tuple(data["ranks"]), Item(*data["item"]), tuple(data["params"]), data["step"], data["seq"])


def parted(sides: tuple[Side, Side], process_group: str, mine: int, model: int, group: int | None) -> Violation:
    """The violation as the rank of side ``mine`` records it. ``model`` and ``group`` are that rank's numbers."""
    said = [f"{ranks_text(side.ranks)} issued {item_text(side.item, side.params)}" for side in sides]
    where = [
        f"rank {side.ranks[0]}: step {side.step}, " + (f"event {side.seq}" if side.seq else "not left yet") for side in sides
    ]
    name, _, ranks = process_group.rpartition(":")
    own = sides[mine]
    return Violation(
        "rank-order", "error", model, group, own.item.fqn, own.step,
        f"{said[0]} where {said[1]} ({'; '.join(where)}). It is the first difference in process group {name} of ranks {ranks}.",
        _hint(sides[0].item, sides[1].item), (own.seq,) if own.seq else (), 0, process_group,
    )  # fmt: skip


def _hint(a: Item, b: Item) -> str:
    if (a.kind, a.root, a.fqn) == (b.kind, b.root, b.fqn):
        return (
            "Ranks used different parameters of one unit, so that their reductions have other sizes, or add up gradients that do "
            f"not belong together. Call {a.fqn or 'model'}.set_reduce_scatter_unused_params(True) (torch 2.13 and newer), or let "
            "every rank use all of them (adding 0 * parameter.sum() to the loss)."
        )
    if a.fqn == b.fqn:
        return (
            f"Ranks are in different passes of {a.fqn or 'the root'}: let every rank run the same number of forwards and "
            "backwards, with the same switches (set_requires_gradient_sync, set_reshard_after_backward)."
        )
    return (
        "A rank skipped a module, ran another one, or another number of passes: let every rank run the same units in the same "
        f"order (a dummy input through {a.fqn or b.fqn} where a rank has none). What is gathered or reduced from here on belongs "
        "to different modules."
    )
