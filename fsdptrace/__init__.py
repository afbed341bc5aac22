"""fsdptrace: watches PyTorch FSDP2 (``fully_shard``) while it trains and says what went wrong, where and why.

Names are imported when first used: reading traces works where torch is not installed.
"""

from __future__ import annotations

from fsdptrace._version import __version__

TYPE_CHECKING = False  # as typing has it, whose import alone would cost every process under FSDPTRACE=1 its 10 ms

if TYPE_CHECKING:
    from fsdptrace.adapters.compat import UnsupportedTorch
    from fsdptrace.adapters.diagnose import Diagnosis, diagnose
    from fsdptrace.analysis.tables import load
    from fsdptrace.checks.base import InvariantViolation, Rule, Violation
    from fsdptrace.events import Event
    from fsdptrace.inspection import Inspection, inspect
    from fsdptrace.model_map import GroupInfo, ModelMap
    from fsdptrace.options import Options
    from fsdptrace.recording import AlreadyRecorded, Recording, record
    from fsdptrace.steps import Step
    from fsdptrace.summary import Summary

_PLACES = {
    "record": "recording", "Recording": "recording", "AlreadyRecorded": "recording", "Options": "options",
    "Violation": "checks.base", "InvariantViolation": "checks.base", "Rule": "checks.base", "Event": "events",
    "Step": "steps", "Summary": "summary", "ModelMap": "model_map", "GroupInfo": "model_map",
    "UnsupportedTorch": "adapters.compat", "load": "analysis.tables", "Inspection": "inspection",
    "inspect": "inspection", "Diagnosis": "adapters.diagnose", "diagnose": "adapters.diagnose",
}  # fmt: skip

__all__ = [
    "AlreadyRecorded", "Diagnosis", "Event", "GroupInfo", "Inspection", "InvariantViolation", "ModelMap", "Options",
    "Recording", "Rule", "Step", "Summary", "UnsupportedTorch", "Violation", "__version__", "diagnose", "inspect", "load",
    "record",
]  # fmt: skip


def __getattr__(name: str) -> object:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'fsdptrace' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"fsdptrace.{place}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
