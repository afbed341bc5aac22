"""What recording touches in the process, beside the model's own objects: attached for models that are being recorded."""

from __future__ import annotations

from fsdptrace.adapters.backward import SEAM
from fsdptrace.adapters.checkpoint import CHECKPOINTS
from fsdptrace.adapters.context import Context
from fsdptrace.adapters.state_dict import STATE_DICTS


def attach(contexts: list[Context]) -> None:
    """Starts telling ``contexts`` of backwards, of checkpointed regions and of errors in state-dict code."""
    SEAM.add(contexts)
    CHECKPOINTS.add([context.regions for context in contexts])
    STATE_DICTS.add(contexts)


def detach(contexts: list[Context]) -> None:
    """Stops it; the last ones to go put everything back."""
    SEAM.remove(contexts)
    CHECKPOINTS.remove([context.regions for context in contexts])
    STATE_DICTS.remove(contexts)
