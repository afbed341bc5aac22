"""``unsharded-budget``: more bytes are open or pending than the budget allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.text import size


class UnshardedBudget(Rule):
    name: ClassVar[str] = "unsharded-budget"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = "bytes open or pending exceed `budget_bytes`"
    explanation: ClassVar[str] = (
        "A limit of your own on what may be gathered at one time, in bytes. Reported at the unshard that exceeds it, with the "
        "groups that hold most: the first such event of a step is where memory starts to climb. With the rule's option "
        "`allocated_bytes` the accelerator's allocator is held to a limit as well, where it is read: at unit boundaries of steps "
        "that are written with all their events."
    )
    example: ClassVar[str] = 'fsdptrace.record(model, budget_bytes=2 << 30, on_violation={"unsharded-budget": "raise"})'
    mend: ClassVar[str] = (
        "Free what is not needed (`unit.reshard()`, `reshard_after_forward=True`), prefetch fewer units ahead, wrap smaller units."
    )
    silent: ClassVar[str] = "anything within the budget; without `budget_bytes` the rule never fires"
    cost: ClassVar[str] = "one comparison per unshard"
    opt_in: ClassVar[bool] = True
    options: ClassVar[Mapping[str, Any]] = {"budget_bytes": None, "allocated_bytes": None}

    def configure(self, options: Mapping[str, Any]) -> None:
        self._budget: int | None = options["budget_bytes"]
        self._allocated: int | None = options["allocated_bytes"]

    def memory(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        tracker = self.tracker
        if self._allocated is None or a <= self._allocated:
            return
        state = tracker.groups[group]
        grown = sorted(tracker.grown.items(), key=lambda item: -item[1])[:3]
        most = ", ".join(f"{tracker.name(other)} +{size(more)}" for other, more in grown)
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, group, state.fqn, tracker.step_number,
                f"The allocator has given out {size(a)} at event {seq} (unit {state.name}), limit {size(self._allocated)}; "
                f"{size(tracker.held)} of it are gathered parameters." + (f" In this step it grew most at {most}." if most else ""),
                "If gathered parameters are the most of it: unit.reshard(), reshard_after_forward=True, fewer units prefetched "
                "ahead. If not, it is activations or gradients: activation checkpointing, a smaller batch.",
                (seq,), a, "allocator",
            )
        )  # fmt: skip

    def unshard(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        tracker = self.tracker
        if self._budget is None or e % 4 or tracker.held <= self._budget:
            return
        most = sorted((g for g in tracker.groups if g.open or g.pending), key=lambda g: -g.bytes)
        holders = ", ".join(f"{g.name} {size(g.bytes)}" for g in most[:4]) + (
            f" and {len(most) - 4} more" if len(most) > 4 else ""
        )
        state = tracker.groups[group]
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, group, state.fqn, tracker.step_number,
                f"{size(tracker.held)} of parameters are gathered since event {seq} (unshard of {state.name}), budget "
                f"{size(self._budget)}. Open or pending: {holders}.",
                "Free units that are done (unit.reshard(), reshard_after_forward=True), prefetch fewer units ahead, or raise "
                "budget_bytes.",
                (*(g.opened for g in most[:4] if g.opened != seq), seq), tracker.held, "",
            )
        )  # fmt: skip
