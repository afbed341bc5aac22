"""``flags-at-step``: an optimizer steps while a switch that belongs to micro-batches is still thrown."""

from __future__ import annotations

from typing import Any, ClassVar

from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.state import ALL_REDUCE, RESHARD_AFTER_BACKWARD, SYNC
from fsdptrace.checks.text import count

_SWITCHES = (
    (SYNC, "set_requires_gradient_sync(False)", "their gradients were not reduced in the last backward"),
    (ALL_REDUCE, "set_requires_all_reduce(False)", "their gradients were not summed over the replicas in the last backward"),
    (RESHARD_AFTER_BACKWARD, "set_reshard_after_backward(False)", "they stay gathered over the step"),
)


class FlagsAtStep(Rule):
    name: ClassVar[str] = "flags-at-step"
    severity: ClassVar[str] = "warning"
    summary: ClassVar[str] = (
        "at the step a switch is not back: gradient sync, all-reduce, reshard after backward, last backward"
    )
    explanation: ClassVar[str] = (
        "These switches are thrown for all micro-batches but the last one. Left thrown, or set back on the root alone, they "
        "make the optimizer step without gradients, with those of one replica, or on units that keep old copies. Looked at when "
        "an optimizer steps, for the groups whose parameters it holds; where none steps, at the step boundary."
    )
    example: ClassVar[str] = (
        "for i, batch in enumerate(batches):\n"
        "    model.set_requires_gradient_sync(False)      # and never True for the last one\n"
        "    model(batch).sum().backward()\n"
        "optimizer.step()"
    )
    mend: ClassVar[str] = (
        "Before the last micro-batch: `model.set_requires_gradient_sync(True)`, `model.set_is_last_backward(True)`, "
        "`model.set_reshard_after_backward(True)`, with `recurse=True`, which is the default."
    )
    silent: ClassVar[str] = "switches that are back at the step, groups of other optimizers, frozen groups"
    cost: ClassVar[str] = "one comparison per group and optimizer step"

    def configure(self, options: Any) -> None:
        self._owned: list[int] = []
        self._stepped = False
        self._pending_last = 0
        self.tracker.told.stepped_switched = lambda state: self._owned.append(state.id)

    def backward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self._pending_last = seq if b and not a else 0

    def optimizer_step(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        owned, self._owned = self._owned, []
        if self.tracker.in_backward:  # an optimizer in the backward steps before switches can be back
            return
        self._stepped = True
        self._look(seq, owned, "when the optimizer stepped")

    def step(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        # Once an optimizer has stepped, optimizers say what a step is; a boundary may cut an accumulation.
        if not self._stepped:
            infos = self.tracker.map.groups
            trained = [g.id for g in self.tracker.groups if g.flags & 7 != 7 and infos[g.id].trainable and g.grads]
            self._look(seq, trained, "at the end of the step")
        self._pending_last = 0

    def _look(self, seq: int, groups: list[int], when: str) -> None:
        tracker = self.tracker
        for bit, call, effect in _SWITCHES:
            off = [group for group in groups if not tracker.groups[group].flags & bit]
            if bit == ALL_REDUCE:  # set_requires_gradient_sync(False) throws both
                infos = tracker.map.groups
                off = [g for g in off if tracker.groups[g].flags & SYNC and infos[g].replicate_world > 1]
            if off:
                self._say(seq, off, call, f"{count(len(off), 'unit')} ({self._names(off)})", effect, when)
        if self._pending_last:
            self._say(seq, [], "set_is_last_backward(False)", "the model", "gathers that are pending stay pending", when)
            self._pending_last = 0

    def _names(self, groups: list[int]) -> str:
        names = ", ".join(self.tracker.groups[group].name for group in groups[:4])
        return names + (f" and {len(groups) - 4} more" if len(groups) > 4 else "")

    def _say(self, seq: int, groups: list[int], call: str, who: str, effect: str, when: str) -> None:
        tracker = self.tracker
        state = tracker.groups[groups[0]] if groups else None
        verb = "were" if len(groups) > 1 else "was"
        back = call.replace("False", "True")
        on = "model" if state is None or len(groups) > 1 else (state.fqn or "model")
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, state.id if state else None, state.fqn if state else "",
                tracker.step_number, f"{who} {verb} still under {call} {when} (event {seq}): {effect}.",
                f"Call {on}.{back} before the last micro-batch (with recurse=True, the default, so that it reaches all units).",
                (self._pending_last, seq) if state is None else (seq,), 0, call,
            )
        )  # fmt: skip
