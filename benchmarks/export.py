"""What exporting to OpenTelemetry costs, and what an outage does: ``python benchmarks/export.py [outages|scale]``.

``outages``: two gloo ranks train, every step in full detail for both, through a real collector (rotel) that is killed, started
again, paused, and refuses; beside the same training without an exporter. ``scale``: 1,000 groups, 100 steps, one file.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the servers and made traces that tests use
SECONDS = 24.0


def train(rank: int, folder: str, exporter: str, seconds: float) -> None:
    """One rank: trains for some time and leaves its step times."""
    import torch
    import torch.distributed as dist
    import torch.nn as nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import fsdptrace

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(24)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(64, 64)
    times: list[tuple[float, float]] = []
    options: dict[str, Any] = {"exporters": [exporter], "detail_ranks": "all"} if exporter else {}
    with fsdptrace.record(model, out=f"{folder}/out", run_id="run", detail="full", **options) as rec:
        end = time.monotonic() + seconds
        while True:
            begun, cpu = time.perf_counter(), time.process_time()
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append((time.perf_counter() - begun, time.process_time() - cpu))
            go_on = torch.tensor(float(time.monotonic() < end))
            dist.all_reduce(go_on, dist.ReduceOp.MIN)
            if not go_on:
                break
            time.sleep(0.15)
    rec.close()
    Path(folder, f"times{rank}").write_text(json.dumps(times))
    dist.destroy_process_group()


class Watch(threading.Thread):
    """The memory and CPU time of the exporter of a folder, from outside."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder = str(folder)
        self.rss = 0
        self.cpu = 0.0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.3):
            for process in psutil.process_iter(["cmdline"]):
                if self._folder in (process.info["cmdline"] or []) and "--spawned" in process.info["cmdline"]:
                    try:
                        self.rss = max(self.rss, process.memory_info().rss)
                        self.cpu = max(self.cpu, sum(process.cpu_times()[:2]))
                    except psutil.Error:
                        pass


def expected(folder: Path) -> dict[tuple[int, int], int]:
    """Every span that there should be, by ids, with when its step ended (Unix ns): made here from the files."""
    from fsdptrace.analysis import find_runs
    from fsdptrace.analysis.follow import Follower
    from fsdptrace_exporters.otlp import build
    from fsdptrace_exporters.otlp.step_trace import Extent, step_spans
    from fsdptrace_exporters.otlp.unit_trace import UnitTrace

    out: dict[tuple[int, int], int] = {}
    for source in find_runs(folder)[0][0].sources:
        steps: list[Any] = []
        follower = Follower(source, steps.append)
        while follower.read():
            pass
        of, scope = build.resource(source.header), build.scope()
        for step in steps:
            extent = Extent.of(step, follower.trace.last_t)
            made = step_spans(source.header, of, scope, step, extent, True, "")
            made += UnitTrace(source.header, of, scope, step, extent).spans()
            end = max(span.end_time or 0 for span in made)
            for span in made:
                context = span.get_span_context()
                assert context is not None
                out[context.trace_id, context.span_id] = end
    return out


def one(name: str, exporter: str, disturb: Callable[[Any, Any], None] | None) -> dict[str, Any]:
    """One training run; ``disturb(server, receiver)`` has the time of it to do its worst."""
    servers = importlib.import_module("support.servers")
    with tempfile.TemporaryDirectory() as text, servers.receiver() as sink:
        folder = Path(text)
        arrivals: dict[tuple[int, int], list[int]] = {}
        taken: list[Any] = sink.got["traces"]

        class Noting(list):  # type: ignore[type-arg]
            def append(self, request: Any) -> None:
                super().append(None)
                now = time.time_ns()
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            key = (int.from_bytes(span.trace_id, "big"), int.from_bytes(span.span_id, "big"))
                            arrivals.setdefault(key, []).append(now)

        sink.got["traces"] = Noting(taken)
        with servers.rotel(folder, sink.url) as (server, grpc, _):
            environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{grpc}"}
            command = [sys.executable, __file__, "rank"]
            ranks = [subprocess.Popen([*command, str(rank), text, exporter, str(SECONDS)], env=environment) for rank in (0, 1)]
            watch = Watch(folder / "out" / "run")
            watch.start()
            if disturb is not None:
                disturb(server, sink)
            for process in ranks:
                assert process.wait() == 0
            if exporter:
                said = servers.wait_for_exporter(folder / "out" / "run", 90)
                time.sleep(1)
            watch.over.set()
        times = json.loads((folder / "times0").read_text())[10:]
        wall, cpu = ([step[i] * 1000 for step in times] for i in (0, 1))
        result: dict[str, Any] = {"name": name, "steps": len(times), "median": statistics.median(wall)}
        result["quartile"], result["cpu_ms"] = statistics.quantiles(wall)[0], statistics.median(cpu)
        if exporter:
            wanted = expected(folder / "out")
            delays = [min(arrivals[key]) - end for key, end in wanted.items() if key in arrivals]
            result |= {
                "spans": len(wanted), "delivered": len(delays), "lost": len(wanted) - len(delays),
                "twice": sum(len(seen) - 1 for seen in arrivals.values()), "late": sum(delay > 5e9 for delay in delays),
                "slowest": max(delays, default=0) / 1e9, "rss": watch.rss / 2**20, "cpu": watch.cpu,
                "said": [line for line in said.splitlines() if not line.startswith("note: 0")],
            }  # fmt: skip
        return result


