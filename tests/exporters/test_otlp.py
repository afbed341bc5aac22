"""A real run of two ranks, sent through a real collector over gRPC and over HTTP, and compared with its own files."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from gallery.models import checkpointed_layers, data, sgd
from torch.distributed.device_mesh import init_device_mesh

import fsdptrace
from fsdptrace.adapters import legacy
from support.ranks import run_ranks
from support.servers import Receiver, Server, receiver, rotel, until, values, wait_for_exporter

pytestmark = pytest.mark.multiprocess

STEPS = 3


def train(rank: int, out: str, grpc: int, http: int) -> dict[str, str]:
    """Three steps twice, each recording with an exporter of its own; a span of the program's own is active in step 1."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("trainer")
    active = {}
    for name, protocol, port in (("grpc", "grpc", grpc), ("http", "http/protobuf", http)):
        os.environ.update(
            OTEL_EXPORTER_OTLP_PROTOCOL=protocol, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}",
            OTEL_EXPORTER_OTLP_HEADERS="authorization=geheim", OTEL_RESOURCE_ATTRIBUTES="deployment.environment=test",
        )  # fmt: skip
        with legacy.old_bookkeeping():
            model = checkpointed_layers(init_device_mesh("cpu", (2,)), 3, use_reentrant=True)
            optimizer = sgd(model)
            options: dict[str, Any] = {"on_violation": "record", "device_timing": "always"}
            with fsdptrace.record(model, exporters=["otlp"], out=out, run_id=name, **options) as rec:
                for step in range(STEPS):
                    with tracer.start_as_current_span("iteration") if step == 1 else trace.use_span(trace.INVALID_SPAN):
                        if step == 1:
                            active[name] = format(trace.get_current_span().get_span_context().trace_id, "032x")
                        model(data()).sum().backward()
                        optimizer.step()
                        optimizer.zero_grad()
        rec.close()
    return active


class Lines:
    """A rank's file, read with nothing but json."""

    def __init__(self, path: Path) -> None:
        self.all = [json.loads(line) for line in path.read_text().splitlines()]
        self.header = self.all[0]
        (self.model,) = [line for line in self.all if line.get("kind") == "model"][-1:]
        clock = self.header["clock"]
        self.shift = clock["unix_ns"] - clock["perf_counter_ns"]
        self.rank = self.header["rank"]

    def step(self, number: int) -> list[dict[str, Any]]:
        return [line for line in self.all if line.get("step") == number and "seq" in line and line["kind"] != "device_times"]

    def device(self, number: int) -> dict[int, tuple[str, int, int, int]]:
        """What the device did (here the host's clock stands in for it): kind, Unix ns, how long, exposed, by event."""
        (line,) = [line for line in self.all if line.get("kind") == "device_times" and line["step"] == number]
        rows = zip(line["seq"], line["what"], line["t0"], line["ns"], line["exposed"], strict=True)
        return {seq: (what, line["base"] + t0 + self.shift, ns, exposed) for seq, what, t0, ns, exposed in rows}

    def fqn(self, line: dict[str, Any]) -> str:
        return str(self.model["groups"][line["group"]]["fqn"])


Sent = tuple[Receiver, Path, list[dict[str, str]], str]


@contextmanager
def send(folder: Path, relay: Callable[[Path, str], AbstractContextManager[tuple[Server, int, int]]]) -> Iterator[Sent]:
    """A run of two ranks through a real relay, once over gRPC and once over HTTP: what came out of it, and the files."""
    out = folder / "out"
    with receiver() as sink, relay(folder, sink.url) as (_, grpc, http):
        active = run_ranks(train, 2, str(out), grpc, http, timeout=120)
        logs = "".join(wait_for_exporter(out / name) for name in ("grpc", "http"))
        until(lambda: all(len(ends(sink, name)) == 2 for name in ("grpc", "http")), "the last metrics arrive")
        yield sink, out, active, logs


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sent]:
    with send(tmp_path_factory.mktemp("otlp"), rotel) as made:
        yield made


def number(point: Any) -> float:
    """The value of a data point; of a histogram's its sum."""
    return float(getattr(point, point.WhichOneof("value")) if "as_int" in point.DESCRIPTOR.fields_by_name else point.sum)


def ends(sink: Receiver, run: str) -> dict[int, dict[str, list[tuple[dict[str, Any], float]]]]:
    """The newest values of all metrics by rank."""
    out: dict[int, dict[str, list[tuple[dict[str, Any], float]]]] = {}
    for request in sink.got["metrics"]:
        for resource in request.resource_metrics:
            about = values(resource.resource.attributes)
            if about["fsdptrace.run.id"] != run:
                continue
            found = out.setdefault(about["dl.rank"], {})
            for metric in resource.scope_metrics[0].metrics:
                kind = getattr(metric, metric.WhichOneof("data"))
                found[metric.name] = [(values(point.attributes), number(point)) for point in kind.data_points]
    return out


