"""Metrics of a run by the SDK's own instruments, one set per process or one for all; who collects them decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from fsdptrace import events as ev
from fsdptrace.analysis.follow import FollowedStep, Follower
from fsdptrace.summary import rows_of
from fsdptrace_exporters import identity

STEP_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)  # seconds
HOST_BOUNDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)

Key = tuple[tuple[str, Any], ...]

GAUGES: Mapping[str, tuple[str, str]] = {
    "fsdp.step": ("{step}", "Number of the newest finished step"),
    "fsdp.last_event.age": ("s", "Time since FSDP2 last did anything in this process"),
    "fsdp.unsharded.memory": ("By", "Gathered parameters at the end of the newest step"),
    "fsdp.unsharded.memory.peak": ("By", "Most gathered parameters at one time of the newest step"),
    "fsdp.unsharded.past_backward": ("By", "Gathered at the end of the newest step although their backward was over"),
    "fsdp.unsharded.past_backward.peak": ("By", "Most of that at one time of the newest step: the curve of a leak"),
    "fsdp.allocated.memory.peak": ("By", "Most that the allocator had given out at a unit's boundary, newest timed step"),
    "fsdp.reserved.memory.peak": ("By", "Most that it held from the device there"),
}
COUNTERS: Mapping[str, tuple[str, str]] = {
    "fsdp.gathers": ("{gather}", "All-gathers issued"),
    "fsdp.gathers.unused": ("{gather}", "All-gathers whose result was freed unused"),
    "fsdp.communication.io": ("By", "Bytes received by collectives of FSDP2"),
    "fsdp.communication.exposed": ("s", "Device time for which compute waited for collectives, of steps that were timed"),
    "fsdp.violations": ("{violation}", "Rules broken"),
    "fsdptrace.overhead": (
        "s",
        "CPU time of fsdptrace's own threads, and of its exporter (one per node, the same on all ranks of it)",
    ),
    "fsdptrace.dropped": ("{event}", "Events lost: not in memory, not in the files, or refused by the back end"),
}
HISTOGRAMS: Mapping[str, tuple[str, str, tuple[float, ...]]] = {
    "fsdp.step.duration": ("s", "Time from one step's end to the next", STEP_BOUNDS),
    "fsdp.unshard.host.duration": ("s", "Host time to issue an all-gather, of steps written in full", HOST_BOUNDS),
    "fsdp.allgather.duration": ("s", "Device time of an all-gather, of steps that were timed", HOST_BOUNDS),
    "fsdp.reduction.duration": ("s", "Device time of a reduce-scatter or all-reduce, of steps that were timed", HOST_BOUNDS),
    "fsdp.step.device.duration": ("s", "Device time of a step, of steps that were timed", STEP_BOUNDS),
    "fsdp.recompute.duration": (
        "s",
        "Host time of a checkpointed function's recomputation, of steps written in full",
        HOST_BOUNDS,
    ),
}
"""Names, units and meanings; the field of a metric is its name in OTLP, and in Prometheus what that becomes there."""


def memory_peaks(records: Sequence[int]) -> tuple[int, int]:
    """The most bytes that the allocator had given out, and that it held, at the boundaries of a step's units; 0 unknown."""
    if ev.MEMORY not in records[ev.KIND :: ev.WIDTH]:
        return 0, 0
    rows = [row for row in rows_of(records) if row[0] == ev.MEMORY]
    return max(row[ev.A] for row in rows), max(row[ev.A + 1] for row in rows)


_COLLECTIVES = {ev.UNSHARD: "all_gather", ev.REDUCE_SCATTER: "reduce_scatter", ev.ALL_REDUCE: "all_reduce"}