def outages() -> None:
    """The table of docs/opentelemetry.md."""

    def begun(sink: Any) -> None:
        """Some seconds into the training, which takes its time to start."""
        while not sink.got["traces"]:
            time.sleep(0.1)
        time.sleep(4)

    def killed(server: Any, sink: Any) -> None:
        begun(sink)
        server.kill()
        time.sleep(6)
        server.start()

    def paused(server: Any, sink: Any) -> None:
        begun(sink)
        server.pause()
        time.sleep(6)
        server.go_on()

    def refused(server: Any, sink: Any) -> None:
        begun(sink)
        sink.status = 503
        time.sleep(6)
        sink.status = 200

    cases: list[tuple[str, str, Callable[[Any, Any], None] | None]] = [
        ("no exporter", "", None), ("healthy", "otlp", None), ("killed for 6 s", "otlp", killed),
        ("paused for 6 s", "otlp", paused), ("what is behind it answers 503 for 6 s", "otlp", refused),
        ("no exporter", "", None),
    ]  # fmt: skip
    results = [one(*case) for case in cases]
    print(f"{'':40}step ms  quartile  CPU ms   spans  delivered  lost  late>5s  slowest s  twice  RSS MiB  CPU s")
    for result in results:
        line = f"{result['name']:40}{result['median']:7.1f}{result['quartile']:10.1f}{result['cpu_ms']:8.1f}"
        if "spans" in result:
            line += (
                f"{result['spans']:8}{result['delivered']:11}{result['lost']:6}{result['late']:9}{result['slowest']:11.1f}"
                f"{result['twice']:7}{result['rss']:9.0f}{result['cpu']:7.1f}"
            )
        print(line)
        for said in result.get("said", ()):
            print(f"    {said}")


def scale(groups: int = 1000, steps: int = 100) -> None:
    """A large trace, all of it in detail, to a collector that throws it away: events a second, memory, drops."""
    made = importlib.import_module("support.made")
    servers = importlib.import_module("support.servers")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        events = big(made, folder / "out", groups, steps)
        found = importlib.util.find_spec("rotel")
        assert found is not None
        assert found.origin is not None
        agent = Path(found.origin).with_name("rotel-agent")
        for protocol in ("grpc", "http/protobuf"):
            ports = servers.free_port(), servers.free_port()
            command = [str(agent), "start", "--otlp-grpc-endpoint", f"127.0.0.1:{ports[0]}", "--otlp-http-endpoint",
                       f"127.0.0.1:{ports[1]}", "--exporter", "blackhole"]  # fmt: skip
            server = servers.Server(command, folder / "rotel.log").ready(*ports)
            port = ports[0] if protocol == "grpc" else ports[1]
            environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
                           "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}  # fmt: skip
            begun = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, "-m", "fsdptrace_exporters", str(folder / "out"), "--to", "otlp", "--again"], env=environment
            )
            rss: list[int] = []
            cpu = 0.0
            handle = psutil.Process(process.pid)
            while process.poll() is None:
                try:
                    rss.append(handle.memory_info().rss)
                    cpu = sum(handle.cpu_times()[:2])
                except psutil.Error:
                    break
                time.sleep(0.2)
            seconds = time.monotonic() - begun
            server.stop()
            third = len(rss) // 3
            print(
                f"{protocol}: {events:,} events in {seconds:.1f} s, {cpu:.1f} s CPU: {events / cpu:,.0f} a second of CPU; "
                f"memory {max(rss[:third]) / 2**20:.0f} MiB in the first third, {max(rss) / 2**20:.0f} MiB at most; "
                f"exit status {process.wait()}"
            )


def big(made: Any, out: Path, groups: int, steps: int) -> int:
    """A file of ``groups`` units, as the recorder writes it; the number of its events."""
    trace = made.Made(0, 2, "big", {f"layers.{i}": 1 << 20 for i in range(groups)})
    path = trace.write(out)
    forward, backward = {"pass": "forward"}, {"pass": "backward"}
    with open(path, "w") as stream:
        for _ in range(steps):
            for group in range(groups):
                trace.unshard(group, 1 << 20, "forward")
                for kind in ("wait", "pre_forward", "reshard", "post_forward"):
                    trace.event(kind, group, **({"bytes": 1 << 20} if kind in ("wait", "reshard") else {}), **forward)
            trace.event("forward", root=0, grad=True, inference=False, **forward)
            for group in reversed(range(groups)):
                trace.unshard(group, 1 << 20, "backward")
                trace.event("wait", group, bytes=1 << 20, **backward)
                trace.event("pre_backward", group, **backward)
                trace.event("reshard", group, bytes=1 << 20, **backward)
                trace.event("reduce_scatter", group, bytes=1 << 20, world=2, dtype="float32", tensors=1, **backward)
                trace.event("post_backward", group, tensors=1, **backward)
            trace.event("backward", last=True, **backward)
            trace.end_step()
            lines = (json.dumps(json.loads(line), separators=(",", ":")) for line in trace.lines)
            stream.write("".join(f"{line}\n" for line in lines))
            trace.lines.clear()
        trace.end()
        stream.write("".join(f"{line}\n" for line in trace.lines))
    return int(trace.seq)


if __name__ == "__main__":
    import importlib.util

    what = sys.argv[1] if len(sys.argv) > 1 else "all"
    if what == "rank":
        train(int(sys.argv[2]), sys.argv[3], sys.argv[4], float(sys.argv[5]))
    else:
        if what in ("all", "outages"):
            outages()
        if what in ("all", "scale"):
            scale()
