"""``pending-gather``: a gather that was never waited for holds parameters from before their last change."""

from __future__ import annotations

from typing import Any, ClassVar

from fsdptrace import events as ev
from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.state import GroupState
from fsdptrace.checks.text import count, size


class PendingGather(Rule):
    name: ClassVar[str] = "pending-gather"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = "a gather was never waited for, and the shard has changed since"
    explanation: ClassVar[str] = (
        "An all-gather that was issued and not copied out makes the unit's next unshard a no-op: the next forward waits "
        "for the old gather and computes with the parameters of before the optimizer's step, without any error. The "
        "module looks sharded all the while. Issued before a forward and used by it is legal (`unshard(async_op=True)`)."
    )
    example: ClassVar[str] = (
        "model.trunk.set_modules_to_forward_prefetch([model.aux])\n"
        "with torch.no_grad():\n"
        "    model(x, use_aux=False)   # aux is gathered ahead and does not run\n"
        "optimizer.step()              # aux's gather is stale now"
    )
    mend: ClassVar[str] = (
        "Do not prefetch units that may not run in the pass; use `model.set_is_last_backward(True)` for the last "
        "micro-batch, which clears what is pending; or call `unit.unshard()` and `unit.reshard()` before the step."
    )
    silent: ClassVar[str] = "a gather issued after the optimizer's step, pending gathers of frozen groups"
    cost: ClassVar[str] = "one comparison per group and optimizer step"

    def configure(self, options: Any) -> None:
        self._last_backward = True
        self.tracker.told.changed_pending = self._changed

    def backward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self._last_backward = bool(a) or not b

    def _changed(self, seq: int, state: GroupState) -> None:
        tracker = self.tracker
        _, direction, mode = ev.unpack_how(state.opened_how)
        age = tracker.step_number - state.opened_step
        when = f"{count(age, 'step')} ago" if age else "in this step"
        who = tracker.asked_by(state.opened_how, state.opened_by, "unshard(async_op=True)")
        if mode == "explicit" and direction == "forward":
            hint = (
                f"{tracker.name(state.opened_by)}.set_modules_to_forward_prefetch(...) names {state.name}, which did not run: "
                "take it off the list for such passes."
            )
        elif not self._last_backward:
            hint = "Call model.set_is_last_backward(True) before the last backward of the step: it throws away what is pending."
        elif mode == "manual":
            hint = f"Use the gather before the step, or call {state.name}.unshard(); {state.name}.reshard() to throw it away."
        else:
            hint = f"Call {state.name}.unshard(); {state.name}.reshard() before the optimizer's step to throw the gather away."
        state.blamed = state.opened
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, state.id, state.fqn, tracker.step_number,
                f"a gather of {state.name} ({size(state.bytes)}) was pending when its parameters changed (event {seq}): "
                f"{who} issued it at event {state.opened}, {when}, and nobody waited for it. The next use "
                "will compute with the parameters of before the change.",
                hint, (state.opened, seq), state.bytes, mode,
            )
        )  # fmt: skip