class ProcessMetrics:
    """The numbers of one process.

    Args:
        process: its files.
        modules: whether module names are attributes of what is measured per unit.
    """

    def __init__(self, process: Follower, modules: bool = False) -> None:
        header = process.header
        self._process = process
        self._modules = modules
        self.attributes: dict[str, Any] = {"dl.rank": header.rank, "fsdptrace.run.id": header.run_id}
        if header.role:
            self.attributes["fsdptrace.role"] = header.role
        self.now = 0  # ns of the process's clock, set before a collection
        self.gauges: dict[str, dict[Key, float]] = {}
        self.counters: dict[str, dict[Key, float]] = {}
        self._count("fsdptrace.dropped", 0, where="recorder")
        self._record: Callable[[str, float, dict[str, Any]], None] = lambda name, value, attributes: None

    def listen(self, record: Callable[[str, float, dict[str, Any]], None]) -> None:
        """``record`` takes what is measured once per event or step."""
        self._record = record

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what :meth:`state` gave.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        for name, rows in state["counters"].items():
            if name in COUNTERS:
                self.counters[name] = {tuple((str(k), v) for k, v in key): float(value) for key, value in rows}
        for name, rows in state["gauges"].items():
            if name in GAUGES:
                self.gauges[name] = {tuple((str(k), v) for k, v in key): float(value) for key, value in rows}

    def state(self) -> dict[str, Any]:
        """Counters and gauges, as plain data."""
        return {
            "counters": {name: [[list(key), value] for key, value in rows.items()] for name, rows in self.counters.items()},
            "gauges": {name: [[list(key), value] for key, value in rows.items()] for name, rows in self.gauges.items()},
        }

    # -- what happens --------------------------------------------------------------------------------------------------
    def step(self, step: FollowedStep) -> None:
        """A step is over, or ended with its process."""
        part, line = step.part, step.part.line
        model = {"fsdp.model": part.map.root} if part.map.model else {}
        if line is not None:
            self._set("fsdp.step", part.step, **model)
            self._set("fsdp.unsharded.memory", line.unsharded_bytes, **model)
            self._set("fsdp.unsharded.memory.peak", line.unsharded_peak, **model)
            self._set("fsdp.unsharded.past_backward", line.past_backward_bytes, **model)
            self._set("fsdp.unsharded.past_backward.peak", line.past_backward_peak, **model)
            if line.duration_ns:
                self._record("fsdp.step.duration", line.duration_ns / 1e9, {**self.attributes, **model})
            for mesh, sums in step.comm.items():
                self._communication(mesh, sums)
        allocated, reserved = memory_peaks(part.records)
        if reserved:
            self._set("fsdp.allocated.memory.peak", allocated)
            self._set("fsdp.reserved.memory.peak", reserved)
        for data in step.violations:
            self._count("fsdp.violations", 1, **{"fsdp.rule": data["rule"], "fsdp.severity": data["severity"]})
        for kind, _seq, t0, t1, group, _p, context, _a, *rest in rows_of(part.records):
            if kind == ev.UNSHARD and not rest[3] % 4:
                about = {"fsdp.pass": ev.PASSES[context % 4]}
                if self._modules:
                    about["fsdp.module.fqn"] = part.map.fqn(group)
                self._record("fsdp.unshard.host.duration", (t1 - t0) / 1e9, {**self.attributes, **about})
            elif kind == ev.RECOMPUTE:
                about = {"fsdp.module.fqn": part.map.fqn(group)} if self._modules else {}
                self._record("fsdp.recompute.duration", (t1 - t0) / 1e9, {**self.attributes, **about})

    def device(self) -> bool:
        """Takes up what the device did, which is known later than its steps; whether there was any."""
        steps = self._process.take_device()
        for step in steps:
            trace = self._process.trace
            names = trace.models.get(step.model) if self._modules else None
            for span in step.spans:
                collective = _COLLECTIVES.get(ev.KIND_NUMBER[span.what])
                if collective is None:
                    continue
                about = {"fsdp.pass": ev.PASSES[span.pass_]} if span.what == "unshard" else {"fsdp.collective": collective}
                if names is not None and span.group >= 0:
                    about["fsdp.module.fqn"] = names.fqn(span.group)
                name = "fsdp.allgather.duration" if span.what == "unshard" else "fsdp.reduction.duration"
                self._record(name, (span.t1 - span.t0) / 1e9, {**self.attributes, **about})
                if span.exposed >= 0:
                    about["fsdp.collective"] = collective
                    about.pop("fsdp.pass", None)
                    self._count("fsdp.communication.exposed", span.exposed / 1e9, **about)
            if step.span_ns is not None:
                model = {"fsdp.model": trace.models[step.model].root} if step.model else {}
                self._record("fsdp.step.device.duration", step.span_ns / 1e9, {**self.attributes, **model})
        return bool(steps)

    def _communication(self, mesh: str, sums: Mapping[str, int]) -> None:
        for pass_ in ("forward", "backward", "recompute", "other"):
            if count := sums.get(f"gathers_{pass_}"):
                self._count("fsdp.gathers", count, **{"fsdp.pass": pass_, "fsdp.mesh": mesh})
        if wasted := sums.get("wasted"):
            self._count("fsdp.gathers.unused", wasted, **{"fsdp.mesh": mesh})
        for collective, name in (("all_gather", "gather"), ("reduce_scatter", "reduce_scatter"), ("all_reduce", "all_reduce")):
            if size := sums.get(f"{name}_wire_bytes"):
                about = {"fsdp.collective": collective, "fsdp.mesh": mesh, "network.io.direction": "receive"}
                self._count("fsdp.communication.io", size, **about)

    def own_cost(self, rejected: int, exporter_seconds: float | None = None) -> None:
        """What fsdptrace itself costs and lost in this process, as known now."""
        process = self._process
        self._set_count("fsdptrace.overhead", process.drain_ns / 1e9, part="drain")
        if exporter_seconds is not None:
            self._set_count("fsdptrace.overhead", exporter_seconds, part="exporter")
        self._set_count("fsdptrace.dropped", process.trace.dropped, where="recorder")
        if process.missed:
            self._set_count("fsdptrace.dropped", process.missed, where="files")
        if rejected:
            self._set_count("fsdptrace.dropped", rejected, where="exporter")

    def _key(self, about: Mapping[str, Any]) -> Key:
        named = {f"fsdptrace.{name}" if name in ("part", "where") else name: value for name, value in about.items()}
        return tuple(sorted(named.items()))

    def _set(self, name: str, value: float, **about: Any) -> None:
        self.gauges.setdefault(name, {})[self._key(about)] = value

    def _count(self, name: str, value: float, **about: Any) -> None:
        rows = self.counters.setdefault(name, {})
        key = self._key(about)
        rows[key] = rows.get(key, 0) + value

    def _set_count(self, name: str, value: float, **about: Any) -> None:
        rows = self.counters.setdefault(name, {})
        key = self._key(about)
        rows[key] = max(rows.get(key, 0), value)

    # -- what is collected ---------------------------------------------------------------------------------------------
    def observe(self, name: str) -> list[Observation]:
        """The values of a gauge or counter."""
        if name == "fsdp.last_event.age":
            age = max(0, self.now - self._process.progress_t) / 1e9
            return [Observation(age, self.attributes)] if self._process.progress_t else []
        rows = self.gauges.get(name) or self.counters.get(name) or {}
        return [Observation(value, {**self.attributes, **dict(key)}) for key, value in rows.items()]


