"""What exceptions left half done: which units, in which state, by which event. The notes on later exceptions tell of it.

An exception in a forward or backward runs none of FSDP2's hooks that would have ended the pass. The units that it came through
stay as they were, and the next pass begins on them, which ``unclean-start`` reports. When that pass fails in its turn, what the
first one left is what its reader wants to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fsdptrace import events as ev
from fsdptrace.checks.base import Rule
from fsdptrace.checks.illegal_state import after_an_exception
from fsdptrace.checks.text import size

_HALF_DONE = (1, 2)  # training states forward and pre_backward
_ENDS = {1: "post-forward", 2: "post-backward"}
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Left:
    """How an exception left a group.

    Attributes:
        group: its number.
        training: the training state that it is in since.
        opened: ``seq`` of the gather that it was open with, 0 when it was closed.
        by, step, error: ``seq`` of the exception, its step, and its type.
    """

    group: int
    training: int
    opened: int
    by: int
    step: int
    error: str


class Aftermath(Rule):
    """Follows what exceptions left; finds nothing by itself. Not among the rules that can be chosen: notes need it always."""

    name: ClassVar[str] = "aftermath"

    def configure(self, options: object) -> None:
        self._left: dict[int, Left] = {}
        self._failed: tuple[int, int, str] | None = None
        self._now = (0, ev.NONE, ev.PASS_NONE)

    # -- events --------------------------------------------------------------------------------------------------------
    def exception(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self._now = (seq, group, context % 4)
        if context % 4 != ev.PASS_NONE:
            self._failed = (seq, self.tracker.step_number, self.tracker.texts.get(a))

    def forward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if self._failed is not None:
            self._look()

    def backward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if self._failed is not None:
            self._look()

    def state(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if c not in _HALF_DONE:  # reset_iter_state, or a recording that starts again
            self._left.pop(group, None)

    def _look(self) -> None:
        """A pass ended after an exception: what is half done now. A partly run grouped unit stays in forward legally."""
        assert self._failed is not None
        infos = self.tracker.map.groups
        half = [g for g in self.tracker.groups if g.training in _HALF_DONE and len(infos[g.id].modules) == 1]
        self._left = {
            g.id: self._left.get(g.id) or Left(g.id, g.training, g.opened if g.open else 0, *self._failed) for g in half
        }  # fmt: skip
        if not half:
            self._failed = None

    # -- the note ------------------------------------------------------------------------------------------------------
    def note(self, seq: int) -> str:
        """The note on the exception of event ``seq``, which came out of a pass that began on half-done units; else empty."""
        now, group, pass_ = self._now
        if seq != now or pass_ == ev.PASS_NONE or not self._left:
            return ""
        first = self._left.get(group) or next(iter(self._left.values()))
        others = [left for left in self._left.values() if left is not first]
        tracker = self.tracker
        state = tracker.groups[first.group]
        text = (
            f"fsdptrace: this pass began on {'units' if others else 'a unit'} that {_an(first.error)} (event {first.by}, step "
            f"{first.step}) had left half done: {state.name} in {ev.TRAINING_STATES[first.training]}, its "
            f"{_ENDS[first.training]} never ran"
        )
        if state.open and first.opened == state.opened:
            _, direction, _ = ev.unpack_how(state.opened_how)
            by = tracker.asked_by(state.opened_how, state.opened_by) if direction else "its own hook"
            text += f"; it is open since event {state.opened} (step {state.opened_step}), gathered by {by}, {size(state.bytes)}"
            if state.changed > state.gathered:
                cause = ev.CHANGE_CAUSES[state.changed_by].replace("_", " ")
                text += f", older than its parameters ({cause}, event {state.changed})"
        if others:
            names = ", ".join(tracker.name(left.group) for left in others[:SHOWN])
            text += f"; likewise {names}" + (f" and {len(others) - SHOWN} more" if len(others) > SHOWN else "")
        return f"{text}. Rule unclean-start.\n  {after_an_exception(self)}"


def _an(error: str) -> str:
    name = error.rpartition(".")[2]
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"
