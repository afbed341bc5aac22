"""OTLP-JSON files read by others than who wrote them: the official protobuf classes, strictly, and a collector in Rust."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from exporters.test_following import export, needs_encoder
from google.protobuf import json_format
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from support.made import Made
from support.servers import receiver, rotel, until, values

pytestmark = needs_encoder

CLASSES: dict[str, Any] = {"traces": TracesData, "metrics": MetricsData, "logs": LogsData}
IDS = ("traceId", "spanId", "parentSpanId")

# The units of rank 0 in step 0, worked out from the events of `Made.step`: event n lasts from 10 n to 10 n + 5 ns, and the
# clock's zero is 1,000 ns Unix time. The backwards have no end, and so last as long as the step.
UNITS = {
    ("fsdp.units", "", 1010, 1185, ""),
    ("fsdp.unsharded", "layers.0", 1010, 1045, "fsdp.units"),
    ("fsdp.unshard", "layers.0", 1010, 1025, "fsdp.unsharded 1010"),
    ("fsdp.unit.forward", "layers.0", 1030, 1055, "fsdp.units"),
    ("fsdp.unsharded", "layers.1", 1060, 1135, "fsdp.units"),
    ("fsdp.unshard", "layers.1", 1060, 1075, "fsdp.unsharded 1060"),
    ("fsdp.unit.forward", "layers.1", 1080, 1095, "fsdp.units"),
    ("fsdp.unit.backward", "layers.1", 1100, 1185, "fsdp.units"),
    ("fsdp.unsharded", "layers.0", 1110, 1175, "fsdp.units"),
    ("fsdp.unshard", "layers.0", 1110, 1145, "fsdp.unsharded 1110"),
    ("fsdp.reduce_scatter", "layers.1", 1120, 1125, "fsdp.unit.backward 1100"),
    ("fsdp.unit.backward", "layers.0", 1150, 1185, "fsdp.units"),
    ("fsdp.reduce_scatter", "layers.0", 1160, 1165, "fsdp.unit.backward 1150"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of two ranks and two steps; rank 1 breaks a rule in step 1. Its folder."""
    folder = tmp_path_factory.mktemp("json")
    for rank in (0, 1):
        made = Made(rank, 2)
        made.step()
        if rank:
            made.violation("unpaired-unshard", "layers.1", group=1)
        made.step()
        made.end()
        made.write(folder / "out")
    export(folder / "out", "--to", f"otlp-json:{folder / 'x.json'}")
    return folder


def lines(folder: Path, signal: str) -> list[str]:
    found = (folder / f"x.{signal}.json").read_text().splitlines()
    assert found
    return found


def by_protobuf(folder: Path, signal: str) -> Iterator[Any]:
    """Every line by the official classes; a field that these do not have is an error. OTLP has ids in hex where plain
    protobuf JSON has base64, and that is the one thing that is changed here."""

    def plain(data: Any) -> Any:
        if isinstance(data, list):
            return [plain(item) for item in data]
        if not isinstance(data, dict):
            return data
        return {
            key: base64.b64encode(bytes.fromhex(value)).decode() if key in IDS else plain(value) for key, value in data.items()
        }

    for line in lines(folder, signal):
        yield json_format.ParseDict(plain(json.loads(line)), CLASSES[signal]())


def by_rotel(folder: Path, signal: str) -> list[Any]:
    return posted(folder, signal, rotel)


def posted(folder: Path, signal: str, relay: Callable[[Path, str], Any]) -> list[Any]:
    """Every line posted to a real collector as it is, and what that sends on, as protobuf."""
    with receiver() as sink, relay(folder, sink.url) as (_, _grpc, http):
        for line in lines(folder, signal):
            request = urllib.request.Request(
                f"http://127.0.0.1:{http}/v1/{signal}", line.encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=20) as answer:
                assert answer.status == 200
        count = {"traces": 16 * 2 + 13, "metrics": 2, "logs": 1}[signal]
        until(lambda: sum(_size(data, signal) for data in sink.got[signal]) >= count, "everything is sent on")
        return list(sink.got[signal])


def _size(data: Any, signal: str) -> int:
    if signal == "metrics":
        return len(data.resource_metrics)
    if signal == "logs":
        return sum(len(scope.log_records) for resource in data.resource_logs for scope in resource.scope_logs)
    return sum(len(scope.spans) for resource in data.resource_spans for scope in resource.scope_spans)


READERS = pytest.mark.parametrize("read", [by_protobuf, by_rotel], ids=["protobuf", "rotel"])
Read = Callable[[Path, str], Any]


