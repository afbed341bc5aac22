"""The back end dies, stops, refuses and comes back; the exporter dies: nothing is lost, and there is one clear line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.made import Made
from support.servers import Receiver, receiver, rotel, until, values


class Growing:
    """A file of a process that lives (this one), a step at a time."""

    def __init__(self, folder: Path, pid: int = 0) -> None:
        now = time.time_ns()
        self.made = Made(0, 1, "run", host=_here(), pid=pid or os.getpid(), clock={"perf_counter_ns": 0, "unix_ns": now})
        self.path = self.made.write(folder)
        self._written = len(self.made.lines)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.made.step()
        self._append()

    def end(self) -> None:
        self.made.end()
        self._append()

    def _append(self) -> None:
        with open(self.path, "a") as stream:
            stream.write("".join(f"{line}\n" for line in self.made.lines[self._written :]))
        self._written = len(self.made.lines)


def _here() -> str:
    from fsdptrace_exporters.worker import here

    return here()


# The exporter as it is, with shorter pauses: between tries, between looks, before it sends and before it ends.
QUICK = """
import sys
from fsdptrace_exporters import __main__, worker
from fsdptrace_exporters.otlp import delivery, logs, metering, traces

delivery.FIRST_PAUSE, delivery.LONGEST_PAUSE = 0.1, 0.4
worker.PAUSE = worker.LOOK = worker.KEEP = 0.05
traces.DELAY = metering.DELAY = 0.1
for sink in (traces.TraceSink, metering.MetricSink, logs.LogSink):
    sink.linger = 0.3
sys.exit(__main__.main())
"""


class Exporting:
    """``python -m fsdptrace_exporters --follow``, and what it says."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.log = folder / "said"
        arguments = [str(folder / "out"), "--follow", "--to", "otlp", "--exit-after", "1"]
        self._command = [sys.executable, "-c", QUICK, *arguments]
        self._environment = {
            **os.environ,
            "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
            "OTEL_METRIC_EXPORT_INTERVAL": "300",
            **environment,
        }
        self.start()

    def start(self) -> None:
        with open(self.log, "ab") as stream:
            self.process = subprocess.Popen(self._command, stdout=stream, stderr=stream, env=self._environment)

    @property
    def said(self) -> list[str]:
        return self.log.read_text().splitlines()

    def says(self, text: str) -> bool:
        return any(text in line for line in self.said)

    def complaints(self) -> list[str]:
        return [line for line in self.said if not line.startswith("note: ")]

    def done(self) -> None:
        assert self.process.wait(60) == 0, self.said


@contextmanager
def exporting(folder: Path, **environment: str) -> Iterator[Exporting]:
    made = Exporting(folder, **environment)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
            made.process.wait()


def arrived(sink: Receiver) -> list[int]:
    """Steps whose units have arrived whole: a root, three gathers of two spans, and the passes of two units."""
    spans = {(span.trace_id, span.span_id): span for _, span in sink.spans()}
    roots = {span.trace_id: values(span.attributes)["fsdp.step"] for span in spans.values() if span.name == "fsdp.units"}
    sizes = {trace: sum(other.trace_id == trace for other in spans.values()) for trace in roots}
    assert set(sizes.values()) <= {13}, sizes
    return sorted(roots.values())


def waits(sink: Receiver, count: int) -> Callable[[], bool]:
    return lambda: arrived(sink) == list(range(count))


def newest(sink: Receiver, name: str) -> dict[str, float]:
    """The newest values of a counter by where."""
    out = {}
    for request in sink.got["metrics"]:
        for metric in request.resource_metrics[0].scope_metrics[0].metrics:
            if metric.name == name:
                out = {values(p.attributes)["fsdptrace.where"]: float(p.as_int or p.as_double) for p in metric.sum.data_points}
    return out


