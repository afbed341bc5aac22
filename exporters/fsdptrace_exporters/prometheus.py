"""``--to prometheus``: the same metrics for a Prometheus that scrapes this node, one port for all of its ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import REGISTRY, gc_collector, platform_collector, process_collector, start_http_server

from fsdptrace.analysis.follow import FollowedStep, Follower
from fsdptrace_exporters.metrics import ProcessMetrics, instrument, scope, views
from fsdptrace_exporters.otlp.exporter import metric_modules
from fsdptrace_exporters.sinks import Settings, Sink, Unusable

HOST = "127.0.0.1"
PORT = 9464  # the default of the specification


def prometheus(argument: str, settings: Settings) -> Sequence[Sink]:
    """One sink; ``argument`` is ``HOST:PORT``, ``:PORT`` or nothing, for which the ``OTEL_EXPORTER_PROMETHEUS_*`` variables
    and then 127.0.0.1:9464 stand.

    Raises:
        Unusable: that is no address, it is taken, or there is nothing to listen for.
    """
    if not settings.live:
        raise Unusable("prometheus is scraped while a run is followed: add --follow")
    host = os.environ.get("OTEL_EXPORTER_PROMETHEUS_HOST", "").strip() or HOST
    port = os.environ.get("OTEL_EXPORTER_PROMETHEUS_PORT", "").strip() or str(PORT)
    if argument:
        before, _, after = argument.rpartition(":")
        host, port = before or host, after
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise Unusable(f"prometheus: {port!r} is not a port; use prometheus:HOST:PORT")
    return [PrometheusSink(host.strip("[]"), int(port), settings)]


class PrometheusSink:
    """Serves ``/metrics`` for as long as it lives, and a while after the last process ended, so that its end is scraped."""

    name = "prometheus"
    linger = 30.0

    def __init__(self, host: str, port: int, settings: Settings) -> None:
        self._settings = settings
        self._processes: dict[Any, tuple[Follower, ProcessMetrics]] = {}
        self._ended: list[Any] = []
        for own in (gc_collector.GC_COLLECTOR, platform_collector.PLATFORM_COLLECTOR, process_collector.PROCESS_COLLECTOR):
            try:  # numbers of this process, which nobody asked for
                REGISTRY.unregister(own)
            except KeyError:
                pass
        # Ranks are on the points themselves: one target stands for all of them.
        reader = PrometheusMetricReader(disable_target_info=True)
        self._provider = MeterProvider([reader], Resource({}), shutdown_on_exit=False, views=views())
        self._record = instrument(self._provider.get_meter(*scope()), self._numbers)
        try:
            started: Any = start_http_server(port, host)
        except OSError as error:
            raise Unusable(
                f"prometheus: cannot listen on {host}:{port}: {error.strerror or error}; "
                "set OTEL_EXPORTER_PROMETHEUS_PORT or OTEL_EXPORTER_PROMETHEUS_HOST"
            ) from None
        self._server = started[0] if started else None

    def _numbers(self) -> list[ProcessMetrics]:
        """Called by the server's thread when it is scraped."""
        numbers = []
        for process, known in list(self._processes.values()):
            header = process.header
            known.now = time.time_ns() - header.unix_ns + header.perf_counter_ns if not process.ended else process.trace.last_t
            known.own_cost(0, time.process_time())
            numbers.append(known)
        return numbers

    def begin(self, process: Follower, state: Mapping[str, Any]) -> None:
        """See :class:`~fsdptrace_exporters.sinks.Sink`; so are the methods below."""
        numbers = ProcessMetrics(process, metric_modules())
        numbers.listen(self._record)
        if state:
            try:
                numbers.restore(state)
            except (KeyError, TypeError, ValueError):
                pass
        self._processes[process.path] = (process, numbers)

    def step(self, process: Follower, step: FollowedStep) -> None:
        self._processes[process.path][1].step(step)

    def round(self, process: Follower, caught_up: bool) -> None:
        self._processes[process.path][1].device()

    def end(self, process: Follower) -> None:
        # Its last numbers stay until others come: of a restart, both would be there.
        attempt = process.header.attempt
        for path, (other, _) in list(self._processes.items()):
            if other.ended and other.header.rank == process.header.rank and other.header.attempt < attempt:
                del self._processes[path]

    def flush(self, due: bool) -> bool:
        return True

    def state(self, process: Follower) -> dict[str, Any]:
        return self._processes[process.path][1].state()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
