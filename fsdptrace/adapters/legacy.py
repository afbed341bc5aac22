"""Behaviour of older PyTorch releases, brought back on newer ones: for the demo, examples and tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsdptrace.adapters.compat import examine


@contextmanager
def old_bookkeeping() -> Iterator[bool]:
    """The post-forward bookkeeping of torch 2.9 and older: a recomputation frees the unit and appends it to the post-forward
    order again (2.9.1 _fsdp_param_group.py, post_forward; mended in 2.10 by pytorch PR #164009).

    Yields whether anything had to be brought back: False on a release that still has it.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    if examine().release < (2, 10):
        yield False
        return
    new = FSDPParamGroup.post_forward

    def post_forward(self: Any, module: Any, input: Any, output: Any) -> Any:
        self.reshard()
        self._record_post_forward()
        self._training_state = TrainingState.IDLE
        return output

    FSDPParamGroup.post_forward = post_forward  # type: ignore[method-assign]
    try:
        yield True
    finally:
        FSDPParamGroup.post_forward = new  # type: ignore[method-assign]


@contextmanager
def old_input_casts() -> Iterator[bool]:
    """Recomputation as in torch 2.12 and older: a unit under checkpoint is given its input as it was saved, without the cast of
    ``MixedPrecisionPolicy`` that the forward made (mended in 2.13 by pytorch PR #182580).

    Yields whether anything had to be brought back.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    state: Any = FSDPState
    if examine().release < (2, 13) or not hasattr(state, "_cast_forward_inputs"):
        yield False
        return
    new = state._cast_forward_inputs

    def _cast_forward_inputs(self: Any, *given: Any) -> Any:
        if self._training_state == TrainingState.PRE_BACKWARD:
            return given[-2:]  # args, kwargs
        return new(self, *given)

    state._cast_forward_inputs = _cast_forward_inputs
    try:
        yield True
    finally:
        state._cast_forward_inputs = new
