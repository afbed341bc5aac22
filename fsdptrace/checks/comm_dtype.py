"""``comm-dtype``: a collective runs in another dtype than the unit's policy names."""

from __future__ import annotations

from typing import Any, ClassVar

from fsdptrace import events as ev
from fsdptrace.checks.base import Rule, Violation


class CommDtype(Rule):
    name: ClassVar[str] = "comm-dtype"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = "a collective of a group runs in another dtype than its policy names"
    explanation: ClassVar[str] = (
        "FSDP2 takes `param_dtype` and `reduce_dtype` down in the first forward, and drops them where parameters have that dtype "
        "already. A model that is cast afterwards, or a policy that is replaced, changes what is gathered and reduced: twice the bytes, "
        "or gradients summed in bf16 that were to be summed in fp32."
    )
    example: ClassVar[str] = (
        "fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))   # of a bf16 model\n"
        "model(batch)\n"
        "model.float()                 # gathers run in fp32 from here on"
    )
    mend: ClassVar[str] = "Cast the model before its first forward; set the policy in `fully_shard` and not afterwards."
    silent: ClassVar[str] = (
        "policies that name no dtype, parameters with an all-gather of their own (float8), integer parameters beside others"
    )
    cost: ClassVar[str] = "one comparison per gather and per reduction"

    def configure(self, options: Any) -> None:
        self.tracker.told.other_dtype = self._gathered
        groups = self.tracker.map.groups
        # What a reduction must have, 0 where the policy names none.
        self._reduced = [ev.DTYPE_NUMBER.get(group.named_reduce_dtype, 0) for group in groups]

    def _gathered(self, seq: int, group: int, dtype: int) -> None:
        named = self.tracker.map.groups[group].named_dtype
        if named and dtype and named != ev.DTYPES[dtype]:
            self._say(seq, group, "gathered", "param_dtype", named, ev.DTYPES[dtype])

    def reduce_scatter(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        named = self._reduced[group]
        if named and c and c != named:
            self._say(seq, group, "reduced", "reduce_dtype", ev.DTYPES[named], ev.DTYPES[c])

    def all_reduce(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        self.reduce_scatter(seq, group, context, a, b, c, d, e)

    def _say(self, seq: int, group: int, what: str, which: str, named: str, got: str) -> None:
        tracker = self.tracker
        state = tracker.groups[group]
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, group, state.fqn, tracker.step_number,
                f"{state.name} was {what} in {got} at event {seq}, where its policy names {which}={named}.",
                "Look for a cast of the model (.float(), .bfloat16(), .to(dtype)) after its first forward, or a policy set after "
                "fully_shard: FSDP2 takes the dtypes down in the first forward.",
                (seq,), 0, which,
            )
        )  # fmt: skip
