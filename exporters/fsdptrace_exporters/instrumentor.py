"""OpenTelemetry auto-instrumentation: ``opentelemetry-instrument torchrun train.py`` traces FSDP2 with no change to the code.

It switches on what ``FSDPTRACE=1`` does, in this process and those that it starts, with the ``otlp`` exporter unless
``FSDPTRACE_EXPORT`` says otherwise. ``FSDPTRACE=0`` keeps it off, and so does
``OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=fsdptrace``.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined,unused-ignore]


class FSDPTraceInstrumentor(BaseInstrumentor):  # type: ignore[misc,unused-ignore]
    """The entry point ``fsdptrace`` of the group ``opentelemetry_instrumentor``."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """What has to be there to be instrumented."""
        return ("torch >= 2.6",)

    def _instrument(self, **kwargs: Any) -> None:
        if os.environ.get("FSDPTRACE", "").strip():
            return  # on already, or off on purpose
        os.environ["FSDPTRACE"] = "1"
        os.environ.setdefault("FSDPTRACE_EXPORT", "otlp")
        import fsdptrace._autostart  # noqa: F401 (starts when it is imported)

    def _uninstrument(self, **kwargs: Any) -> None:
        """Processes that are started from now on are not recorded; what records in this one goes on to its end."""
        os.environ.pop("FSDPTRACE", None)
