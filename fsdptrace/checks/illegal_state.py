"""``illegal-state``: a group's hooks come in an order that FSDP2 does not have, or it computes while it is closed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fsdptrace import events as ev
from fsdptrace.checks.base import Rule, Violation

_BACKWARD_PASSES = (ev.PASS_BACKWARD, ev.PASS_RECOMPUTE)
_POST_BACKWARD = ev.TRAINING_STATES.index("post_backward")


class IllegalState(Rule):
    name: ClassVar[str] = "illegal-state"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = (
        "a group's hooks arrive in an order outside the table of legal transitions, or a forward or recomputation computes "
        "while the group is closed"
    )
    explanation: ClassVar[str] = (
        "A unit that computes with freed parameters fails with `mixed torch.Tensor and DTensor` or a storage of size 0, often "
        "far from the cause. torch 2.10 and older do so when a checkpointed unit with a unit inside runs twice before one "
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
        self._legal = {
            hook: tuple(legal.get(hook, {}).get(pass_ in _BACKWARD_PASSES, every) for pass_ in range(4))
            for hook in ("pre_forward", "post_forward", "pre_backward", "post_backward")
        }
        self._pre_forward = self._legal["pre_forward"]
        # A grouped unit of which only a part ran (chunked losses) has no pre-backward, hence no final callback that sets it back.
        self._grouped = {group.id for group in self.tracker.map.groups if len(group.modules) > 1}
        self._post_forward = self._legal["post_forward"]
        self._pre_backward = self._legal["pre_backward"]

    def pre_forward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if not self.tracker.groups[group].open and b != 4:
            self._say_closed(seq, group, context)
        if a not in self._pre_forward[context % 4] and not (a == _POST_BACKWARD and group in self._grouped):
            self._say_order("pre_forward", seq, group, context, a)

    def post_forward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if a not in self._post_forward[context % 4]:
            self._say_order("post_forward", seq, group, context, a)

    def pre_backward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if a not in self._pre_backward[context % 4]:
            self._say_order("pre_backward", seq, group, context, a)

    def _say_order(self, hook: str, seq: int, group: int, context: int, before: int) -> None:
        tracker = self.tracker
        state = tracker.groups[group]
        where = ev.PASSES[context % 4]
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, group, state.fqn, tracker.step_number,
                f"the {hook} hook of {state.name} (event {seq}, in the {where}) found it in state "
                f"{ev.TRAINING_STATES[before]}: an earlier pass was left half way, or a hook was called out of order.",
                f"{after_an_exception(self)} Without one: look for code that calls or wraps hooks of {state.name}.",
                (seq,), 0, hook,
            )
        )  # fmt: skip

    def _say_closed(self, seq: int, group: int, context: int) -> None:
        tracker = self.tracker
        state = tracker.groups[group]
        recompute = context % 4 == ev.PASS_RECOMPUTE
        what = "the recomputation of" if recompute else "a forward of"
        evidence = (state.freed, seq) if state.freed else (seq,)
        freed = f", freed at event {state.freed}," if state.freed else ""
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, group, state.fqn, tracker.step_number,
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


def after_an_exception(rule: Rule) -> str:
    """What helps after an exception left FSDP2 half way."""
    if rule.since(2, 13):
        return "Call model.reset_iter_state() on the root after an exception, before the next forward."
    return (
        f"After an exception {rule.torch} has no call that puts FSDP2 back (reset_iter_state is new in 2.13): end the process and "
        "start from a checkpoint, or upgrade."
    )
