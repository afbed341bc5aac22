"""``policy-ignored``: after its forward a unit is open, or freed, against its ``reshard_after_forward``."""

from __future__ import annotations

from typing import Any, ClassVar

from fsdptrace import events as ev
from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.state import GroupState
from fsdptrace.checks.text import size


class PolicyIgnored(Rule):
    name: ClassVar[str] = "policy-ignored"
    severity: ClassVar[str] = "warning"
    summary: ClassVar[str] = (
        "a group stays open between forward and backward against its `reshard_after_forward`, or is freed against it"
    )
    explanation: ClassVar[str] = (
        "The setting says whether memory or communication is to be saved; here the other one was: a "
        "patched or wrapped hook does that. (torch 2.6 and 2.7 set a root's `reshard_after_forward` to False themselves, whatever "
        "it was given; what it was given cannot be told there, and nothing is said.)"
    )
    example: ClassVar[str] = (
        "def post_forward(self, module, input, output):   # in place of FSDPParamGroup.post_forward\n"
        "    self._record_post_forward()                  # and no self.reshard()"
    )
    mend: ClassVar[str] = (
        "Call `unit.reshard()` after the forward, or set what you want with `unit.set_reshard_after_forward(...)`."
    )
    silent: ClassVar[str] = (
        "the root's default policy, forwards inside a backward, manual unshard() and reshard(), state dicts, units that another "
        "unit prefetches"
    )
    cost: ClassVar[str] = "one comparison per post-forward"

    def configure(self, options: Any) -> None:
        self._suspects: list[tuple[int, int, bool]] = []
        self.tracker.told.other_policy = self._suspect

    def _suspect(self, seq: int, state: GroupState, context: int) -> None:
        if context % 4 != ev.PASS_FORWARD:
            return
        if state.open:
            if state.opened_how // ev.MODE_UNIT != 3:
                self._suspects.append((state.id, seq, True))
        elif state.freed > seq and not state.freed_cause:
            self._suspects.append((state.id, seq, False))

    def forward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        suspects, self._suspects = self._suspects, []
        for number, at, stays in suspects:
            if not stays or self.tracker.groups[number].open:  # else somebody freed it since
                self._say(number, at, stays)

    def _say(self, group: int, at: int, stays: bool) -> None:
        tracker = self.tracker
        state = tracker.groups[group]
        setting = tracker.map.groups[group].reshard_after_forward if stays else False
        what = "stayed open after its forward" if stays else "was freed after its forward"
        cost = (
            f"{size(state.bytes)} are held until its backward" if stays else f"its backward gathers {size(state.bytes)} again"
        )
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, group, state.fqn, tracker.step_number,
                f"{state.name} {what} (event {at}) against its reshard_after_forward={setting}: {cost}.",
                self._freed(state.fqn)
                if stays
                else f"Look for what wraps or patches {state.name}'s hooks, or call "
                f"{state.name}.set_reshard_after_forward(True) if that is what you want.",
                (state.opened, at), state.bytes, "open" if stays else "freed",
            )
        )  # fmt: skip

    def _freed(self, fqn: str) -> str:
        hook = f"{fqn or 'model'}.register_forward_hook(lambda module, args, out: module.reshard())"
        return f"Look for what wraps or patches its hooks; or free it in one of your own: {hook}."