@READERS
def test_spans(files: Path, read: Read) -> None:
    found = [
        (values(resource.resource.attributes), span)
        for data in read(files, "traces") for resource in data.resource_spans
        for scope in resource.scope_spans for span in scope.spans
    ]  # fmt: skip
    # A step: its root, two ranks, thirteen spans of rank 0's units; and of rank 1, which broke a rule, those of step 1.
    assert len(found) == 2 * (1 + 2 + 13) + 13
    assert {(about["dl.rank"], about["dl.world_size"], about["service.name"]) for about, _ in found} == {
        (0, 2, "fsdptrace"), (1, 2, "fsdptrace"),
    }  # fmt: skip
    ids = {(span.trace_id, span.span_id) for _, span in found}
    assert len(ids) == len(found)
    assert {(len(trace), len(span)) for trace, span in ids} == {(16, 8)}
    by_id = {span.span_id: span for _, span in found}

    def parent(span: Any) -> str:
        above = by_id.get(span.parent_span_id)
        if above is None:
            return ""
        assert above.trace_id == span.trace_id
        return above.name if above.name == "fsdp.units" else f"{above.name} {above.start_time_unix_nano}"

    (root,) = [s for _, s in found if s.name == "fsdp.units" and s.start_time_unix_nano == 1010]
    units = [span for _, span in found if span.trace_id == root.trace_id]
    assert len(units) == 13
    assert {
        (s.name, values(s.attributes).get("fsdp.module.fqn", ""), s.start_time_unix_nano, s.end_time_unix_nano, parent(s))
        for s in units
    } == UNITS
    (prefetched,) = [s for s in units if s.name == "fsdp.unshard" and s.start_time_unix_nano == 1110]
    about = values(prefetched.attributes)
    assert (about["fsdp.bytes"], about["fsdp.wire.bytes"], about["fsdp.host.duration"]) == (1000, 500, 5e-9)
    assert (about["fsdp.issuer.fqn"], about["fsdp.prefetch.direction"]) == ("layers.1", "backward")
    assert [(event.name, event.time_unix_nano) for event in prefetched.events] == [("fsdp.wait", 1140)]
    (used,) = [s for s in units if s.links and s is not root]
    assert (used.name, used.start_time_unix_nano) == ("fsdp.unit.backward", 1150)
    assert [(link.trace_id, link.span_id) for link in used.links] == [(prefetched.trace_id, prefetched.span_id)]
    wrong = [(about["dl.rank"], s.status.message, [values(e.attributes)["fsdp.rule"] for e in s.events])
             for about, s in found if s.name == "fsdp.rank" and s.status.code == 2]  # fmt: skip
    assert wrong == [(1, "unpaired-unshard at layers.1", ["unpaired-unshard"])]


@pytest.mark.parametrize("read", [by_protobuf])
def test_metrics(files: Path, read: Read) -> None:
    """By protobuf alone: rotel 0.0.1a15 takes no values of metrics as JSON (nor does it say so)."""
    found = {
        (values(resource.resource.attributes)["dl.rank"], metric.name): metric
        for data in read(files, "metrics") for resource in data.resource_metrics
        for scope in resource.scope_metrics for metric in scope.metrics
    }  # fmt: skip
    for rank, end in ((0, 365), (1, 375)):  # a violation is one event more
        (step,) = found[rank, "fsdp.step"].gauge.data_points
        assert (step.as_int, step.time_unix_nano, values(step.attributes)) == (
            1, 1000 + end, {"dl.rank": rank, "fsdptrace.run.id": "run"},
        )  # fmt: skip
        (peak,) = found[rank, "fsdp.unsharded.memory.peak"].gauge.data_points
        assert peak.as_int == 4000
        (held,) = found[rank, "fsdp.step.duration"].histogram.data_points
        # The first step from its first event's begin, the second from there: 175 ns and 180 (190 with the violation).
        assert (held.count, held.sum) == (2, pytest.approx((end - 10) / 1e9))
    (broken,) = found[1, "fsdp.violations"].sum.data_points
    assert (broken.as_int or broken.as_double, values(broken.attributes)["fsdp.rule"]) == (1, "unpaired-unshard")
    assert found[1, "fsdp.violations"].sum.is_monotonic
    assert (0, "fsdp.violations") not in found


@READERS
def test_logs(files: Path, read: Read) -> None:
    ((about, record),) = [
        (values(resource.resource.attributes), record)
        for data in read(files, "logs") for resource in data.resource_logs
        for scope in resource.scope_logs for record in scope.log_records
    ]  # fmt: skip
    assert about["dl.rank"] == 1
    # The violation is the nineteenth event of rank 1.
    assert (record.time_unix_nano, record.severity_text) == (1195, "ERROR")
    assert record.body.string_value == "unpaired-unshard: unpaired-unshard at layers.1 change it"
    assert (len(record.trace_id), len(record.span_id)) == (16, 8)
