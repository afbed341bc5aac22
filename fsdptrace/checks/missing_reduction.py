"""``missing-reduction``: an optimizer steps while gradients of its parameters were held back."""

from __future__ import annotations

from typing import Any, ClassVar

from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.state import SYNC, GroupState
from fsdptrace.checks.text import count

_CAUSES = {
    "sync": (
        "they were not reduced, since the last backward that made any ran under set_requires_gradient_sync(False)",
        "Call model.set_requires_gradient_sync(True) before the last backward of the step, not after it, and with recurse=True "
        "(the default), so that it reaches every unit.",
    ),
    "all-reduce": (
        "they were summed over the shards and not over the replicas, and are kept as partial sums, since the last backward ran under "
        "set_requires_all_reduce(False)",
        "Call model.set_requires_all_reduce(True) before the last backward of the step (with recurse=True, the default).",
    ),
    "copy": (
        "they lie on the gathered copy, since they came when the post-backward was over, or none ran",
        "Call the unit through its forward once per backward, or with checkpoint(..., use_reentrant=False), and let the root's "
        "backward end before the step.",
    ),
    "hook": (
        "they were reduced, and a post-accumulate-grad hook took them away without a step of its own",
        "Take the hook off, or let it step the optimizer that holds the parameter.",
    ),
}


class MissingReduction(Rule):
    name: ClassVar[str] = "missing-reduction"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = (
        "at the step a gradient existed and was held back: sync left off, all-reduce left off (partial sums kept), a hook that took it away"
    )
    explanation: ClassVar[str] = (
        "A gradient that is held back stays on the gathered copy (or as a partial sum): the optimizer sees none, or an old one, "
        "and the unit does not learn; the sum joins a later reduction. Looked at when an optimizer steps outside a backward, "
        "for the groups whose parameters it holds. What counts is how the last backward that made gradients ran, so that a "
        "switch that is set back after it helps nothing."
    )
    example: ClassVar[str] = (
        "model.set_requires_gradient_sync(False)\n"
        "model(a).sum().backward()\n"
        "model.set_requires_gradient_sync(True)       # too late: before the last backward, not after it\n"
        "optimizer.step()"
    )
    mend: ClassVar[str] = (
        "Before the last micro-batch: `model.set_requires_gradient_sync(True)` and, with replicas, "
        "`model.set_requires_all_reduce(True)`, both with `recurse=True`."
    )
    silent: ClassVar[str] = (
        "accumulation whose last backward syncs, units without a gradient (an expert that saw no token, a frozen tower), groups of "
        "other optimizers, an optimizer in the backward, gradients that hooks hand to an optimizer in the backward"
    )
    cost: ClassVar[str] = "one comparison per group and optimizer step"

    def configure(self, options: Any) -> None:
        self._in_backward: dict[int, int] = {}  # number of the backward in which an optimizer last changed the group
        self._found: dict[str, list[tuple[GroupState, int]]] = {}
        self.tracker.told.stepped_oddly = self._stepped

    def _stepped(self, seq: int, state: GroupState, unreduced: int, taken: int) -> None:
        tracker = self.tracker
        if tracker.in_backward:
            self._in_backward[state.id] = tracker.backward_number
        elif state.held_back:
            sync = bool(state.held_back_flags & SYNC)
            if not sync or tracker.map.groups[state.id].replicate_world > 1:
                self._found.setdefault("all-reduce" if sync else "sync", []).append((state, state.held_back))
        elif unreduced:
            self._found.setdefault("copy", []).append((state, state.opened))
        elif taken and state.grads and self._in_backward.get(state.id) != tracker.backward_number:
            self._found.setdefault("hook", []).append((state, seq))

    def optimizer_step(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        found, self._found = self._found, {}
        for cause, groups in found.items():
            self._say(seq, cause, groups)

    def _say(self, seq: int, cause: str, groups: list[tuple[GroupState, int]]) -> None:
        what, hint = _CAUSES[cause]
        tracker = self.tracker
        state, since = groups[0]
        names = ", ".join(other.name for other, _ in groups[:4]) + (f" and {len(groups) - 4} more" if len(groups) > 4 else "")
        who = state.name if len(groups) == 1 else f"{count(len(groups), 'unit')} ({names})"
        evidence = tuple(sorted({*(event for _, event in groups[:4]), seq}))
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, state.id, state.fqn, tracker.step_number,
                f"the optimizer stepped (event {seq}) without gradients of {who}: {what} (event {since}).",
                hint, evidence, 0, cause,
            )
        )  # fmt: skip
