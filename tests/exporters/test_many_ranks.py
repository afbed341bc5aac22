"""512 ranks in one trace, from one folder: taken by a real collector, with few files open and in bounded memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from exporters.test_following import follow

from fsdptrace.analysis.follow import FollowedStep, Follower
from fsdptrace_exporters.otlp import metering
from fsdptrace_exporters.otlp.delivery import Delivery
from fsdptrace_exporters.otlp.metering import MetricSink
from fsdptrace_exporters.sinks import Settings
from support.made import Made, run
from support.servers import receiver, rotel, until, values

RANKS = 512
# A process begins with the peak of the one that forked it, which is pytest here: hence one in between.
LAUNCHER = """
import resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
subprocess.run([sys.executable, *sys.argv[1:]], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def many(folder: Path) -> None:
    """A step of which rank 0 wrote every event and the others their step's line; then one that they wrote alike."""
    for rank in range(RANKS):
        made = Made(rank, RANKS)
        made.one_line_step() if rank else made.step()
        made.one_line_step()
        made.end()
        made.write(folder)


def test_512_ranks_are_one_trace(tmp_path: Path) -> None:
    """Of each step: its root and a span per rank; of rank 0 the thirteen of its units, once. 160 files may be open, and
    gRPC servers take 4 MiB."""
    many(tmp_path / "out")
    with receiver() as sink, rotel(tmp_path, sink.url) as (_, grpc, _http):
        environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{grpc}"}
        with open(tmp_path / "said", "wb") as said:
            done = subprocess.run(
                [sys.executable, "-c", LAUNCHER, "-m", "fsdptrace_exporters", str(tmp_path / "out"), "--to", "otlp"],
                env=environment, stdout=subprocess.PIPE, stderr=said, check=True,
            )  # fmt: skip
        assert (tmp_path / "said").read_text() == f"note: {2 * RANKS} steps delivered\n"
        spans = until(lambda: len(sink.spans()) >= 2 * (1 + RANKS) + 13 and sink.spans(), "every span arrives")
        until(lambda: len(_ranks(sink.got["metrics"])) == RANKS, "the metrics of every rank arrive")
        metrics = sink.got["metrics"]
    assert int(done.stdout) < 256 << 10  # KiB; some 75 MiB, most of it the interpreter with the SDK and gRPC
    assert Counter(span.name for _, span in spans if not span.name.startswith(("fsdp.un", "fsdp.reduce"))) == {
        "fsdp.step": 2, "fsdp.rank": 2 * RANKS,
    }  # fmt: skip
    for root in (span for _, span in spans if span.name == "fsdp.step"):
        below = [
            (about["dl.rank"], span) for about, span in spans if span.name == "fsdp.rank" and span.trace_id == root.trace_id
        ]
        assert sorted(rank for rank, _ in below) == list(range(RANKS))
        assert {span.parent_span_id for _, span in below} == {root.span_id}
        assert len({span.span_id for _, span in below}) == RANKS
    newest = [
        point.as_int
        for request in metrics for one in request.resource_metrics for metric in one.scope_metrics[0].metrics
        if metric.name == "fsdp.step" for point in metric.gauge.data_points
    ]  # fmt: skip
    assert newest == [1] * RANKS


def _ranks(requests: list[Any]) -> set[int]:
    return {values(one.resource.attributes)["dl.rank"] for request in requests for one in request.resource_metrics}


class _Metrics:
    """A metric sink over several files, by hand."""

    def __init__(self, paths: list[Path]) -> None:
        self.sent: list[list[Any]] = []

        def take(batch: Any) -> bool:
            self.sent.append(batch[0].resource_metrics)
            return True

        settings = Settings(live=True)
        delivery = Delivery("metrics", take, "here", "file", settings)
        # A snapshot at most every 200 ns of the files' time: a step takes 180.
        self.sink = MetricSink("m", delivery, None, None, 200e-9, False, True, settings)
        self.followers: list[Follower] = []
        for path in paths:
            follower = Follower(follow(path)[0].trace.source, lambda step: self._step(step))
            self.followers.append(follower)
            self.sink.begin(follower, {})

    def _step(self, step: FollowedStep) -> None:
        self.sink.step(self._reading, step)

    def read(self, number: int) -> None:
        self._reading = self.followers[number]
        while self._reading.read():
            pass


def test_metrics_of_many_ranks_are_few_requests_none_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering, "POINTS", 100)
    metrics = _Metrics(run(tmp_path, ranks=40, steps=1))
    for number, follower in enumerate(metrics.followers):
        metrics.read(number)
        metrics.sink.end(follower)
    assert metrics.sink.flush(True)
    sizes = [[sum(len(m.data.data_points) for m in one.scope_metrics[0].metrics) for one in batch] for batch in metrics.sent]
    assert sum(len(batch) for batch in sizes) == 40
    assert all(sum(batch) <= 100 for batch in sizes)
    # All but the last are as full as they can be.
    assert all(sum(batch) + max(batch) > 100 for batch in sizes[:-1])


def test_the_position_of_a_rank_waits_for_no_other(tmp_path: Path) -> None:
    """It is that of its own last snapshot that was delivered, with the numbers as of then, whatever others did since."""
    made = [Made(rank, 2) for rank in (0, 1)]
    for trace in made:
        for _ in range(4):
            trace.step()
    metrics = _Metrics([trace.write(tmp_path) for trace in made])
    first, second = metrics.followers
    assert metrics.sink.reached(first) is None
    metrics.read(0)
    # Steps end at 185, 365, 545 and 725 ns: snapshots at 365 and, 200 ns later or more, at 725.
    assert metrics.sink.reached(first) is None  # nothing is delivered
    assert metrics.sink.flush(True)
    reached = metrics.sink.reached(first)
    assert reached is not None
    assert reached.taken == {0: (3, 725)}
    assert metrics.sink.state(first)["gauges"]["fsdp.step"] == [[[], 3]]
    made[0].step()
    made[0].write(tmp_path)
    metrics.read(0)  # a step of it that is in no snapshot yet
    assert first.position.taken == {0: (4, 905)}
    assert metrics.sink.flush(True)
    assert metrics.sink.reached(first) == reached
    assert metrics.sink.state(first)["gauges"]["fsdp.step"] == [[[], 3]]
    assert metrics.sink.reached(second) is None
    metrics.read(1)
    assert metrics.sink.flush(True)
    assert metrics.sink.reached(first) == reached
    later = metrics.sink.reached(second)
    assert later is not None
    assert later.taken == {0: (3, 725)}