def instrument(meter: Meter, processes: Callable[[], Iterable[ProcessMetrics]]) -> Callable[[str, float, dict[str, Any]], None]:
    """Makes the instruments on ``meter``: what is observed comes from ``processes``, the rest through the function returned."""

    def observer(name: str) -> Callable[[CallbackOptions], list[Observation]]:
        return lambda options: [observation for process in processes() for observation in process.observe(name)]

    for name, (unit, text) in GAUGES.items():
        meter.create_observable_gauge(name, [observer(name)], unit, text)
    for name, (unit, text) in COUNTERS.items():
        meter.create_observable_counter(name, [observer(name)], unit, text)
    histograms = {name: meter.create_histogram(name, unit, text) for name, (unit, text, _) in HISTOGRAMS.items()}

    def record(name: str, value: float, attributes: dict[str, Any]) -> None:
        histograms[name].record(value, attributes)

    return record


def views() -> list[Any]:
    """The buckets of the histograms: a view works with every SDK, the advisory parameter with newer ones only."""
    from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View

    return [
        View(instrument_name=name, aggregation=ExplicitBucketHistogramAggregation(boundaries=bounds))
        for name, (_, _, bounds) in HISTOGRAMS.items()
    ]


def scope() -> tuple[str, str]:
    """Name and version of the meter."""
    return identity.SCOPE, identity.VERSION
