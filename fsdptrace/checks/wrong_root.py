"""``wrong-root``: the first unit to run is below another FSDP module, and becomes the root for good."""

from __future__ import annotations

from typing import ClassVar

from fsdptrace.checks.base import Rule, Violation
from fsdptrace.model_map import show_name


class WrongRoot(Rule):
    name: ClassVar[str] = "wrong-root"
    severity: ClassVar[str] = "warning"
    summary: ClassVar[str] = "the first group to run is below another FSDP module of the recorded model"
    explanation: ClassVar[str] = (
        "The first FSDP module whose forward runs becomes the root, with streams, order list and final callback of its own. When "
        "that is a unit inside the model, a later forward of the model itself fails with `FSDP state has already been lazily "
        "initialized`, or its units do not share prefetching and memory."
    )
    example: ClassVar[str] = "model.block(x)    # before the first model(x)"
    mend: ClassVar[str] = (
        "Run the outermost FSDP module first; for work through another method of it: "
        "`register_fsdp_forward_method(model, 'generate')`."
    )
    silent: ClassVar[str] = "a unit called by itself after the first forward of the root, several roots side by side"
    cost: ClassVar[str] = "one comparison per outermost forward"

    def forward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if not d & 4:
            return
        tracker = self.tracker
        unit = tracker.map.units[a]
        above = [u for u in tracker.map.units if u.sharded and u.id != a and unit.fqn and _is_below(unit.fqn, u.fqn)]
        if not above:
            return
        outer = min(above, key=lambda u: len(u.fqn))
        first = unit.groups[0] if unit.groups else None
        name = show_name(outer.fqn)
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, first, unit.fqn, tracker.step_number,
                f"{unit.fqn} ran first (event {seq}) and is the root now, although it lies in {name}, which is an FSDP module too: "
                f"the first forward of {name} will fail, or run without shared prefetching.",
                f"Call the forward of {name} first; for another method use register_fsdp_forward_method({name}, '<method>').",
                (seq,), 0, "root",
            )
        )  # fmt: skip


def _is_below(fqn: str, outer: str) -> bool:
    return not outer or fqn.startswith(f"{outer}.")
