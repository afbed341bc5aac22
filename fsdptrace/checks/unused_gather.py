"""``unused-gather``: a unit was gathered and freed, or the backward ended, and nothing had used it."""

from __future__ import annotations

from typing import Any, ClassVar

from fsdptrace import events as ev
from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.state import GroupState
from fsdptrace.checks.text import size

_BY_HAND_OR_RESET = (1, 2, 3)  # manual, state_dict, reset: causes of a reshard that are nobody's waste


class UnusedGather(Rule):
    name: ClassVar[str] = "unused-gather"
    severity: ClassVar[str] = "warning"
    summary: ClassVar[str] = "a gather is freed, or the backward ends, and the group was not used"
    explanation: ClassVar[str] = (
        "The all-gather took its time on the wire and its bytes of memory for nothing. FSDP2 prefetches in the backward by "
        "the reverse order of the forward; when only a part of the forward has a backward (some heads, a detached "
        "branch), it gathers units that the backward never visits. A frozen unit in front of the first trainable one, and what "
        "an earlier pass left in the order list, are gathered that way in every release: `info`."
    )
    example: ClassVar[str] = (
        "outputs = model(x)                       # four heads\n"
        "(outputs[1] + outputs[3]).sum().backward()   # heads 0 and 2 are gathered for nothing"
    )
    mend: ClassVar[str] = (
        "Say what comes next: `unit.set_modules_to_backward_prefetch([...])` (non-empty), or run only the units whose "
        "output is used. In a forward, take units that may not run off `set_modules_to_forward_prefetch`."
    )
    silent: ClassVar[str] = (
        "a manual unshard() and reshard() around a read, state dicts, reset_iter_state, what another rule said"
    )
    cost: ClassVar[str] = "one comparison per reshard"

    def configure(self, options: Any) -> None:
        self._waiting: list[tuple[int, GroupState, int, int, int, bool]] = []
        self.tracker.told.freed_unused = self._freed

    def _freed(self, seq: int, state: GroupState, cause: int) -> None:
        if cause not in _BY_HAND_OR_RESET:
            self._say(seq, state, "freed")

    def discard(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        state = self.tracker.groups[group]
        if state.used or context % 4 not in (ev.PASS_BACKWARD, ev.PASS_RECOMPUTE):
            return
        if state.uses:
            # Its backward may still come, as a trunk's does after those of the chunks of its head: known at the step.
            self._waiting.append((seq, state, state.opened, state.opened_how, state.opened_by, bool(b)))
        else:
            self._say(seq, state, "thrown away when the backward ended", frozen=bool(b))

    def step(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        waiting, self._waiting = self._waiting, []
        for at, state, opened, how, by, frozen in waiting:
            if state.uses:
                self._say(at, state, "thrown away when the backward ended", (opened, how, by), frozen)

    def _say(
        self, seq: int, state: GroupState, how: str, gather: tuple[int, int, int] | None = None, frozen: bool = False
    ) -> None:
        opened, opened_how, opened_by = gather or (state.opened, state.opened_how, state.opened_by)
        _, direction, mode = ev.unpack_how(opened_how)
        if state.blamed == opened or mode == "manual" or self.tracker.broken:
            return
        state.blamed = opened
        tracker = self.tracker
        issuer = tracker.name(opened_by)
        who = tracker.asked_by(opened_how, opened_by)
        if mode == "explicit":
            call = f"set_modules_to_{direction}_prefetch"
            hint = f"Take {state.name} off the list of {issuer}.{call}(...), or name a unit there that runs."
        elif opened_by >= 0:
            hint = (
                f"{state.name} had no backward in this pass. Say what comes after {issuer}: "
                f"{issuer}.set_modules_to_backward_prefetch([{issuer}]) where nothing does (a unit that names itself gathers "
                "nothing), else with the unit whose backward comes next; or leave out units whose output is not used."
            )
        else:
            hint = f"Leave {state.name} out of passes in which its output is not used."
        # By default, and every fine-tuning does it: a frozen unit before the first trainable one, or what an earlier pass left.
        frozen = mode == "implicit" and (frozen or not tracker.map.groups[state.id].trainable)
        usual = frozen or tracker.by_leftover(opened_by, opened_how, state.id)
        self.report(
            Violation(
                self.name, "info" if usual else self.severity, tracker.map.model, state.id, state.fqn, tracker.step_number,
                f"{state.name} was gathered by {who} at event {opened} ({size(state.bytes)}) and {how} at event {seq} "
                "without having been used.",
                hint, (opened, seq), state.bytes, f"{mode} {opened_by}",
            )
        )  # fmt: skip
