"""What the device did, on spans and in metrics: known later than its step, and waited for, but not for ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from exporters.test_following import export, follow, needs_encoder, spans

from fsdptrace.analysis.follow import Follower
from fsdptrace_exporters.otlp import holding
from fsdptrace_exporters.otlp.delivery import Delivery
from fsdptrace_exporters.otlp.exporter import make_sink
from fsdptrace_exporters.sinks import Settings
from support.made import Made


def timed_step(made: Made, allocated: int = 5000) -> int:
    """Twelve events of one unit, the allocator read after its wait and its post-backward; the number of the first."""
    first = made.seq + 1
    forward, backward = {"pass": "forward"}, {"pass": "backward"}
    made.event("forward", root=0, grad=True, t1=10 * first + 55)
    made.unshard(1, 3000, "forward")
    wait = made.event("wait", 1, bytes=3000, **forward)
    made.event("memory", parent=wait, allocated=allocated, reserved=8000)
    made.event("pre_forward", 1, **forward)
    made.event("post_forward", 1, **forward)
    made.event("pre_backward", 1, **backward)
    made.event("reduce_scatter", 1, bytes=3000, world=2, dtype="float32", tensors=1, **backward)
    made.event("reshard", 1, bytes=3000, **backward)
    done = made.event("post_backward", 1, **backward)
    made.event("memory", parent=done, allocated=4000, reserved=9000)
    made.end_step()
    return first


def device_times(made: Made, step: int, first: int) -> None:
    """The line of a step: a forward of 60 ns, a gather of 45 of which compute waits 20, a reduce-scatter of 40, 15 waited."""
    made.line({
        "kind": "device_times", "model": 0, "step": step, "base": 10 * first + 10, "span": 500, "missing": 1,
        "seq": [first, first + 1, first + 2, first + 7], "what": ["forward", "unshard", "wait", "reduce_scatter"],
        "pass": [1, 1, 1, 2], "group": [-1, 1, 1, 1], "t0": [10, 5, 30, 100], "ns": [60, 45, 20, 40],
        "exposed": [-1, 20, -1, 15],
    })  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 0 is timed, and its times come after step 1, which is not; of step 2 they never come. The folder of the files."""
    folder = tmp_path_factory.mktemp("device")
    made = Made(0, 2)
    first = timed_step(made)
    made.step()
    device_times(made, 0, first)
    timed_step(made, allocated=7000)
    made.end()
    made.write(folder / "out")
    export(folder / "out", "--to", f"otlp-json:{folder / 'x'}", FSDPTRACE_METRIC_MODULES="1")
    return folder


def on_device(attributes: dict[str, Any]) -> dict[str, Any]:
    names = ("fsdp.device", "fsdp.exposed", "fsdp.allocated", "fsdp.reserved")
    return {key: next(iter(value.values())) if isinstance(value, dict) else value
            for key, value in attributes.items() if key.startswith(names)}  # fmt: skip


