"""``lost-pre-backward``: a backward reached a unit whose pre-backward hook never ran."""

from __future__ import annotations

from typing import Any, ClassVar

from fsdptrace import events as ev
from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.illegal_state import closed_in_use
from fsdptrace.checks.state import GroupState

_BACKWARD_PASSES = (ev.PASS_BACKWARD, ev.PASS_RECOMPUTE)
_FREED = ev.ABOUT.index("freed")


class LostPreBackward(Rule):
    name: ClassVar[str] = "lost-pre-backward"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = (
        "a gradient reached a closed group whose pre-backward never ran, or a backward failed on freed parameters of a group "
        "that ran with grad and had no pre-backward"
    )
    explanation: ClassVar[str] = (
        "FSDP2 gathers a unit for its backward by a hook on the tensors that its forward returns. The hook is lost when a "
        "returned view is changed in place, when the loss is taken from a tensor that is no output of the unit (a cached "
        "intermediate), or when outputs are hidden in objects that FSDP2 does not look into. The backward then runs on freed "
        "storage: it fails with `out of bounds for storage of size 0`, far from the cause."
    )
    example: ClassVar[str] = (
        "y = model.inner(x)      # returns h.view(...)\n"
        "y += 1.0                # in place: the hook on y is gone\n"
        "y.sum().backward()"
    )
    mend: ClassVar[str] = (
        "Return `out.clone()`, or use `y = y + 1.0`; return tensors in a tuple, list, dict or (torch 2.12 and newer) dataclass; take the loss from what "
        "the unit returns; or keep the unit open for its backward with `reshard_after_forward=False`."
    )
    silent: ClassVar[str] = (
        "units that stay open until their backward, partly run grouped units, a backward that fails for another reason (out of "
        "memory, an error of your own)"
    )
    cost: ClassVar[str] = "one comparison per post-backward"

    def configure(self, options: Any) -> None:
        self.tracker.told.lost_gradient = self._lost_gradient

    def _lost_gradient(self, seq: int, state: GroupState) -> None:
        grouped = len(self.tracker.map.groups[state.id].modules) > 1
        was_open = state.open or state.freed > seq
        if was_open or grouped or not state.uses:
            return
        self._say(
            seq, state, f"a gradient reached {state.name} (post-backward at event {seq}) although its pre-backward never ran and "
            "it was not gathered.", (seq,),
        )  # fmt: skip

    def exception(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if c != _FREED or group >= 0 or b >= 0 or d >= 0:  # about something else, or out of a module: another rule's
            return
        state = self._lost()
        if state is None or closed_in_use(self.tracker, group, context % 4) is not None:  # known for certain: illegal-state
            return
        self._say(
            seq, state, f"the backward failed at event {seq} on parameters that are not gathered: {state.name} ran with grad, was "
            f"freed at event {state.freed}, and its pre-backward, which gathers it again, never ran.", (state.freed, seq),
        )  # fmt: skip

    def _lost(self) -> GroupState | None:
        """The group that the backward was to reach first: of those that wait, closed, for their backward, the last to run."""
        waiting = [g for g in self.tracker.groups if g.uses and not g.open and not g.touched]
        return max(waiting, key=lambda g: g.ran, default=None)

    def _say(self, seq: int, state: GroupState, message: str, evidence: tuple[int, ...]) -> None:
        tracker = self.tracker
        containers = "tuple, list, dict or dataclass" if self.since(2, 12) else "tuple, list or dict"
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, state.id, state.fqn, tracker.step_number, message,
                f"Look at what {state.name} returns: a view that is changed in place afterwards (return out.clone(), or use y = y "
                f"+ 1), an object that FSDP2 does not look into (return a {containers}), or a loss on a tensor "
                f"that it does not return. fully_shard({state.name}, reshard_after_forward=False) avoids the failure.",
                evidence, state.bytes, "lost",
            )
        )  # fmt: skip
