"""``unclean-start``: an outermost forward starts while an earlier pass is half done."""

from __future__ import annotations

from typing import Any, ClassVar

from fsdptrace import events as ev
from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.illegal_state import after_an_exception

_HALF_DONE = (1, 2)  # training states forward and pre_backward


class UncleanStart(Rule):
    name: ClassVar[str] = "unclean-start"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = (
        "an outermost forward starts while an earlier pass is half done: groups in forward or pre-backward, a final callback still "
        "marked queued, a remembered forward root"
    )
    explanation: ClassVar[str] = (
        "An exception (out of memory, a bad batch that the loop skips) left FSDP2's state half way. The next forward then skips "
        "hooks: units are not gathered, all-gathers do not wait for the optimizer, the final callback is never queued, so that "
        "gradients are not reduced. Nothing says so. An order list that eval passes made grow is `info`."
    )
    example: ClassVar[str] = (
        "for batch in loader:\n"
        "    try:\n"
        "        model(batch).sum().backward()\n"
        "    except RuntimeError:\n"
        "        continue                 # FSDP2 is still in the middle of that pass"
    )
    mend: ClassVar[str] = (
        "Call `model.reset_iter_state()` on the root after the exception (torch 2.13 and newer). On older releases there is no call "
        "for it: end the process and start from a checkpoint."
    )
    silent: ClassVar[str] = "partly run grouped units, several forwards before a backward, forwards inside a backward"
    cost: ClassVar[str] = "a look at all groups per outermost forward"

    def configure(self, options: Any) -> None:
        self._half: list[int] = []
        self._states: dict[int, int] = {}
        self._said_order = False
        self._eval_since_backward = False
        self._failed = 0

    def exception(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self._failed = seq

    def state(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if c not in _HALF_DONE and group in self._half:  # reset_iter_state, or a recording that starts again
            self._half.remove(group)

    def forward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        # What was half done when the last pass ended, and still was when this one began.
        if self._half or d & 3:
            self._say(seq, self._half, d & 3)
        if b and e and self._eval_since_backward and not self._said_order:
            self._said_order = True
            self._say_order(seq, e)
        if not b:
            self._eval_since_backward = True
        self._remember()

    def backward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if a:
            self._eval_since_backward = False
        self._remember()

    def _remember(self) -> None:
        """Groups that the pass which ends now leaves half done; a partly run grouped unit stays in forward legally."""
        infos = self.tracker.map.groups
        self._half = [
            g.id for g in self.tracker.groups if g.training in _HALF_DONE and len(infos[g.id].modules) == 1
        ]  # fmt: skip
        self._states = {group: self.tracker.groups[group].training for group in self._half}

    def _say(self, seq: int, groups: list[int], bits: int) -> None:
        tracker = self.tracker
        parts = []
        if groups:
            names = ", ".join(f"{tracker.name(g)} in {ev.TRAINING_STATES[self._states[g]]}" for g in groups[:4])
            parts.append(names + (f" and {len(groups) - 4} more" if len(groups) > 4 else ""))
        if bits & 2:
            parts.append("a final callback still marked queued, so that none will run in the next backward")
        if bits & 1:
            parts.append("the root of an unfinished forward still remembered")
        state = tracker.groups[groups[0]] if groups else None
        since = f" An exception left it so at event {self._failed}." if self._failed else ""
        evidence = (self._failed, seq) if self._failed else (seq,)
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, state.id if state else None, state.fqn if state else "",
                tracker.step_number,
                f"an outermost forward (event {seq}) started while an earlier pass was half done: {'; '.join(parts)}.{since} This "
                "pass skips hooks and may run on stale or freed parameters.",
                after_an_exception(self),
                evidence, 0, "start",
            )
        )  # fmt: skip

    def _say_order(self, seq: int, length: int) -> None:
        self.report(
            Violation(
                self.name, "info", self.tracker.map.model, None, "", self.tracker.step_number,
                f"forwards without a backward left {length} entries in the post-forward order list when the forward of event {seq} "
                "began: the first unit's backward will prefetch one unit for nothing.",
                "Nothing needs to change: it costs one gather in the next backward, which clears the list.",
                (seq,), 0, "order",
            )
        )  # fmt: skip
