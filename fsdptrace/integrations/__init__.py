"""Callbacks for the frameworks that people train with. Each imports its framework when it is used, and not before.

* :class:`~fsdptrace.integrations.transformers.TransformersCallback` for ``transformers.Trainer``,
* :class:`~fsdptrace.integrations.lightning.LightningCallback` for Lightning's ``Trainer``,
* :func:`~fsdptrace.integrations.accelerate.record_accelerate` around a loop of Accelerate.

``docs/integrations.md`` has recipes, also for those that need no code.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fsdptrace.integrations.accelerate import record_accelerate
    from fsdptrace.integrations.lightning import LightningCallback
    from fsdptrace.integrations.transformers import TransformersCallback

_PLACES = {
    "TransformersCallback": "transformers", "LightningCallback": "lightning", "record_accelerate": "accelerate",
}  # fmt: skip

__all__ = ["LightningCallback", "TransformersCallback", "record_accelerate"]


def __getattr__(name: str) -> object:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'fsdptrace.integrations' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"fsdptrace.integrations.{place}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
