"""``illegal-state``: a group's hooks come in an order that FSDP2 does not have, or it computes while it is closed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fsdptrace import events as ev
from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.state import UNSHARD_IN_BACKWARD, GroupState
from fsdptrace.checks.text import size
from fsdptrace.checks.tracker import Tracker

_BACKWARD_PASSES = (ev.PASS_BACKWARD, ev.PASS_RECOMPUTE)
_PRE_BACKWARD = ev.TRAINING_STATES.index("pre_backward")
_POST_BACKWARD = ev.TRAINING_STATES.index("post_backward")
_FREED = ev.ABOUT.index("freed")


class IllegalState(Rule):
    name: ClassVar[str] = "illegal-state"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = (
        "a group's hooks arrive in an order outside the table of legal transitions, or a forward, recomputation or backward "
        "computes while the group is closed"
    )
    explanation: ClassVar[str] = (
        "A unit that computes with freed parameters fails with `mixed torch.Tensor and DTensor` or a storage of size 0, often "
        "far from the cause: where one is freed in the middle of its own forward or backward (a `reshard()` too early, a state dict "
        "taken inside), the exception that follows is annotated with it. torch 2.10 and older do so when a checkpointed unit with a unit inside runs twice before one "
        "backward (DPO's chosen and rejected): the first recomputation frees what the second one needs."
    )
    example: ClassVar[str] = (
        "# torch <= 2.10: checkpointed blocks with a unit inside\n(model(chosen) * model(rejected)).sum().backward()"
    )
    mend: ClassVar[str] = (
        "Upgrade to torch 2.11 or newer (pytorch PR #171779), or run both inputs through one forward; until then shard the block "
        "without the unit inside. After an exception in a forward or backward: `model.reset_iter_state()` (torch 2.13)."
    )
    silent: ClassVar[str] = (
        "all transitions of the table: grouped units, further outputs, recomputation, forwards inside a backward, final callbacks"
    )
    cost: ClassVar[str] = "one comparison per hook"
    options: ClassVar[Mapping[str, Any]] = {"legal": {}}

    def configure(self, options: Mapping[str, Any]) -> None:
        # The table comes from the adapters when recording, from the header's release when reading files.
        legal: Mapping[str, Mapping[bool, frozenset[int]]] = options["legal"]
        every = frozenset(range(5))
        # By hook and pass: a lookup per event, no more.
        told = self.tracker.told
        told.before_forward, told.after_forward, told.before_backward = (
            tuple(legal.get(hook, {}).get(pass_ in _BACKWARD_PASSES, every) for pass_ in range(4))
            for hook in ("pre_forward", "post_forward", "pre_backward")
        )
        told.odd_forward, told.odd_order = self._odd_forward, self._say_order
        # A grouped unit of which only a part ran (chunked losses) has no pre-backward, hence no final callback that sets it back.
        self._grouped = {group.id for group in self.tracker.map.groups if len(group.modules) > 1}

    def _odd_forward(self, seq: int, state: GroupState, context: int, before: int, after: int) -> None:
        if not state.open and after != 4:
            self._say_closed(seq, state, context)
        legal = self.tracker.told.before_forward[context % 4]
        if before not in legal and not (before == _POST_BACKWARD and state.id in self._grouped):
            self._say_order("pre_forward", seq, state, context, before)

    def exception(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if c != _FREED:
            return
        if d >= 0 and not freed_in_its_backward(self.tracker, d, context % 4):  # a use that is outside-forward's
            return
        state = closed_in_use(self.tracker, group, context % 4) if d < 0 else self.tracker.groups[d]
        if state is None:
            return
        tracker = self.tracker
        where = "its backward" if state.training == _PRE_BACKWARD and group < 0 else "its own forward"
        if context % 4 == ev.PASS_RECOMPUTE:
            where = "its recomputation"
        step = tracker.step_number
        if state.training == _PRE_BACKWARD and group < 0 and not gathers_in_backward(state):
            self._say_never_gathered(seq, state)
            return
        cause = ev.RESHARD_CAUSES[state.freed_cause]
        if cause not in _FREED_BY:
            return
        how, hint = _FREED_BY[cause]
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, state.id, state.fqn, step,
                f"{state.name} was freed in the middle of {where}: {how} freed it at event {state.freed} (step {step}), and what used "
                f"its parameters after that failed at event {seq}; gathered they are {size(state.bytes)}.",
                hint.format(name=state.name), (state.freed, seq), state.bytes, "closed",
            )
        )  # fmt: skip

    def _say_never_gathered(self, seq: int, state: GroupState) -> None:
        name = state.name
        self.report(
            Violation(
                self.name, self.severity, self.tracker.map.model, state.id, state.fqn, self.tracker.step_number,
                f"{name} was not gathered for its backward, since set_unshard_in_backward(False) was called on it, and what used its "
                f"parameters there failed at event {seq}.",
                f"Call {name}.set_unshard_in_backward(True): only units whose backward needs no parameters (embeddings) may go "
                "without.", (state.freed, seq) if state.freed else (seq,), state.bytes, "closed",
            )
        )  # fmt: skip

    def _say_order(self, hook: str, seq: int, state: GroupState, context: int, before: int) -> None:
        tracker = self.tracker
        where = ev.PASSES[context % 4]
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, state.id, state.fqn, tracker.step_number,
                f"the {hook} hook of {state.name} (event {seq}, in the {where}) found it in state "
                f"{ev.TRAINING_STATES[before]}: an earlier pass was left half way, or a hook was called out of order.",
                f"{after_an_exception(self)} Without one: look for code that calls or wraps hooks of {state.name}.",
                (seq,), 0, hook,
            )
        )  # fmt: skip

    def _say_closed(self, seq: int, state: GroupState, context: int) -> None:
        tracker = self.tracker
        recompute = context % 4 == ev.PASS_RECOMPUTE
        what = "the recomputation of" if recompute else "a forward of"
        evidence = (state.freed, seq) if state.freed else (seq,)
        freed = f", freed at event {state.freed}," if state.freed else ""
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, state.id, state.fqn, tracker.step_number,
                f"{what} {state.name} computes at event {seq} while its parameters are not gathered{freed} and its pre-forward "
                "left them so.",
                self._open_again(state.name) if recompute else self._gathered_by_nobody(state.name), evidence, 0, "closed",
            )
        )  # fmt: skip

    def _open_again(self, name: str) -> str:
        apart = (
            "run the inputs through one forward instead of several before one backward, or, without that, do not make "
            f"{name} a unit of its own inside the checkpointed one."
        )
        if not self.since(2, 11):
            return f"torch 2.11 mends it (pytorch PR #171779): upgrade. Until then {apart}"
        return (
            f"torch 2.10 and older do so; since 2.11 the recomputation gathers it again (pytorch PR #171779), and under "
            f"{self.torch} a patch keeps it from that: take it away. With it {apart}"
        )

    def _gathered_by_nobody(self, name: str) -> str:
        return (
            f"Look for code that calls, wraps or replaces the hooks of {name} or its unshard(). After an exception: "
            f"{after_an_exception(self)}"
        )


_FREED_BY: Mapping[str, tuple[str, str]] = {
    "manual": (
        "a call of reshard()",
        "Call reshard() of {name}, or of a module around it, when its forward or backward has ended, not inside.",
    ),
    "state_dict": ("a state dict", "Take state dicts between passes, not inside of one."),
    "reset": ("reset_iter_state()", "Call reset_iter_state() between passes, not inside of one."),
}
"""Who freed a unit in the middle of a pass, by the reshard's cause, and what to change."""


