"""What recording touches in the process, beside the model's own objects: attached for models that are being recorded."""

from __future__ import annotations

from fsdptrace.adapters.backward import SEAM
from fsdptrace.adapters.context import Context
from fsdptrace.adapters.state_dict import STATE_DICTS


def attach(contexts: list[Context]) -> None:
    """Starts telling ``contexts`` of backwards and of errors in state-dict code."""
    SEAM.add(contexts)
    STATE_DICTS.add(contexts)


def detach(contexts: list[Context]) -> None:
    """Stops it; the last ones to go put everything back."""
    SEAM.remove(contexts)
    STATE_DICTS.remove(contexts)
