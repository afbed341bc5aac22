"""``--to otlp-json:FILE``: OTLP as JSON lines, by the official encoder, one file per signal."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.exporter.otlp.json.file import FileMetricExporter, FileSpanExporter
from opentelemetry.exporter.otlp.json.file._log_exporter import FileLogExporter

from fsdptrace_exporters.otlp.delivery import Delivery, ear
from fsdptrace_exporters.otlp.exporter import make_sink
from fsdptrace_exporters.sinks import Settings, Sink, Unusable

_EXPORTERS: dict[str, Any] = {"traces": FileSpanExporter, "metrics": FileMetricExporter, "logs": FileLogExporter}


def otlp_json(argument: str, settings: Settings) -> Sequence[Sink]:
    """Sinks that write ``FILE.traces.jsonl``, ``FILE.metrics.jsonl`` and ``FILE.logs.jsonl``, as the collector's file receiver
    reads them; a suffix ``.json`` or ``.jsonl`` of FILE is moved to the end.

    Raises:
        Unusable: no file is named, or one cannot be written.
    """
    if not argument:
        raise Unusable("otlp-json needs a file: --to otlp-json:FILE")
    if settings.live:
        raise Unusable("otlp-json takes a finished run: leave --follow out")
    ear()
    sinks = []
    for signal, kind in _EXPORTERS.items():
        path = signal_file(argument, signal)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Unusable(f"{path}: cannot be written: {error.strerror or error}") from None
        stream = os.fdopen(fd, "w", encoding="utf-8")
        exporter = kind(stream=stream)
        delivery = Delivery(signal, _write(exporter, path), str(path), "file", settings)
        sink = make_sink(signal, f"otlp-json-{signal}", delivery, exporter, settings)
        sink.keeps_position = False
        sinks.append(sink)
    return sinks


def signal_file(argument: str, signal: str) -> Path:
    """The file of a signal: ``trace.json`` becomes ``trace.traces.json``."""
    path = Path(argument)
    suffix = path.suffix if path.suffix in (".json", ".jsonl") else ""
    return path.with_name(f"{path.name.removesuffix(suffix)}.{signal}{suffix or '.jsonl'}")


def _write(exporter: Any, path: Path) -> Callable[[Sequence[Any]], bool]:
    def write(batch: Sequence[Any]) -> bool:
        one = batch[0] if type(batch[0]).__name__ == "MetricsData" else batch
        if exporter.export(one).name != "SUCCESS":
            # A full disk does not get better by waiting.
            raise Unusable(f"{path}: cannot be written on; what is in it is whole lines but for the last")
        return True

    return write
