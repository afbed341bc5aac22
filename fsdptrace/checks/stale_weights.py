"""``stale-weights``: a forward computes with a copy that is older than the last change of its own shards."""

from __future__ import annotations

from typing import Any, ClassVar

from fsdptrace import events as ev
from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.state import RESHARD_AFTER_BACKWARD, RESHARD_AFTER_FORWARD, GroupState
from fsdptrace.checks.text import count, size

_BY = {
    "optimizer_step": "an optimizer stepped",
    "load": "a state dict was loaded",
    "write": "its shards were written",
}


class StaleWeights(Rule):
    name: ClassVar[str] = "stale-weights"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = (
        "a forward computes with a copy gathered, or resharded to a smaller mesh, before the last change of one of the group's "
        "own shards"
    )
    explanation: ClassVar[str] = (
        "An open unit is not gathered again, and a unit that reshard_after_forward=N left on a smaller mesh is gathered from "
        "there. When an optimizer, a load or a write changes the shards meanwhile, the next forward computes with the weights "
        "of before and raises nothing: the loss stands still or drifts. Between forward and backward the copy of the forward "
        "is the right one, so that a backward is never reported. Writes by hand are seen by the version counters of the shards, "
        "of units that a pass or a call of unshard() left gathered."
    )
    example: ClassVar[str] = (
        "loss.backward()\n"
        "with torch.no_grad():\n"
        "    model(batch)              # an eval pass leaves the root open\n"
        "optimizer.step()              # changes the shards, not the copy\n"
        "model(batch)                  # computes with the old root"
    )
    mend: ClassVar[str] = (
        "Call `model.reshard()` on what stays open (after an eval pass that is the root) before the parameters change, or give "
        "the root `reshard_after_forward=True`; run evaluation after `optimizer.step()`."
    )
    silent: ClassVar[str] = (
        "a copy that is used by the backward of the forward it was made for, units of other optimizers, shards that change while "
        "nothing is gathered, the use of a gather that `pending-gather` has reported"
    )
    unseen: ClassVar[str] = (
        "shards written through `.data`, through numpy, or by `torch._foreach_…` on DTensors outside of an optimizer's step, which "
        "bump no version counter (a load and an optimizer's step are events of their own)"
    )
    cost: ClassVar[str] = "one comparison per forward of a unit; a look at what a pass left gathered"

    def configure(self, options: Any) -> None:
        self.tracker.told.stale_use = self._used

    def _used(self, seq: int, group: int, context: int) -> None:
        tracker = self.tracker
        state = tracker.groups[group]
        if state.blamed == state.opened:
            return
        age = tracker.step_number - state.gathered_step
        when = f"{count(age, 'step')} ago" if age > 0 else "in this step"
        change = _BY[ev.CHANGE_CAUSES[state.changed_by]]
        copy = "a copy on a smaller mesh" if state.smaller else "a copy"
        evidence = tuple(sorted({state.gathered, state.changed, seq}))
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, group, state.fqn, tracker.step_number,
                f"the forward of {state.name} (event {seq}) computes with {copy} of old parameters ({size(state.bytes)}): gathered "
                f"at event {state.gathered}, {when}, and {change} at event {state.changed}. {self._why(state)}",
                self._hint(state), evidence, state.bytes, ev.CHANGE_CAUSES[state.changed_by],
            )
        )  # fmt: skip

    def _why(self, state: GroupState) -> str:
        if state.smaller:
            return "Its reshard_after_forward is a number: the forward before left that copy, and gathers are made from it."
        if state.opened_how // ev.MODE_UNIT == ev.MODES.index("manual"):
            return "A call of unshard() opened it and no reshard() came before the change."
        if state.closed_by == ev.POST_BACKWARD and not state.flags & RESHARD_AFTER_BACKWARD:
            return "set_reshard_after_backward(False) kept it open over the change."
        if state.closed_by == ev.POST_FORWARD and not state.flags & RESHARD_AFTER_FORWARD:
            return "Its reshard_after_forward is False, so that a forward leaves it open until a backward comes."
        return "Nothing freed it before the change."

    def _hint(self, state: GroupState) -> str:
        on = state.fqn or "model"
        if state.smaller:
            return (
                f"Call {on}.reshard() after a forward without a backward and before its parameters change, or give it "
                "reshard_after_forward=True."
            )
        if state.closed_by == ev.POST_BACKWARD and not state.flags & RESHARD_AFTER_BACKWARD:
            return "Call model.set_reshard_after_backward(True) before the last backward of the step."
        return f"Call {on}.reshard() before its parameters change (evaluate after optimizer.step(), or reshard after the evaluation)."
