"""``unpaired-unshard``: at the step a unit is still open although its policy says that it is freed by now."""

from __future__ import annotations

from typing import Any, ClassVar

from fsdptrace import events as ev
from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.state import RESHARD_AFTER_BACKWARD, RESHARD_AFTER_FORWARD, GroupState
from fsdptrace.checks.text import size

_HALF_DONE = [ev.TRAINING_STATES.index(name) for name in ("forward", "pre_backward")]
_STATE_DICT = ev.ABOUT.index("state_dict")


class UnpairedUnshard(Rule):
    name: ClassVar[str] = "unpaired-unshard"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = "at the step a group is still open, and its policy says that it is freed by now"
    explanation: ClassVar[str] = (
        "A unit that is open when the optimizer steps keeps a copy of the old parameters: it costs its unsharded bytes, "
        "and the next forward computes with the copy, since an open unit is not gathered again. Looked at when an "
        "optimizer steps, for the groups whose parameters it holds; where no optimizer steps, at the step boundary. A root "
        "that its default policy leaves open after an eval pass is `info`, once: a state dict taken then names temporary "
        "parameters. When state-dict code fails while a unit is open, that is `info` too, and a note on the exception."
    )
    example: ClassVar[str] = (
        "model.layers[0].unshard()      # to export weights\n"
        "export(model.layers[0])\n"
        "optimizer.step()               # and nobody called model.layers[0].reshard()"
    )
    mend: ClassVar[str] = (
        "Call `unit.reshard()` after a manual `unit.unshard()`. After an eval pass, before a state dict or a change of the "
        "parameters: `model.reshard()` on the root."
    )
    silent: ClassVar[str] = (
        "reshard_after_forward=False before the backward, a step that an exception cut short, set_reshard_after_backward(False), frozen groups and groups of "
        "other optimizers, a gather that is pending (`pending-gather` looks at those)"
    )
    cost: ClassVar[str] = "one comparison per group and optimizer step"

    def configure(self, options: Any) -> None:
        self._stepped = False
        self._said_root = False
        self.tracker.told.changed_open = self._changed

    def _changed(self, seq: int, state: GroupState, cause: int) -> None:
        if cause == 0:
            self._look(seq, state, "when the optimizer stepped")

    def optimizer_step(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self._stepped = True  # from here on optimizers say what a step is; a boundary may cut an accumulation

    def step(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        for state in self.tracker.groups:
            if state.open:
                if self._left_by_eval(state):
                    self._say_root(seq, state)
                elif not self._stepped:
                    self._look(seq, state, "at the end of the step")

    def exception(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if c != _STATE_DICT:
            return
        for state in self.tracker.groups:
            if state.open:
                self._say_state_dict(seq, state)

    def _look(self, seq: int, state: GroupState, when: str) -> None:
        if self._left_by_eval(state):
            self._say_root(seq, state)
            return
        if self.tracker.broken:  # what an exception leaves open is its consequence: unclean-start looks at the next forward
            return
        if state.closed_by == ev.POST_FORWARD and not state.flags & RESHARD_AFTER_FORWARD:
            return
        if state.closed_by == ev.POST_BACKWARD and not state.flags & RESHARD_AFTER_BACKWARD:
            return
        manual = state.opened_how // ev.MODE_UNIT == 3
        info = self.tracker.map.groups[state.id]
        if state.closed_by == ev.POST_FORWARD and not manual:
            why = (
                "the forward that used it ended without freeing it (as a forward inside a backward does), and no backward came"
            )
            hint = (
                f"Call {state.name}.reshard() when that forward's results are used. With reentrant checkpointing of a unit that "
                "runs twice before one backward: checkpoint(..., use_reentrant=False)."
            )
        elif manual:
            why = "a call of unshard() opened it and no reshard() followed"
            hint = f"Call {state.name}.reshard() when you are done with the gathered parameters, before the optimizer's step."
        else:
            why = "nothing freed it after that"
            hint = f"Call {state.name}.reshard() before the optimizer's step."
        self.report(
            Violation(
                self.name, self.severity, self.tracker.map.model, state.id, state.fqn, self.tracker.step_number,
                f"{state.name} was still open {when} ({size(state.bytes)}, {info.tensors} parameters): opened at event "
                f"{state.opened}, {why}. The next forward will compute with this copy of the old parameters.",
                hint, (state.opened, seq), state.bytes, "open",
            )
        )  # fmt: skip

    def _left_by_eval(self, state: GroupState) -> bool:
        """Open after a forward without grad, because the default policy keeps a root open (torch 2.8: _auto_reshard…)."""
        info = self.tracker.map.groups[state.id]
        return (
            state.closed_by == ev.POST_FORWARD
            and not state.closed_in_grad
            and not state.flags & RESHARD_AFTER_FORWARD
            and info.auto_policy is not False
            and state.opened_how // ev.MODE_UNIT != 3
        )

    def _say_root(self, seq: int, state: GroupState) -> None:
        if self._said_root:
            return
        self._said_root = True
        self.report(
            Violation(
                self.name, "info", self.tracker.map.model, state.id, state.fqn, self.tracker.step_number,
                f"{state.name} stayed open after a forward without grad ({size(state.bytes)}, opened at event "
                f"{state.opened}): the root's default policy, and legal. A state dict taken now, or parameters collected "
                "now, are gathered copies.",
                f"Call {_call(state)}.reshard() after the eval pass, or give the root reshard_after_forward=True.",
                (state.opened, seq), state.bytes, "eval",
            )
        )  # fmt: skip

    def _say_state_dict(self, seq: int, state: GroupState) -> None:
        """State-dict code failed while the unit was open: not always because of it, so it is said and no more."""
        if self._left_by_eval(state):
            self._said_root = True
            why = "it stayed open after a forward without grad, the root's default policy"
        else:
            how = self.tracker.asked_by(state.opened_how, state.opened_by)
            why = f"{how} opened it and nothing has freed it since"
            if state.training in _HALF_DONE:
                why += f" (an exception left its {ev.TRAINING_STATES[state.training].replace('pre_', '')} half done)"
        self.report(
            Violation(
                self.name, "info", self.tracker.map.model, state.id, state.fqn, self.tracker.step_number,
                f"{state.name} was left gathered when state-dict code failed at event {seq} ({size(state.bytes)}, opened at event "
                f"{state.opened}): {why}. Its modules hold gathered copies, which no optimizer knows.",
                f"Call {_call(state)}.reshard() before state dicts of the model or the optimizer are taken or loaded.",
                (state.opened, seq), state.bytes, "state_dict",
            )
        )  # fmt: skip


def _call(state: GroupState) -> str:
    return state.fqn or "model"