def test_killed_paused_and_restarted(tmp_path: Path) -> None:
    """A real collector over gRPC: killed and started again, then stopped for a while; every step arrives."""
    trace = Growing(tmp_path / "out")
    with receiver() as sink, rotel(tmp_path, sink.url) as (server, grpc, _):
        with exporting(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{grpc}") as exporter:
            trace.steps(1)
            until(waits(sink, 1), "the first step arrives")
            server.kill()
            trace.steps(5)
            until(lambda: exporter.says("does not take traces"), "it complains")
            until(lambda: exporter.says("does not take metrics"), "it complains of metrics too")
            trace.steps(5)
            server.start()
            until(waits(sink, 11), "what waited arrives")
            server.ready(grpc)
            server.pause()
            trace.steps(5)
            time.sleep(1.2)  # longer than a request may take
            server.go_on()
            until(waits(sink, 16), "what waited arrives again")
            trace.steps(1)
            trace.end()
            exporter.done()
        until(waits(sink, 17), "the rest arrives")
    said = exporter.complaints()
    # Once for traces and once for metrics, however often it tried; there are no violations and so no logs.
    assert len([line for line in said if "does not take traces over grpc: " in line]) == 1
    assert len(said) == 2
    assert any(line.startswith(f"note: http://127.0.0.1:{grpc} takes traces again, after ") for line in exporter.said)


def test_refused_for_a_while_and_for_good(tmp_path: Path) -> None:
    """403 is about us: everything waits. 400 is about the batch: tried three times, dropped, and the count is a metric."""
    trace = Growing(tmp_path / "out")
    with receiver() as sink:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": sink.url.replace("//", "//user:geheim@"),
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_HEADERS": "x-token=geheim",
        }  # fmt: skip
        with exporting(tmp_path, **environment) as exporter:
            sink.status = 403
            trace.steps(3)
            until(lambda: exporter.says("does not take traces"), "it complains")
            trace.steps(3)
            sink.status = 200
            until(waits(sink, 6), "what waited arrives")
            sink.status = 400
            trace.steps(1)
            until(lambda: exporter.says("refuses some of the traces (400)"), "it gives up", 90)
            sink.status = 200
            trace.steps(1)
            until(lambda: arrived(sink) == [0, 1, 2, 3, 4, 5, 7], "what came after arrives")
            until(lambda: newest(sink, "fsdptrace.dropped").get("exporter"), "the loss is a metric")
            trace.end()
            exporter.done()
        # The root, the rank, and the thirteen spans of its units.
        assert newest(sink, "fsdptrace.dropped")["exporter"] == 15
    assert "does not take traces over http/protobuf: 403 (see OTEL_EXPORTER_OTLP_HEADERS)" in "".join(exporter.said)
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or b"geheim" not in path.read_bytes()
    assert "geheim" not in "".join(exporter.said)


def test_an_exporter_that_is_killed_goes_on(tmp_path: Path) -> None:
    """SIGKILL between and within deliveries; the next one goes on, and what comes twice has the same ids."""
    trace = Growing(tmp_path / "out")
    with receiver() as sink:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": sink.url, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
        with exporting(tmp_path, **environment) as exporter:
            trace.steps(4)
            until(waits(sink, 4), "steps arrive")
            until(lambda: list((tmp_path / "out").rglob("*traces*.position")), "the position is kept")
            for round_ in range(2):
                exporter.process.kill()
                exporter.process.wait()
                trace.steps(2)
                exporter.start()
                trace.steps(2)
                until(waits(sink, 8 + 4 * round_), "steps arrive")
            trace.end()
            exporter.done()
        spans = [span for _, span in sink.spans()]
    twice = len(spans) - len({(span.trace_id, span.span_id) for span in spans})
    first = {values(span.attributes)["fsdp.step"] for span in spans if span.name == "fsdp.units"}
    assert first == set(range(12))
    assert twice <= 4 * 15  # at most what had been delivered since the position was last written
    for span in spans:
        same = [other for other in spans if (other.trace_id, other.span_id) == (span.trace_id, span.span_id)]
        assert all(other == span for other in same)


