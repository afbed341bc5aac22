"""``exposed-communication``: compute stood still for gathers and reductions for more than a share of the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fsdptrace.checks.base import Rule, Violation

WARM_UP = 2  # the first steps of a run: allocations, autotuning, lazy initialisation of communicators


class ExposedCommunication(Rule):
    name: ClassVar[str] = "exposed-communication"
    severity: ClassVar[str] = "warning"
    summary: ClassVar[str] = "compute waited for communication for more than `share` of a step's device time"
    explanation: ClassVar[str] = (
        "Needs device timing, which an accelerator has by default in the steps that are written in full. An all-gather or a "
        "reduction is exposed while compute has nothing else to do than to wait for it. Reported once per timed step after the "
        "first two, which set things up. `fsdptrace report` says which units it was and how far ahead to prefetch."
    )
    example: ClassVar[str] = 'fsdptrace.record(model, checks=["all"], rule_options={"exposed-communication": {"share": 0.3}})'
    mend: ClassVar[str] = (
        "Prefetch further ahead (`set_modules_to_forward_prefetch`, `set_modules_to_backward_prefetch`), gather less "
        "(`reshard_after_forward=False`, a smaller `param_dtype`), or give compute more to do per gather (batch, larger units)."
    )
    silent: ClassVar[str] = "the first two steps; steps without device timing; anything up to `share`"
    cost: ClassVar[str] = "one comparison per timed step"
    opt_in: ClassVar[bool] = True
    options: ClassVar[Mapping[str, Any]] = {"share": 0.2}

    def configure(self, options: Mapping[str, Any]) -> None:
        self._share = float(options["share"])

    def device(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if a < WARM_UP or e <= 0 or d <= self._share * e:
            return
        self.report(
            Violation(
                self.name, self.severity, self.tracker.map.model, None, "", self.tracker.step_number,
                f"In step {a} compute waited {d / 1e6:.2f} ms of {e / 1e6:.2f} ms ({100 * d / e:.0f} %) for communication: "
                f"all-gathers ran {b / 1e6:.2f} ms, reductions {c / 1e6:.2f} ms.",
                "Run `fsdptrace report`: it names the units and how far ahead set_modules_to_forward_prefetch and "
                "set_modules_to_backward_prefetch would have to go. Where gathers take longer than compute: a larger batch, "
                "reshard_after_forward=False, a smaller param_dtype.",
                (seq,), 0, "",
            )
        )  # fmt: skip