@needs_encoder
def test_spans_say_what_the_device_did(exported: Path) -> None:
    """Event n lasts from 10 n to 10 n + 5 ns, and the zero is 1,000 ns Unix time: the device's base, 20, is 1,020."""
    found = [span for _, span in spans(exported / "x.traces.jsonl")]
    assert [s["attributes"]["fsdp.step"] for s in found if s["name"] == "fsdp.rank"] == [0, 1, 2]
    unit_traces = [s["traceId"] for s in found if s["name"] == "fsdp.units"]
    step_traces = [s["traceId"] for s in found if s["name"] == "fsdp.rank"]

    def said(trace: str) -> dict[str, dict[str, Any]]:
        about = {s["name"]: on_device(s["attributes"]) for s in found if s["traceId"] == trace}
        return {name: words for name, words in about.items() if words}

    assert said(unit_traces[0]) == {
        "fsdp.forward": {"fsdp.device.start": 1030, "fsdp.device.duration": 60e-9},
        "fsdp.unshard": {
            "fsdp.device.start": 1025, "fsdp.device.duration": 45e-9, "fsdp.exposed": 20e-9, "fsdp.allocated.memory": 5000,
            "fsdp.reserved.memory": 8000,
        },
        "fsdp.reduce_scatter": {"fsdp.device.start": 1120, "fsdp.device.duration": 40e-9, "fsdp.exposed": 15e-9},
        "fsdp.unit.backward": {"fsdp.allocated.memory": 4000, "fsdp.reserved.memory": 9000},
    }  # fmt: skip
    (gather,) = [s for s in found if s["traceId"] == unit_traces[0] and s["name"] == "fsdp.unshard"]
    (wait,) = gather["events"]
    assert {item["key"]: next(iter(item["value"].values())) for item in wait["attributes"]} == {
        "fsdp.device.start": "1050", "fsdp.device.duration": 20e-9,
    }  # fmt: skip
    assert said(step_traces[0]) == {
        "fsdp.rank": {
            "fsdp.device.duration": 500e-9, "fsdp.exposed": 35e-9, "fsdp.device.missing": 1, "fsdp.allocated.memory.peak": 5000,
            "fsdp.reserved.memory.peak": 9000,
        },
        "fsdp.forward": {"fsdp.device.duration": 60e-9},
    }  # fmt: skip
    assert said(step_traces[1]) == said(unit_traces[1]) == {}
    # What is not known is not said.
    assert said(step_traces[2]) == {"fsdp.rank": {"fsdp.allocated.memory.peak": 7000, "fsdp.reserved.memory.peak": 9000}}
    assert set(said(unit_traces[2])) == {"fsdp.unshard", "fsdp.unit.backward"}


