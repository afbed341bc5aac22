"""``saved-tensor-count`` and ``saved-tensor-metadata``: a recomputation saved other tensors than its forward."""

from __future__ import annotations

import json
from typing import ClassVar

from fsdptrace import events as ev
from fsdptrace.checks import mismatch
from fsdptrace.checks.base import Rule, Violation


class _Mismatch(Rule):
    """What both have in common: they tell of one kind of mismatch."""

    what: ClassVar[str]

    def mismatch(self, seq: int, group: int, context: int, a: int, b: int, c: int, d: int, e: int) -> None:
        if ev.MISMATCHES[b] != self.what:
            return
        tracker = self.tracker
        detail = json.loads(tracker.texts.get(d))
        message, hint = mismatch.describe(tracker, group, a, detail)
        fqn = tracker.map.fqn(group)
        self.report(
            Violation(
                self.name, self.severity, tracker.map.model, None if group < 0 else group, fqn, tracker.step_number,
                message, hint, (a, c, seq), 0, f"{detail['name']} {a}",
            )
        )  # fmt: skip


class SavedTensorCount(_Mismatch):
    name: ClassVar[str] = "saved-tensor-count"
    what: ClassVar[str] = "count"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = "a checkpointed region saved another number of tensors in its recomputation than in its forward"
    explanation: ClassVar[str] = (
        "The recomputation took another way than the forward, so that what the backward needs is not there: PyTorch raises a "
        "CheckpointError that names two numbers. The rule says which module and which call of it, the first saved tensor that "
        "differs, whether whole repetitions of a block are missing (the loop over experts of a router that decided otherwise), "
        "and what is known to differ between what the two began with. Without fingerprints that is the global state, the dtypes "
        "of units' inputs, buffers that were written, the units used; with `fingerprint` also values."
    )
    example: ClassVar[str] = (
        "def forward(self, x):\n"
        "    hit = (self.gate(x) + self.bias).topk(8).indices.unique()\n"
        "    self.bias[hit] -= 1                  # the recomputation will hit others\n"
        "    for expert in (self.experts[i] for i in hit.tolist()):\n"
        "        x = x + expert(x)\n"
        "    return x"
    )
    mend: ClassVar[str] = (
        "What to change depends on the cause, which the message names. Where it is unknown, run again with "
        "`FSDPTRACE_FINGERPRINT=inputs,params`, or call `fsdptrace.diagnose(error)` where the error is caught."
    )
    silent: ClassVar[str] = (
        "a recomputation that early stop ended, nested regions, a region recomputed twice (retain_graph), selective checkpointing"
    )
    cost: ClassVar[str] = "none: PyTorch counts and keeps shapes anyway; they are looked at when it finds a mismatch"


class SavedTensorMetadata(_Mismatch):
    name: ClassVar[str] = "saved-tensor-metadata"
    what: ClassVar[str] = "metadata"
    severity: ClassVar[str] = "error"
    summary: ClassVar[str] = "a recomputation saved as many tensors as the forward, some of another shape, dtype or device"
    explanation: ClassVar[str] = (
        "As saved-tensor-count. Other shapes come of another routing of tokens, other dtypes of a cast that the recomputation "
        "lacks. Early stop ends a recomputation at the forward's count, so that one that would have saved more shows here too."
    )
    example: ClassVar[str] = (
        "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)\n"
        "fully_shard(block, mp_policy=policy)\n"
        "checkpoint(block, x_in_float32, use_reentrant=False)   # torch before 2.13: no input cast in the recomputation"
    )
    mend: ClassVar[str] = "As for saved-tensor-count: the message names the cause or says which option to set."
    silent: ClassVar[str] = 'as for saved-tensor-count; `determinism_check="none"`, where PyTorch keeps no metadata'
    cost: ClassVar[str] = SavedTensorCount.cost
