"""The sink for metrics over OTLP: snapshots at the times that the files speak of, whenever they are sent."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    InMemoryMetricReader,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
)

from fsdptrace.analysis.follow import FollowedStep, Follower, Position
from fsdptrace_exporters import identity
from fsdptrace_exporters.metrics import ProcessMetrics, instrument, scope, views
from fsdptrace_exporters.otlp import build
from fsdptrace_exporters.otlp.delivery import Delivery, NotDelivered
from fsdptrace_exporters.sinks import Settings

POINTS = 4000  # data points of a request at most, about 1 MB (but those of one process go together)
DELAY = 1.0  # seconds that a snapshot waits for those of other processes


@dataclass(slots=True)
class _Metered:
    """One process: its numbers, the reader that collects them, and when (Unix ns)."""

    numbers: ProcessMetrics
    reader: InMemoryMetricReader
    provider: MeterProvider
    begun: int
    histograms_begun: int
    last: int
    next: int
    taken: tuple[Position, dict[str, Any]] | None = None  # up to where the last snapshot goes, and the numbers as of then
    sent: tuple[Position | None, dict[str, Any]] = (None, {})  # the same of the last one that was delivered


class MetricSink:
    """Keeps the numbers of every process and delivers them at intervals.

    Args:
        name: see :class:`~fsdptrace_exporters.sinks.Sink`.
        delivery: takes a list with one ``MetricsData``.
        temporality, aggregation: as the SDK's exporter prefers them.
        interval: seconds between snapshots.
        modules: whether module names are attributes.
        buckets: whether ours are used for histograms.
    """

    linger = 2.0

    def __init__(
        self, name: str, delivery: Delivery, temporality: Any, aggregation: Any, interval: float, modules: bool, buckets: bool,
        settings: Settings,
    ) -> None:  # fmt: skip
        self.name = name
        self._delivery = delivery
        self._temporality = temporality
        self._aggregation = aggregation
        self._interval = int(interval * 1e9)
        self._modules = modules
        self._buckets = buckets
        self._settings = settings
        self._processes: dict[Any, _Metered] = {}
        self._waiting: list[ResourceMetrics] = []
        self._points = 0
        self._since = 0.0
        self.beside: list[Any] = []  # the sinks whose dropped items are counted too

    def begin(self, process: Follower, state: Mapping[str, Any]) -> None:
        """See :class:`~fsdptrace_exporters.sinks.Sink`; so are the methods below."""
        header = process.header
        reader = InMemoryMetricReader(self._temporality, self._aggregation)
        provider = MeterProvider(
            [reader], build.resource(header), shutdown_on_exit=False, views=views() if self._buckets else ()
        )  # fmt: skip
        numbers = ProcessMetrics(process, self._modules)
        numbers.listen(instrument(provider.get_meter(*scope()), lambda: [numbers]))
        begun = histograms = last = header.unix_ns
        if state:
            try:
                numbers.restore(state)
                last = histograms = int(state["at"])
                reader.get_metrics_data()  # what was sent before is no difference
            except (KeyError, TypeError, ValueError):
                pass
        metered = _Metered(numbers, reader, provider, begun, histograms, last, last + self._interval, sent=(None, dict(state)))
        self._processes[process.path] = metered

    def step(self, process: Follower, step: FollowedStep) -> None:
        metered = self._processes[process.path]
        metered.numbers.device()
        metered.numbers.step(step)
        if step.part.line is not None:
            at = identity.unix_ns(process.header, step.part.line.t)
            if at >= metered.next:
                self._snapshot(process, metered, at)

    def round(self, process: Follower, caught_up: bool) -> None:
        metered = self._processes.get(process.path)
        if metered is None:
            return
        metered.numbers.device()
        if caught_up and self._settings.live and not process.ended:
            now = time.time_ns()
            if now >= metered.next:
                self._snapshot(process, metered, now)

    def end(self, process: Follower) -> None:
        metered = self._processes.pop(process.path)
        metered.numbers.device()
        at = identity.unix_ns(process.header, process.trace.last_t) if process.trace.last_t else metered.last
        self._snapshot(process, metered, max(at, metered.last + 1))
        metered.provider.shutdown()

    def _snapshot(self, process: Follower, metered: _Metered, at: int) -> None:
        """Collects what is known at ``at``, Unix ns."""
        header = process.header
        metered.numbers.now = at - header.unix_ns + header.perf_counter_ns
        dropped = sum(sink.dropped for sink in self.beside)
        metered.numbers.own_cost(dropped, time.process_time() if self._settings.live else None)
        data = metered.reader.get_metrics_data()
        if data is not None:
            for resource in data.resource_metrics:
                self._add(_stamped(resource, at, metered))
        metered.last, metered.next = at, at + self._interval
        metered.taken = process.position, {**metered.numbers.state(), "at": at}

    def _add(self, resource: ResourceMetrics) -> None:
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append(resource)
        self._points += _points(resource)

    def flush(self, due: bool) -> bool:
        if self._waiting and (due or self._points >= POINTS or time.monotonic() - self._since >= DELAY):
            while self._waiting:
                batch, size = 0, 0
                while batch < len(self._waiting) and (not batch or size + _points(self._waiting[batch]) <= POINTS):
                    size += _points(self._waiting[batch])
                    batch += 1
                try:
                    self._delivery.send([MetricsData(self._waiting[:batch])])
                except NotDelivered:
                    return False
                del self._waiting[:batch]
                self._points -= size
            for metered in self._processes.values():
                metered.sent = metered.taken or metered.sent
        return not self._waiting

    def reached(self, process: Follower) -> Position | None:
        """Up to its last snapshot that was delivered: what happened since is in no request yet."""
        metered = self._processes.get(process.path)
        return process.position if metered is None else metered.sent[0]

    def state(self, process: Follower) -> dict[str, Any]:
        metered = self._processes.get(process.path)
        return {} if metered is None else metered.sent[1]

    def close(self) -> None:
        pass


def _points(resource: ResourceMetrics) -> int:
    return sum(len(metric.data.data_points) for scope in resource.scope_metrics for metric in scope.metrics)


def _stamped(resource: ResourceMetrics, at: int, metered: _Metered) -> ResourceMetrics:
    """``resource`` with the time that its numbers are of: the SDK knows only when they were collected."""
    scopes = []
    for scoped in resource.scope_metrics:
        metrics = []
        for metric in scoped.metrics:
            data: Any = metric.data
            temporality = getattr(data, "aggregation_temporality", None)
            begun = metered.begun if not hasattr(data.data_points[0], "bucket_counts") else metered.histograms_begun
            start = metered.last if temporality == AggregationTemporality.DELTA else begun
            points = []
            for point in data.data_points:
                times: dict[str, Any] = {"time_unix_nano": at}
                if temporality is not None:
                    times["start_time_unix_nano"] = start
                points.append(replace(point, **times))
            metrics.append(replace(metric, data=replace(data, data_points=points)))
        scopes.append(ScopeMetrics(scoped.scope, metrics, scoped.schema_url))
    return ResourceMetrics(resource.resource, scopes, resource.schema_url)