def test_told_to_stop_it_stops_in_time(tmp_path: Path) -> None:
    """SIGTERM while nobody listens: it ends within seconds, with what to do, and a later export sends everything."""
    trace = Growing(tmp_path / "out")
    with receiver() as sink:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": sink.url, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
        sink.status = 503
        with exporting(tmp_path, **environment) as exporter:
            trace.steps(3)
            until(lambda: exporter.says("does not take traces"), "it complains")
            exporter.process.send_signal(signal.SIGTERM)
            exporter.process.wait(20)
        assert any("not everything is delivered; the rest goes out with: fsdptrace export" in line for line in exporter.said)
        assert arrived(sink) == []
        sink.status = 200
        trace.end()
        done = subprocess.run(
            [sys.executable, "-m", "fsdptrace_exporters", str(tmp_path / "out"), "--to", "otlp"],
            env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert "3 steps delivered" in done.stderr
        assert arrived(sink) == [0, 1, 2]
        again = subprocess.run(
            [sys.executable, "-m", "fsdptrace_exporters", str(tmp_path / "out"), "--to", "otlp"],
            env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert "0 steps delivered; 1 processes were delivered before" in again.stderr


def test_it_ends_soon_after_its_trainer_whatever_the_back_end_does(tmp_path: Path) -> None:
    """Nothing was delivered and nobody listens: it is gone some seconds after the process, and the files are still there."""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    trace = Growing(tmp_path / "out", child.pid)
    trace.steps(2)
    trace.end()
    with receiver() as sink:
        sink.status = 503
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": sink.url, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
        with exporting(tmp_path, **environment) as exporter:
            exporter.process.wait(60)
        assert exporter.says("not everything is delivered; the rest goes out with: fsdptrace export")
        assert trace.path.exists()


@pytest.mark.parametrize("rotated", [False, True])
def test_removed_once_delivered(tmp_path: Path, rotated: bool) -> None:
    trace = Growing(tmp_path / "out")
    with receiver() as sink:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": sink.url, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
        made = Exporting(tmp_path, **environment)
        made.process.kill()
        made.process.wait()
        made._command.append("--remove")
        trace.steps(2)
        if rotated:
            header, second = trace.made.lines[0], trace.path.with_name(trace.path.name.replace(".jsonl", ".1.jsonl"))
            third = trace.path.with_name(trace.path.name.replace(".jsonl", ".2.jsonl"))
            trace.made.step()
            second.write_text("\n".join([header, *trace.made.lines[-18:]]) + "\n")
            trace.made.step()
            third.write_text("\n".join([header, *trace.made.lines[-18:]]) + "\n")
        made.start()
        try:
            until(waits(sink, 4 if rotated else 2), "steps arrive")
            if rotated:
                until(lambda: not second.exists(), "the delivered part goes")
                assert third.exists()
                trace.path = third
                trace._written = len(trace.made.lines)
            assert (tmp_path / "out" / "run").exists()
            trace.end()
            made.done()
        finally:
            if made.process.poll() is None:
                made.process.kill()
        left = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
        assert left == []


def test_settings_of_a_dead_end_are_hinted_at(tmp_path: Path) -> None:
    """gRPC to a port that speaks HTTP, the most usual slip."""
    from fsdptrace_exporters.otlp.delivery import Delivery, NotDelivered
    from fsdptrace_exporters.sinks import Settings

    said: list[str] = []
    settings = Settings(say=said.append)
    settings.stop.set()

    def fails(batch: Any) -> bool:
        return False

    for where, protocol, hint in (
        ("http://h:4318", "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"),
        ("http://h:4317/v1/traces", "http/protobuf", "OTEL_EXPORTER_OTLP_PROTOCOL=grpc"),
    ):
        with pytest.raises(NotDelivered):
            Delivery("traces", fails, where, protocol, settings).send([1])
        assert hint in said[-1]