@needs_encoder
def test_metrics_of_the_device(exported: Path) -> None:
    metrics: dict[str, list[tuple[dict[str, Any], Any]]] = {}
    for line in (exported / "x.metrics.jsonl").read_text().splitlines():
        for metric in json.loads(line)["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]:
            (data,) = [value for key, value in metric.items() if key in ("gauge", "sum", "histogram")]
            metrics[metric["name"]] = [
                ({item["key"]: item["value"].get("stringValue") for item in point["attributes"]}, point)
                for point in data["dataPoints"]
            ]

    def histogram(name: str) -> list[tuple[int, float]]:
        return [(int(point["count"]), point["sum"]) for _, point in metrics[name]]

    assert histogram("fsdp.allgather.duration") == [(1, 45e-9)]
    assert metrics["fsdp.allgather.duration"][0][0]["fsdp.pass"] == "forward"
    assert metrics["fsdp.allgather.duration"][0][0]["fsdp.module.fqn"] == "layers.1"
    assert histogram("fsdp.reduction.duration") == [(1, 40e-9)]
    assert metrics["fsdp.reduction.duration"][0][0]["fsdp.collective"] == "reduce_scatter"
    assert histogram("fsdp.step.device.duration") == [(1, 500e-9)]
    exposed = {about["fsdp.collective"]: point["asDouble"] for about, point in metrics["fsdp.communication.exposed"]}
    assert exposed == {"all_gather": 20e-9, "reduce_scatter": 15e-9}
    assert [point["asInt"] for _, point in metrics["fsdp.allocated.memory.peak"]] == ["7000"]  # the newest step
    assert [point["asInt"] for _, point in metrics["fsdp.reserved.memory.peak"]] == ["9000"]


class Live:
    """A trace sink that follows a growing file, by hand."""

    def __init__(self, made: Made, folder: Path) -> None:
        self.sent: list[Any] = []
        self._made = made
        self._path = made.write(folder)
        self._written = len(made.lines)
        settings = Settings(frozenset({0}), live=True)

        def take(batch: Any) -> bool:
            self.sent += batch
            return True

        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        delivery = Delivery("traces", take, "here", "file", settings)
        self.sink: Any = make_sink("traces", "t", delivery, None, settings)
        self.sink._sampler = ALWAYS_ON
        self.follower, _ = follow(self._path)
        self.follower = Follower(self.follower.trace.source, lambda step: self.sink.step(self.follower, step))
        self.sink.begin(self.follower, {})

    def goes_on(self) -> list[int]:
        """Takes what was written since; the steps that have been delivered."""
        with open(self._path, "a") as stream:
            stream.write("".join(f"{line}\n" for line in self._made.lines[self._written :]))
        self._written = len(self._made.lines)
        while self.follower.read():
            pass
        self.sink.round(self.follower, True)
        assert self.sink.flush(True)
        return [span.attributes["fsdp.step"] for span in self.sent if span.name == "fsdp.rank"]


def test_live_a_step_waits_for_its_times_and_so_does_the_position(tmp_path: Path) -> None:
    made = Made(0, 2)
    live = Live(made, tmp_path)
    first = timed_step(made)
    assert live.goes_on() == []
    assert live.sink.reached(live.follower) is None
    made.step()
    assert live.goes_on() == []
    device_times(made, 0, first)
    assert live.goes_on() == [0, 1]
    (rank, _) = [span for span in live.sent if span.name == "fsdp.rank"]
    assert rank.attributes["fsdp.exposed"] == 35e-9
    position = live.sink.reached(live.follower)
    assert position.taken == {0: (1, 305)}
    # The next step waits, and one who goes on from where things stand gets it again, with its times.
    second = timed_step(made)
    assert live.goes_on() == [0, 1]
    assert live.sink.reached(live.follower).taken == {0: (1, 305)}
    device_times(made, 2, second)
    made.write(tmp_path)
    again, steps = follow(live._path, live.sink.reached(live.follower))
    assert [step.part.step for step in steps] == [2]
    # Those of step 0 stood after what the position of step 1 says, and are read again for nothing.
    assert [times.step for times in again.take_device()] == [0, 2]


def test_live_a_step_whose_times_do_not_come_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When those of a later step are there; when too many wait; after a while; when the process ends."""
    made = Made(0, 2)
    live = Live(made, tmp_path)
    timed_step(made)
    first = timed_step(made)
    device_times(made, 1, first)
    assert live.goes_on() == [0, 1]
    for _ in range(holding.MOST + 2):
        timed_step(made)
    assert live.goes_on() == [0, 1, 2, 3]
    monkeypatch.setattr(holding, "PATIENCE", 0.0)
    assert live.goes_on() == list(range(holding.MOST + 4))
    monkeypatch.setattr(holding, "PATIENCE", 1e9)
    timed_step(made)
    made.end()
    assert live.goes_on() == list(range(holding.MOST + 5))


def test_times_are_counted_once_whoever_goes_on(tmp_path: Path) -> None:
    """The line stands within the next step, and a reader goes on from that step's begin."""
    made = Made(0, 2)
    first = timed_step(made)
    made.unshard(1, 3000, "forward")
    device_times(made, 0, first)
    path = made.write(tmp_path)
    follower, _ = follow(path)
    assert [times.step for times in follower.take_device()] == [0]
    position = follower.position
    again, _ = follow(path, position)
    assert again.take_device() == []
    assert json.loads(json.dumps(position.to_json()))["timed"] == {"0": 0}


def test_what_is_known_after_the_last_step_makes_no_step(tmp_path: Path) -> None:
    made = Made(0, 2)
    first = timed_step(made)
    made.event("device", of_step=0, gather_ns=45, reduce_ns=40, exposed_ns=35, span_ns=500)
    device_times(made, 0, first)
    made.end()
    follower, steps = follow(made.write(tmp_path))
    assert [step.part.step for step in steps] == [0]
    assert follower.ended == "end"


def test_times_may_be_written_before_the_step(tmp_path: Path) -> None:
    """The step ended while its thread wrote: its events had completed by then."""
    made = Made(0, 2)
    live = Live(made, tmp_path)
    timed_step(made)
    step_line = made.lines.pop()
    device_times(made, 0, 1)
    made.lines.append(step_line)
    assert live.goes_on() == [0]
    (rank,) = [span for span in live.sent if span.name == "fsdp.rank"]
    assert rank.attributes["fsdp.device.duration"] == 500e-9