def files(out: Path, run: str) -> list[Lines]:
    found = [Lines(path) for path in sorted((out / run).glob("*.jsonl"))]
    assert [lines.rank for lines in found] == [0, 1]
    return found


def of_run(sink: Receiver, run: str) -> list[tuple[dict[str, Any], Any]]:
    return [(about, span) for about, span in sink.spans() if about["fsdptrace.run.id"] == run]


def expected_units(lines: Lines, number: int) -> Counter[tuple[str, int, int, str]]:
    """``(name, start, end, module)`` of every span in the trace of the units, straight from the lines of the step."""
    events = lines.step(number)
    kinds = ("forward", "backward", "region", "recompute", "reduce_scatter", "all_reduce", "optimizer_step")
    plain = {kind: f"fsdp.{kind}" for kind in kinds}
    (end,) = [line["t1"] for line in events if line["kind"] == "step"]
    out: Counter[tuple[str, int, int, str]] = Counter()

    def add(name: str, t0: int, t1: int, fqn: str) -> None:
        out[name, t0 + lines.shift, t1 + lines.shift, fqn] += 1

    for i, line in enumerate(events):
        kind = line["kind"]
        after = [other for other in events[i + 1 :] if other.get("group") == line.get("group")]
        if kind in plain:
            fqn = lines.fqn(line) if "group" in line else ""
            if kind == "forward":
                fqn = lines.model["units"][line["root"]]["fqn"]
            add(plain[kind], line["t0"], line["t1"], fqn)
        elif kind == "unshard" and "noop" not in line:
            freed = next((other for other in after if other["kind"] in ("reshard", "discard")), None)
            wait = next((other for other in after if other["kind"] == "wait"), None)
            if wait is not None and freed is not None and wait["t0"] > freed["t0"]:
                wait = None
            add("fsdp.unsharded", line["t0"], freed["t1"] if freed else end, lines.fqn(line))
            add("fsdp.unshard", line["t0"], wait["t1"] if wait else line["t1"], lines.fqn(line))
        elif kind == "pre_forward":
            done = next(other for other in after if other["kind"] == "post_forward")
            add("fsdp.unit.forward", line["t0"], done["t1"], lines.fqn(line))
        elif kind == "post_backward":
            before = [other for other in events[:i] if other.get("group") == line["group"]]
            begun = next((o for o in reversed(before) if o["kind"] in ("pre_backward", "post_backward")), line)
            begun = line if begun["kind"] == "post_backward" else begun
            add("fsdp.unit.backward", begun["t0"], line["t1"], lines.fqn(line))
    return out


@pytest.mark.parametrize("run", ["grpc", "http"])
def test_every_unit_span_is_in_the_file_to_the_nanosecond(sent: Any, run: str) -> None:
    sink, out, _, _ = sent
    spans = of_run(sink, run)
    for lines in files(out, run):
        for number in range(STEPS):
            (root,) = [s for about, s in spans if s.name == "fsdp.units" and about["dl.rank"] == lines.rank
                       and values(s.attributes)["fsdp.step"] == number]  # fmt: skip
            mine = [s for _, s in spans if s.trace_id == root.trace_id]
            got = Counter((s.name, *times(s), values(s.attributes).get("fsdp.module.fqn", "")) for s in mine if s is not root)
            assert got == expected_units(lines, number)
            tree(mine, root)
            regions = {s.span_id: values(s.attributes)["fsdp.region"] for s in mine if s.name == "fsdp.region"}
            recomputed = [s for s in mine if s.name == "fsdp.recompute"]
            assert len(recomputed) == len(regions) == 3  # three checkpointed layers
            for span in recomputed:
                assert regions[span.links[0].span_id] == values(span.attributes)["fsdp.region"]


def times(span: Any) -> tuple[int, int]:
    return span.start_time_unix_nano, span.end_time_unix_nano


