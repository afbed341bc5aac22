"""``recompute-units``: a recomputation used other units than the forward of its region, or in another order."""

from __future__ import annotations

from typing import ClassVar

from fsdptrace import events as ev
from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.mismatch import called, sequences, units_differ
from fsdptrace.checks.text import count

_RETURNED = ev.ENDS.index("returned")


class RecomputeUnits(Rule):
    name: ClassVar[str] = "recompute-units"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = "the units used in a recomputation, or their order, differ from those of the forward"
    explanation: ClassVar[str] = (
        "The recomputation went another way, through other units. If their saved tensors look alike PyTorch does not notice, and "
        "gradients are those of experts that did not make the output. Ranks that go different ways gather different units and hang."
    )
    example: ClassVar[str] = (
        "for expert in self.experts:\n"
        "    fully_shard(expert)\n"
        "# and a router that decides by state that its own forward changes, under checkpoint"
    )
    mend: ClassVar[str] = (
        "Make the choice outside of the checkpointed function and pass it in, or keep it in the forward and use it again; update "
        "a router's state after the optimizer's step."
    )
    silent: ClassVar[str] = (
        "a recomputation that early stop ended, for which the forward's first units are enough; recomputation by hand, outside of "
        "a backward; a pass that began on units that an exception left half done (`unclean-start`)"
    )
    cost: ClassVar[str] = "two integers per pre-forward; one comparison of sequences per recomputation"

    def configure(self, options: object) -> None:
        self._half_way = False

    def exception(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        # Units that it leaves in pre-backward skip the hooks of the next forward, so that this seems to use none of them.
        self._half_way = self._half_way or context % 4 in (ev.PASS_BACKWARD, ev.PASS_RECOMPUTE)

    def backward(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self._half_way = self._half_way and not b

    def state(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self._half_way = False

    def recompute(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        tracker = self.tracker
        state = tracker.regions.known.get(a)
        if state is None or context % 4 != ev.PASS_RECOMPUTE or self._half_way:
            return
        again = tracker.regions.again
        at = units_differ(state.units, again, c == _RETURNED)
        if at is None:
            return
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, None if group < 0 else group, tracker.map.fqn(group),
                tracker.step_number,
                f"the recomputation of {called(tracker, a, state.name)} (event {seq}) used {count(len(again), 'unit')}, its forward "
                f"{len(state.units):,}, and they part at {sequences(tracker, state.units, again, at)}.",
                "Something decided otherwise than in the forward (a router, a branch): what it depends on has changed in between, "
                "or is random. Decide outside of the checkpointed function, or leave the router out of it. "
                "FSDPTRACE_FINGERPRINT=inputs,params tells what differs.",
                (a, seq), 0, f"{state.name} {a}",
            )
        )  # fmt: skip
