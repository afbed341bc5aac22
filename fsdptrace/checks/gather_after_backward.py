"""``gather-after-backward``: a unit whose backward is over is gathered again in the same backward."""

from __future__ import annotations

from typing import Any, ClassVar

from fsdptrace import events as ev
from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.state import GroupState
from fsdptrace.checks.text import count, size

_BACKWARD_PASSES = (ev.PASS_BACKWARD, ev.PASS_RECOMPUTE)


class GatherAfterBackward(Rule):
    name: ClassVar[str] = "gather-after-backward"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = (
        "in a backward, a group whose backward is over, with no use and no recomputation to come, is gathered again"
    )
    explanation: ClassVar[str] = (
        "Nobody will use that copy before the parameters change. It stays until the whole backward ends: with nested "
        "units under activation checkpointing one more unit per layer, which is how a 94-layer model ran out of memory "
        "at layer 27. The rule reports the unshard itself, and who asked for it. A copy that an earlier pass left in the "
        "post-forward order list (an eval pass, a micro-batch under set_is_last_backward(False)) makes one such prefetch "
        "per backward in every release: that is `info`."
    )
    example: ClassVar[str] = (
        "# torch <= 2.9, or an explicit list that points the wrong way\n"
        "for a, b in zip(layers, layers[1:]):\n"
        "    a.set_modules_to_backward_prefetch([b])   # b's backward is over when a's begins"
    )
    mend: ClassVar[str] = (
        "Upgrade to torch 2.10 or newer; until then give the unit an explicit, non-empty list: "
        "`unit.set_modules_to_backward_prefetch([the unit whose backward comes next])` (an empty list changes nothing). "
        "With reentrant checkpointing and set_modules_to_forward_prefetch: use `use_reentrant=False`."
    )
    silent: ClassVar[str] = (
        "a second use of a unit in the same forward, two forwards before one backward, a further output of the unit "
        "whose gradient comes later, a gather by the unit's own hook"
    )
    cost: ClassVar[str] = "one comparison per unshard"

    def configure(self, options: Any) -> None:
        self.tracker.told.late_gather = self._gathered

    def _gathered(self, seq: int, state: GroupState, context: int, how: int) -> None:
        # Zero is the group's own hook, which uses what it gathers.
        if how < 4 or context % 4 not in _BACKWARD_PASSES:
            return
        tracker = self.tracker
        issuer = state.opened_by
        _, direction, mode = ev.unpack_how(how)
        state.blamed = seq
        stale_order = tracker.by_leftover(issuer, how, state.id)
        held = [g for g in tracker.past_backward() if g.opened > g.over and not g.open]
        total = sum(g.bytes for g in held)
        who = tracker.asked_by(how, issuer)
        message = (
            f"{who} gathered {state.name} ({size(state.bytes)}) at event {seq}, after its backward was over (event {state.over}). "
            "Nobody will use it before the parameters change; it stays until this backward ends."
        )
        if len(held) > 1:
            message += f" {count(len(held), 'unit')}, {size(total)}, are held that way now."
        self.report(
            Violation(
                self.name, "info" if stale_order else self.severity, tracker.map.model, state.id, state.fqn,
                tracker.step_number, message[0].upper() + message[1:], self._hint(state, issuer, mode, direction, stale_order),
                (state.over, seq), state.bytes, f"{mode} {direction} {issuer}",
            )
        )  # fmt: skip

    def _hint(self, target: GroupState, issuer: int, mode: str, direction: str, stale_order: bool) -> str:
        tracker = self.tracker
        if stale_order:
            return (
                "An earlier pass without a backward (eval, or a micro-batch under set_is_last_backward(False)) left its "
                "order behind, in every release of PyTorch. It costs one gather per backward; nothing needs to change."
            )
        if mode == "manual":
            return f"Take the call of unshard() on {target.name} out of the backward, or make it before the pre-backward."
        source = tracker.groups[issuer] if issuer >= 0 else None
        name = source.name if source else "that unit"
        if direction == "forward":
            return (
                f"The recomputation of {name} repeats its set_modules_to_forward_prefetch(...): use "
                "checkpoint(..., use_reentrant=False), whose recomputation does not, or take the list away."
            )
        if mode == "explicit":
            return (
                f"Correct the list of {name}.set_modules_to_backward_prefetch(...): it names {target.name}, which comes "
                "after it in the forward, so before it in the backward."
            )
        # A unit that names itself gathers nothing: it is open by then.
        first = source is None or source.previous < 0
        following = name if source is None or source.previous < 0 else tracker.groups[source.previous].name
        call = f"{name}.set_modules_to_backward_prefetch([{following}])"
        empty = (
            "an empty list changes nothing"
            if not first
            else "itself, since no backward comes after its own; an empty list changes nothing"
        )
        if source and source.rejoined:
            cause = (
                f"The recomputation put {name} into the post-forward order a second time, so that its neighbour there is a unit "
                "that is done."
            )
            if not self.since(2, 10):
                return f"{cause} torch 2.10 mends it (pytorch PR #164009): upgrade, or until then call {call} ({empty})."
            by = "a patch, or compiled autograd," if not self.since(2, 12) else "a patch"
            return (
                f"{cause} That is what torch 2.9 and older do, mended in 2.10 (pytorch PR #164009); under {self.torch} {by} "
                f"brings it back: take that away, or call {call} ({empty})."
            )
        return f"Say what comes next: {call} ({empty})."
