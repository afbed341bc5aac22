"""``--to otlp``: the three signals over gRPC or HTTP, as the standard ``OTEL_*`` variables say."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from fsdptrace_exporters.otlp.delivery import Delivery, ear, without_user
from fsdptrace_exporters.sinks import Settings, Sink, Unusable

INTERVAL = 10.0  # seconds between metrics, where OTEL_METRIC_EXPORT_INTERVAL does not say otherwise
BATCH = 512  # spans of a request, where OTEL_BSP_MAX_EXPORT_BATCH_SIZE does not

_CLASSES = {
    "traces": ("trace_exporter", "OTLPSpanExporter"),
    "metrics": ("metric_exporter", "OTLPMetricExporter"),
    "logs": ("_log_exporter", "OTLPLogExporter"),
}
_OFF = ("none",)


def otlp(argument: str, settings: Settings) -> Sequence[Sink]:
    """The sinks for the signals that the environment does not turn off.

    Raises:
        Unusable: the SDK or its exporter is missing, a variable cannot be used, or everything is turned off.
    """
    if argument:
        raise Unusable(
            f"otlp takes nothing after the colon (got {argument!r}): the OTEL_EXPORTER_OTLP_* variables say where to"
        )
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        raise Unusable("OTEL_SDK_DISABLED=true turns OpenTelemetry off, so that nothing is exported")
    ear()
    wanted = [signal for signal in _CLASSES if _wanted(signal, settings)]
    if not wanted:
        raise Unusable("OTEL_TRACES_EXPORTER, OTEL_METRICS_EXPORTER and OTEL_LOGS_EXPORTER turn every signal off")
    sinks: dict[str, Any] = {}
    for signal in wanted:
        exporter, protocol, where = _exporter(signal)
        name = f"otlp-{signal}-{hashlib.blake2b(without_user(where).encode(), digest_size=4).hexdigest()}"
        delivery = Delivery(signal, _export(exporter), without_user(where), protocol, settings)
        sinks[signal] = make_sink(signal, name, delivery, exporter, settings)
    if "metrics" in sinks:
        sinks["metrics"].beside = [sinks["traces"]] if "traces" in sinks else []
    return list(sinks.values())


def make_sink(signal: str, name: str, delivery: Delivery, exporter: Any, settings: Settings) -> Any:
    """The sink of a signal in front of an exporter of the SDK's kind."""
    if signal == "traces":
        from opentelemetry.sdk.trace import TracerProvider

        from fsdptrace_exporters.otlp.traces import TraceSink

        sampler = TracerProvider(shutdown_on_exit=False).sampler  # OTEL_TRACES_SAMPLER and its argument
        return TraceSink(name, delivery, sampler, number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH), settings)
    if signal == "logs":
        from fsdptrace_exporters.otlp.logs import LogSink

        return LogSink(name, delivery, settings)
    from fsdptrace_exporters.otlp.metering import MetricSink

    interval = number("OTEL_METRIC_EXPORT_INTERVAL", int(INTERVAL * 1000)) / 1000
    exponential = "exponential" in os.environ.get("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "").lower()
    return MetricSink(
        name, delivery, exporter._preferred_temporality, exporter._preferred_aggregation, interval, metric_modules(),
        not exponential, settings,
    )  # fmt: skip


def metric_modules() -> bool:
    """``FSDPTRACE_METRIC_MODULES=1``: module names are attributes of metrics, a time series for each."""
    return os.environ.get("FSDPTRACE_METRIC_MODULES", "").strip().lower() not in ("", "0", "false", "no", "off")


def number(name: str, default: int) -> int:
    """A whole number above 0 from the environment.

    Raises:
        Unusable: it is none.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdigit() or not int(text):
        raise Unusable(f"{name}={text!r} is not a whole number above 0")
    return int(text)


def _wanted(signal: str, settings: Settings) -> bool:
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    names = [name.strip().lower() for name in os.environ.get(variable, "otlp").split(",") if name.strip()]
    if not names or "otlp" in names or any(name.startswith("otlp_proto") for name in names):
        return True
    if names != ["none"]:
        settings.say(f"note: {variable}={','.join(names)} names no otlp exporter, so no {signal} are sent")
    return False


def _exporter(signal: str) -> tuple[Any, str, str]:
    """The SDK's exporter, its protocol and its endpoint (as given, user info and all)."""
    own = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL")
    protocol = (own or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc").strip().lower()
    packages = {"grpc": "grpc", "http/protobuf": "http"}
    if protocol not in packages:
        raise Unusable(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol!r} is not supported here; there are grpc and http/protobuf")
    module, name = _CLASSES[signal]
    path = f"opentelemetry.exporter.otlp.proto.{packages[protocol]}.{module}"
    try:
        kind = getattr(importlib.import_module(path), name)
    except ImportError as error:
        raise Unusable(
            f"otlp over {protocol} needs {error.name or path}, which is not installed: pip install opentelemetry-exporter-otlp"
        ) from None
    try:
        exporter = kind()
    except Exception as error:
        # Not the message: it may hold what is in the variables.
        kept = type(error).__name__
        raise Unusable(f"the OTLP exporter for {signal} does not accept the OTEL_EXPORTER_OTLP_* variables: {kept}") from None
    specific = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    common = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if protocol == "grpc":
        return exporter, protocol, specific or common or "http://localhost:4317"
    return exporter, protocol, specific or f"{(common or 'http://localhost:4318').rstrip('/')}/v1/{signal}"


def _export(exporter: Any) -> Callable[[Sequence[Any]], bool]:
    """``exporter.export`` for lists: metrics come as a list of one."""

    def export(batch: Sequence[Any]) -> bool:
        one = batch[0] if type(batch[0]).__name__ == "MetricsData" else batch
        return bool(exporter.export(one).name == "SUCCESS")

    return export
