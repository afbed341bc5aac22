"""``late-reshard``: units stay open until the end of the backward because nothing tells FSDP2 that theirs is over."""

from __future__ import annotations

from typing import Any, ClassVar

from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.state import GroupState
from fsdptrace.checks.text import count, size

_HIDDEN, _RAW = 2, 0  # positions in INPUT_GRAD


class LateReshard(Rule):
    name: ClassVar[str] = "late-reshard"
    severity: ClassVar[str] = "warning"
    summary: ClassVar[str] = (
        "a group's post-backward runs only in the root's final callback although a tensor that needs grad went in without "
        "being hooked, or two or more non-root units with raw inputs stay open together"
    )
    explanation: ClassVar[str] = (
        "FSDP2 frees a unit after its backward by a hook on the tensors that need grad among its inputs. Where such a tensor "
        "is hidden in an object, or no input needs grad, the unit stays open, with its gradients, until the whole backward "
        "ends. For the root, embeddings and the first unit after a frozen prefix that is as it must be."
    )
    example: ClassVar[str] = (
        "class Batch:                       # a plain object\n"
        "    def __init__(self, h): self.h = h\n"
        "for block in blocks:\n"
        "    h = block(Batch(h))            # no hook: all blocks stay open until the backward ends"
    )
    mend: ClassVar[str] = (
        "Pass tensors as arguments, or in a tuple, list, dict or (torch 2.12 and newer) dataclass; for raw inputs: "
        "`x.requires_grad_()` before the first unit of a tower, or put the tower into one unit less."
    )
    silent: ClassVar[str] = (
        "the root, embeddings (integer inputs), one unit behind a frozen prefix and the units inside it that begin it, frozen units"
    )
    cost: ClassVar[str] = "a look at all groups per backward"

    def configure(self, options: Any) -> None:
        self._late: list[tuple[GroupState, int]] = []
        self._roots: set[int] = set()
        self.tracker.told.late_reduction = self._reduced

    def forward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self._roots.update(self.tracker.map.units[a].groups)

    def _reduced(self, seq: int, state: GroupState) -> None:
        if state.id not in self._roots and state.fqn and state.input_grad in (_HIDDEN, _RAW):
            self._late.append((state, seq))

    def backward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        late, self._late = self._late, []
        if not late:
            return
        hidden = [item for item in late if item[0].input_grad == _HIDDEN]
        raw = [item for item in late if item[0].input_grad == _RAW]
        if hidden:
            self._say(hidden, seq, "hidden")
        # A unit and the first one inside it take the same raw input: that is one place where a model begins, not two.
        units = {self.tracker.map.units[self.tracker.map.groups[state.id].unit].fqn for state, _ in raw}
        if sum(not any(_is_inside(other, fqn) for other in units) for fqn in units) > 1:
            self._say(raw, seq, "raw")

    def step(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self._roots.clear()

    def _say(self, late: list[tuple[GroupState, int]], seq: int, cause: str) -> None:
        total = sum(state.bytes for state, _ in late)
        names = ", ".join(state.name for state, _ in late[:6]) + (f" and {len(late) - 6} more" if len(late) > 6 else "")
        if cause == "hidden":
            why = "a tensor that needs grad went in hidden in an object, where FSDP2 does not look"
            containers = "tuple, list, dict or dataclass" if self.since(2, 12) else "tuple, list or dict"
            hint = f"Pass the tensors to {late[0][0].name} as arguments, or in a {containers}, instead of in an object of your own."
        else:
            why = "no input of theirs needs grad, so that nothing says when their backward is over"
            hint = (
                f"Call requires_grad_() on the floating-point input of {late[0][0].name} (and of the others), so that FSDP2 "
                "can hook it, or shard these units together with the ones that follow."
            )
        stayed = "stayed open together" if len(late) > 1 else "stayed open"
        first, at = late[0]
        self.report(
            Violation(
                self.name, self.severity, self.tracker.map.model, first.id, first.fqn, self.tracker.step_number,
                f"{count(len(late), 'unit')} ({names}) {stayed} until the backward ended (event {at}), {size(total)}: {why}.",
                hint, (*(state.opened for state, _ in late[:6]), at), total, cause,
            )
        )  # fmt: skip


def _is_inside(fqn: str, outer: str) -> bool:
    return fqn.startswith(f"{outer}.")