def closed_in_use(tracker: Tracker, group: int, pass_: int) -> GroupState | None:
    """The group that is closed between its pre-forward and its post-forward, or its pre-backward and its post-backward.

    Args:
        group: that of the module which an exception came out of, -1 where it came out of none: out of the backward itself.
        pass_: the pass that it came out of.
    """
    if group >= 0:
        state = tracker.groups[group]
        use = (1, 2) if pass_ == ev.PASS_RECOMPUTE else (1,)
        return state if pass_ != ev.PASS_NONE and state.training in use and freed_since_opened(state) else None
    if pass_ not in _BACKWARD_PASSES:
        return None
    closed = [state for state in tracker.groups if state.touched and state.training == _PRE_BACKWARD and not state.open]
    # A pre-backward leaves its group open, unless it is told not to gather: else it was freed since, which is never right.
    found = [g for g in closed if gathers_in_backward(g) and freed_since_opened(g)]
    found = found or [g for g in closed if not gathers_in_backward(g)]
    return found[0] if len(found) == 1 else None


def freed_in_its_backward(tracker: Tracker, group: int, pass_: int) -> bool:
    """Whether the group was freed between its pre-backward and its post-backward."""
    state = tracker.groups[group]
    return pass_ in _BACKWARD_PASSES and state.touched and state.training == _PRE_BACKWARD and freed_since_opened(state)


def freed_since_opened(state: GroupState) -> bool:
    """Whether the group was gathered for its pass, and freed after that."""
    return not state.open and not state.pending and state.freed > state.opened > 0


def gathers_in_backward(state: GroupState) -> bool:
    """Whether its pre-backward gathers it: ``set_unshard_in_backward``."""
    return bool(state.flags & UNSHARD_IN_BACKWARD)


def after_an_exception(rule: Rule) -> str:
    """What helps after an exception left FSDP2 half way."""
    if rule.since(2, 13):
        return "Call model.reset_iter_state() on the root after an exception, before the next forward."
    return (
        f"After an exception {rule.torch} has no call that puts FSDP2 back (reset_iter_state is new in 2.13): end the process and "
        "start from a checkpoint, or upgrade."
    )
