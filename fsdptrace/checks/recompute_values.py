"""``recompute-values``: a recomputation began with, or came to, other values than the forward of its region."""

from __future__ import annotations

import json
from typing import ClassVar

from fsdptrace import events as ev
from fsdptrace.checks.base import Rule, Violation
from fsdptrace.checks.mismatch import describe_values

_VALUES = ev.MISMATCHES.index("values")


class RecomputeValues(Rule):
    name: ClassVar[str] = "recompute-values"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = (
        "with `fingerprint`: gathered parameters, inputs or saved tensors of a recomputation have other values than in the forward"
    )
    explanation: ClassVar[str] = (
        "PyTorch compares how many tensors a recomputation saves and their shapes, not what is in them: a recomputation from "
        "other parameters or inputs gives wrong gradients and no error. With `fingerprint` the values are compared, bit for bit, "
        "on the device, when the step ends. The message names the first that differs, hence where to look."
    )
    example: ClassVar[str] = (
        "y = checkpoint(block, x, use_reentrant=False)\n"
        "block.weight.data.mul_(0.5)       # while it is gathered, before the backward\n"
        "y.sum().backward()"
    )
    mend: ClassVar[str] = (
        "For parameters: find what writes into them between forward and backward. For inputs: what changes them in place. For "
        "saved tensors alone: make operators deterministic, or take those that draw random numbers out of the region."
    )
    silent: ClassVar[str] = (
        "state that a forward changes without its results depending on it (counters, statistics); random generators that the "
        "forward does not draw from; recordings without `fingerprint`"
    )
    cost: ClassVar[str] = "that of the fingerprints (docs/recompute.md); nothing without"

    def mismatch(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if b != _VALUES:
            return
        tracker = self.tracker
        detail = json.loads(tracker.texts.get(d))
        message, hint = describe_values(tracker, group, a, detail)
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, None if group < 0 else group, tracker.map.fqn(group),
                tracker.step_number, message, hint, (a, c, seq), 0, f"{detail['name']} {a}",
            )
        )  # fmt: skip