def tree(spans: list[Any], root: Any) -> None:
    """Every span but the root lies within its parent, and no id is there twice."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    for span in spans:
        if span is root:
            assert span.parent_span_id == b""
            continue
        parent = by_id[span.parent_span_id]
        assert parent.start_time_unix_nano <= span.start_time_unix_nano, (span.name, parent.name)
        assert span.end_time_unix_nano <= parent.end_time_unix_nano, (span.name, parent.name)


@pytest.mark.parametrize("run", ["grpc", "http"])
def test_attributes_and_links_of_gathers(sent: Any, run: str) -> None:
    sink, out, _, _ = sent
    spans = of_run(sink, run)
    for lines in files(out, run):
        for number in range(STEPS):
            gathers = [line for line in lines.step(number) if line["kind"] == "unshard" and "noop" not in line]
            names = {line["t0"] + lines.shift: line for line in gathers}
            shown = {times(s)[0]: (s, values(s.attributes)) for about, s in spans
                     if s.name == "fsdp.unshard" and about["dl.rank"] == lines.rank and times(s)[0] in names}  # fmt: skip
            assert set(shown) == set(names)
            prefetched = {}
            for start, line in names.items():
                span, about = shown[start]
                group = lines.model["groups"][line["group"]]
                assert about["fsdp.bytes"] == line["bytes"]
                assert about["fsdp.wire.bytes"] == line["bytes"] // 2  # two ranks: the other one's half
                assert about["fsdp.dtype"] == group["dtype"] == "float32"
                assert about["fsdp.mesh"] == "0=2"
                assert about["fsdp.pass"] == line["pass"]
                assert about["fsdp.host.duration"] == (line["t1"] - line["t0"]) / 1e9
                assert about.get("fsdp.prefetch.direction") == line.get("direction")
                assert about.get("fsdp.prefetch.mode") == line.get("mode")
                if "issuer" in line:
                    assert about["fsdp.issuer.fqn"] == lines.model["groups"][line["issuer"]]["fqn"]
                if line.get("direction"):
                    prefetched[span.span_id] = line
            used = [link.span_id for _, s in spans if s.name.startswith("fsdp.unit.") for link in s.links]
            # Of these prefetches, each that was used has one link; the leaked ones are never used.
            wasted = {line["seq"] for line in prefetched.values() if not _used(lines, number, line)}
            assert sorted(span for span, line in prefetched.items() if line["seq"] not in wasted) == sorted(
                span for span in used if span in prefetched
            )
            if number == 0:
                assert wasted, "the leak gathers what nobody uses"


@pytest.mark.parametrize("run", ["grpc", "http"])
def test_what_the_device_did_is_on_the_spans(sent: Any, run: str) -> None:
    sink, out, _, _ = sent
    spans = of_run(sink, run)
    names = {"fsdp.unshard": "unshard", "fsdp.reduce_scatter": "reduce_scatter", "fsdp.forward": "forward",
             "fsdp.backward": "backward"}  # fmt: skip
    for lines in files(out, run):
        for number in range(STEPS):
            device = lines.device(number)
            (root,) = [s for about, s in spans if s.name == "fsdp.units" and about["dl.rank"] == lines.rank
                       and values(s.attributes)["fsdp.step"] == number]  # fmt: skip
            got = Counter(
                (names[s.name], about["fsdp.device.start"], about["fsdp.device.duration"], about.get("fsdp.exposed", -1e-9))
                for _, s in spans if s.trace_id == root.trace_id and s.name in names
                and "fsdp.device.start" in (about := values(s.attributes))
            )  # fmt: skip
            known = [row for row in device.values() if row[0] != "wait"]
            assert got == Counter((what, start, ns / 1e9, exposed / 1e9) for what, start, ns, exposed in known)
            assert sum(what == "unshard" for what, *_ in known) >= 6  # three units, forward and backward
            (rank,) = [s for about, s in spans if s.name == "fsdp.rank" and about["dl.rank"] == lines.rank
                       and values(s.attributes)["fsdp.step"] == number]  # fmt: skip
            exposed = sum(exposed for *_, exposed in device.values() if exposed > 0)
            assert values(rank.attributes)["fsdp.exposed"] == exposed / 1e9


def _used(lines: Lines, number: int, gather: dict[str, Any]) -> bool:
    events = lines.step(number)
    for line in events[events.index(gather) + 1 :]:
        if line.get("group") == gather["group"]:
            if line["kind"] in ("pre_forward", "pre_backward"):
                return True
            if line["kind"] in ("reshard", "discard"):
                return False
    return False


@pytest.mark.parametrize("run", ["grpc", "http"])
def test_one_trace_per_step_with_all_ranks(sent: Any, run: str) -> None:
    sink, out, active, _ = sent
    spans = of_run(sink, run)
    both = files(out, run)
    roots = sorted((s for _, s in spans if s.name == "fsdp.step"), key=lambda s: s.start_time_unix_nano)
    assert [values(s.attributes)["fsdp.step"] for s in roots] == list(range(STEPS))
    assert len({s.trace_id for s in roots}) == STEPS
    units = {s.trace_id: s for _, s in spans if s.name == "fsdp.units"}
    for number, root in enumerate(roots):
        ranks = {values(s.attributes)["dl.rank"]: s for _, s in spans if s.trace_id == root.trace_id and s.name == "fsdp.rank"}
        assert sorted(ranks) == [0, 1]
        for lines in both:
            span = ranks[lines.rank]
            assert span.parent_span_id == root.span_id
            events = lines.step(number)
            (end,) = [line for line in events if line["kind"] == "step"]
            assert span.end_time_unix_nano == end["t1"] + lines.shift
            found = [line for line in events if line["kind"] == "violation"]
            shown = [(values(e.attributes)["fsdp.rule"], values(e.attributes)["fsdp.module.fqn"], e.time_unix_nano)
                     for e in span.events]  # fmt: skip
            assert Counter(shown) == Counter((v["rule"], v["fqn"], v["t1"] + lines.shift) for v in found)
            assert (span.status.code == 2) == any(v["severity"] == "error" for v in found)
            kinds = defaultdict(list)
            for line in events:
                kinds[line["kind"]].append(line)
            below = {s.name: s for about, s in spans if s.trace_id == root.trace_id and about["dl.rank"] == lines.rank
                     and s.name not in ("fsdp.step", "fsdp.rank")}  # fmt: skip
            for kind in ("forward", "backward", "recompute", "optimizer_step"):
                if kinds[kind]:
                    got = below.pop(f"fsdp.{kind}")
                    assert got.start_time_unix_nano == min(line["t0"] for line in kinds[kind]) + lines.shift
                    assert got.end_time_unix_nano == max(line["t1"] for line in kinds[kind]) + lines.shift
            assert not below
            links = {values(link.attributes)["fsdp.link"]: link for link in span.links}
            assert units[links["units"].trace_id].span_id == links["units"].span_id
            if number == 1:
                assert links["active_span"].trace_id.hex() == active[lines.rank][run]
            else:
                assert "active_span" not in links


@pytest.mark.parametrize("run", ["grpc", "http"])
def test_resource_metrics_and_logs(sent: Any, run: str) -> None:
    sink, out, _, _ = sent
    for lines in files(out, run):
        abouts = [about for about, _ in of_run(sink, run) if about["dl.rank"] == lines.rank]
        assert all(about == abouts[0] for about in abouts)
        assert abouts[0]["service.name"] == "fsdptrace"
        assert abouts[0]["service.instance.id"] == f"{run}-rank{lines.rank}"
        assert abouts[0]["deployment.environment"] == "test"
        assert (abouts[0]["process.pid"], abouts[0]["dl.world_size"]) == (lines.header["pid"], 2)
        metrics = ends(sink, run)[lines.rank]

        def total(name: str, metrics: Any = metrics, **about: Any) -> float:
            return sum(v for key, v in metrics[name] if all(key.get(k.replace("__", ".")) == w for k, w in about.items()))

        events = [line for number in range(STEPS) for line in lines.step(number)]
        gathers = [line for line in events if line["kind"] == "unshard" and "noop" not in line]
        assert total("fsdp.step") == STEPS - 1
        assert total("fsdp.gathers") == len(gathers)
        for pass_ in ("forward", "backward"):
            assert total("fsdp.gathers", fsdp__pass=pass_) == sum(line["pass"] == pass_ for line in gathers)
        assert total("fsdp.communication.io", fsdp__collective="all_gather") == sum(line["bytes"] // 2 for line in gathers)
        scattered = sum(line["bytes"] // 2 for line in events if line["kind"] == "reduce_scatter")
        assert total("fsdp.communication.io", fsdp__collective="reduce_scatter") == scattered
        found = Counter(line["rule"] for line in events if line["kind"] == "violation")
        assert found
        for rule, times in found.items():
            assert total("fsdp.violations", fsdp__rule=rule) == times
        wasted = sum(not _used(lines, line["step"], line) for line in gathers)
        assert total("fsdp.gathers.unused") == wasted > 0
        durations = sum(line["t1"] - line["t0"] for line in gathers) / 1e9
        assert total("fsdp.unshard.host.duration") == pytest.approx(durations)
        records = [record for request in sink.got["logs"] for resource in request.resource_logs
                   if values(resource.resource.attributes)["service.instance.id"] == f"{run}-rank{lines.rank}"
                   for scope in resource.scope_logs for record in scope.log_records]  # fmt: skip
        assert Counter(values(record.attributes)["fsdp.rule"] for record in records) == found
        ranks = {s.span_id for _, s in of_run(sink, run) if s.name == "fsdp.rank"}
        assert all(record.span_id in ranks for record in records)


def test_nothing_secret_and_no_complaint(sent: Any) -> None:
    _, out, _, logs = sent
    assert [line for line in logs.splitlines() if not line.startswith("note: ")] == []
    for path in out.rglob("*"):
        if path.is_file():
            assert b"geheim" not in path.read_bytes(), path
            assert path.stat().st_mode & 0o077 == 0, path
