"""Files that grow, rotate, stop and are read again: nothing is lost, and what comes twice has the same ids."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fsdptrace.analysis import find_runs
from fsdptrace.analysis.follow import FollowedStep, Follower, Position
from fsdptrace_exporters.__main__ import main
from support.made import Made, model, run


def _encoder() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.json.file") is not None
    except ModuleNotFoundError:
        return False


needs_encoder = pytest.mark.skipif(not _encoder(), reason="OTLP JSON needs opentelemetry-exporter-otlp-json-file (SDK 1.45)")


def source(path: Path) -> Any:
    runs, _ = find_runs(path)
    return runs[0].sources[0]


def follow(path: Path, position: Position | None = None) -> tuple[Follower, list[FollowedStep]]:
    steps: list[FollowedStep] = []
    follower = Follower(source(path), steps.append, position)
    while follower.read():
        pass
    return follower, steps


def numbers(steps: list[FollowedStep]) -> list[tuple[int, int]]:
    return [(step.part.map.model, step.part.step) for step in steps]


def made(steps: int, **header: Any) -> Made:
    out = Made(0, 2, "run", **header)
    for _ in range(steps):
        out.step()
    return out


def test_steps_come_as_they_are_finished(tmp_path: Path) -> None:
    """Line after line: a step is there with its last line, never before, and a line is read only when it is whole."""
    trace = made(2)
    path = trace.write(tmp_path, "\n".join(trace.lines[:2]) + "\n")
    follower, steps = follow(path)
    assert steps == []
    for i, line in enumerate(trace.lines[2:], 1):
        with open(path, "a") as stream:
            stream.write(line[:20])
            stream.flush()
            follower.read()
            stream.write(line[20:] + "\n")
        follower.read()
        assert len(steps) == i // 18  # a step has 18 lines
    assert all(step.part.full for step in steps)
    assert [step.part.line.t for step in steps if step.part.line] == [185, 365]


def test_position_goes_on_where_it_was(tmp_path: Path) -> None:
    trace = made(4)
    trace.end()
    path = trace.write(tmp_path)
    _, whole = follow(path)
    for cut in range(4):
        position = whole[cut].position
        again, rest = follow(path, Position.from_json(json.loads(json.dumps(position.to_json()))))
        assert numbers(rest) == [(0, step) for step in range(cut + 1, 4)]
        # Also what depends on the step before is the same: when it began.
        assert [step.part.line for step in rest] == [step.part.line for step in whole[cut + 1 :]]
        assert again.ended == "end"


def test_two_models_in_turn(tmp_path: Path) -> None:
    """Steps of two models interleave; wherever reading stopped, every step comes exactly once."""
    trace = Made(0, 2, "run")
    trace.line(model(number=1, root="Other"))
    for number in range(3):
        trace.number = number
        trace.counts = {}
        trace.unshard(0, 1000, "forward")
        trace.event("unshard", 0, bytes=1000, model=1, **{"pass": "forward"})
        trace.event("step", unsharded_bytes=0, unsharded_peak=1, past_backward_bytes=0, dropped=0, counts={"unshard": 1})
        trace.event(
            "step", unsharded_bytes=0, unsharded_peak=1, past_backward_bytes=0, dropped=0, counts={"unshard": 1}, model=1
        )
    trace.end()
    path = trace.write(tmp_path)
    _, whole = follow(path)
    assert numbers(whole) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    for cut, step in enumerate(whole):
        _, rest = follow(path, step.position)
        assert numbers(rest) == numbers(whole)[cut + 1 :]
        assert all(other.part.full for other in rest)


def test_parts_and_thinning(tmp_path: Path) -> None:
    """Rotated parts are read in turn; what was thinned before it was read is counted, and a thinned part is read anew."""
    trace = made(3)
    path = trace.write(tmp_path, "\n".join(trace.lines[:20]) + "\n")  # header, model, step 0
    follower, steps = follow(path)
    part = path.with_name(path.name.replace(".jsonl", ".1.jsonl"))
    part.write_text("\n".join([trace.lines[0], *trace.lines[20:38]]) + "\n")
    while follower.read():
        pass
    assert numbers(steps) == [(0, 0), (0, 1)]
    position = follower.position
    assert position.part == 1
    # The part is cut down to its step's line, as the writer does, and reading goes on in the next one.
    thin = part.with_suffix(".thin")
    thin.write_text("\n".join([trace.lines[0], trace.lines[37], '{"kind":"thinned","events":17}']) + "\n")
    os.replace(thin, part)
    last = path.with_name(path.name.replace(".jsonl", ".2.jsonl"))
    last.write_text("\n".join([trace.lines[0], *trace.lines[38:]]) + "\n")
    again, rest = follow(path, position)
    assert numbers(rest) == [(0, 2)]
    assert again.missed == 17
    # One who never read the part misses the events, and says so.
    fresh, whole = follow(path)
    assert [(step.part.step, step.part.full) for step in whole] == [(0, True), (1, False), (2, True)]
    assert fresh.missed == 17
    # A part that is gone: the events between the numbers that are there.
    os.unlink(part)
    fresh, whole = follow(path)
    assert numbers(whole) == [(0, 0), (0, 2)]
    assert fresh.missed == 18


def test_a_dead_process_hands_on_its_last_step(tmp_path: Path) -> None:
    """No end line, and no process of that number: after some silence its unfinished step comes, tail included."""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    trace = made(1, host="here", pid=child.pid)
    trace.unshard(0, 1000, "forward")
    lines = trace.lines[:-1]
    path = trace.write(tmp_path, "\n".join(lines) + "\n")
    path.with_suffix(".tail").write_text(trace.lines[-1] + "\n")
    follower, steps = follow(path)
    assert not follower.look("elsewhere")
    assert not follower.look("here")
    follower.grew = time.monotonic() - 60
    assert not follower.look("elsewhere")
    assert follower.look("here")
    assert follower.ended == "died"
    assert numbers(steps) == [(0, 0), (0, 1)]
    assert steps[-1].part.line is None
    assert len(steps[-1].part.records) == 12
    # Read again from there it stays dead, and says nothing twice.
    again, rest = follow(path, follower.position)
    assert (again.ended, rest) == ("died", [])


def test_a_process_that_lives_is_waited_for(tmp_path: Path) -> None:
    trace = made(1, host="here", pid=os.getpid())
    path = trace.write(tmp_path)
    follower, _ = follow(path)
    follower.grew = time.monotonic() - 3600
    assert not follower.look("here")


def export(folder: Path, *arguments: str, code: int = 0, **environment: str) -> str:
    """``python -m fsdptrace_exporters``; its words."""
    done = subprocess.run(
        [sys.executable, "-m", "fsdptrace_exporters", str(folder), *arguments],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def spans(path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """``(resource attributes, span)`` of an OTLP JSON file, read with nothing but json."""

    def values(attributes: list[dict[str, Any]]) -> dict[str, Any]:
        out = {}
        for item in attributes:
            ((kind, value),) = item["value"].items()
            out[item["key"]] = int(value) if kind == "intValue" else value
        return out

    return [
        (values(resource["resource"]["attributes"]), {**span, "attributes": values(span.get("attributes", []))})
        for line in path.read_text().splitlines() for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"] for span in scope["spans"]
    ]  # fmt: skip


def times(span: dict[str, Any]) -> tuple[int, int]:
    return int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])


@needs_encoder
def test_otlp_json_of_a_made_run(tmp_path: Path) -> None:
    """Two ranks, two steps of known times: 10 ns an event, the clock's zero at 1,000 ns Unix time."""
    run(tmp_path / "out", ranks=2, steps=2)
    export(tmp_path / "out", "--to", f"otlp-json:{tmp_path / 'x.json'}")
    found = spans(tmp_path / "x.traces.json")
    steps = [(about["dl.rank"], s["name"], s["attributes"].get("fsdp.step"), *times(s))
             for about, s in found if s["name"] in ("fsdp.step", "fsdp.rank", "fsdp.units")]  # fmt: skip
    # A step has 18 events: the first begins at 10 ns and the last ends at 185 ns; the next one lasts from there to 365 ns.
    assert sorted(steps) == sorted(
        [(0, name, step, start, end) for name in ("fsdp.step", "fsdp.rank", "fsdp.units")
         for step, start, end in ((0, 1010, 1185), (1, 1185, 1365))]
        + [(1, "fsdp.rank", step, start, end) for step, start, end in ((0, 1010, 1185), (1, 1185, 1365))]
    )  # fmt: skip
    lifetimes = [(s["attributes"]["fsdp.module.fqn"], *times(s)) for _, s in found
                 if s["name"] == "fsdp.unsharded" and times(s)[0] < 1185]  # fmt: skip
    assert sorted(lifetimes) == [("layers.0", 1010, 1045), ("layers.0", 1110, 1175), ("layers.1", 1060, 1135)]
    linked = [s for _, s in found if s["name"] == "fsdp.unit.backward" and s.get("links")]
    gathers = {s["spanId"] for _, s in found if s["name"] == "fsdp.unshard" and "fsdp.prefetch.direction" in s["attributes"]}
    assert {s["attributes"]["fsdp.module.fqn"] for s in linked} == {"layers.0"}
    assert {link["spanId"] for s in linked for link in s["links"]} == gathers
    lines = (tmp_path / "x.metrics.json").read_text().splitlines()
    resources = [resource for line in lines for resource in json.loads(line)["resourceMetrics"]]
    metrics = {metric["name"]: metric for resource in resources for metric in resource["scopeMetrics"][0]["metrics"]}
    assert metrics["fsdp.step"]["gauge"]["dataPoints"][0]["timeUnixNano"] == "1365"
    assert metrics["fsdp.unsharded.memory.peak"]["gauge"]["dataPoints"][0]["asInt"] == "4000"


@needs_encoder
def test_the_same_ids_again(tmp_path: Path) -> None:
    run(tmp_path / "out", ranks=2, steps=2)
    for name in ("a", "b"):
        export(tmp_path / "out", "--to", f"otlp-json:{tmp_path / name}")
    a, b = (spans(tmp_path / f"{name}.traces.jsonl") for name in ("a", "b"))
    key = "traceId", "spanId", "name", "startTimeUnixNano"
    assert sorted([s[k] for k in key] for _, s in a) == sorted([s[k] for k in key] for _, s in b)
    ids = [(s["traceId"], s["spanId"]) for _, s in a]
    assert len(set(ids)) == len(ids)


@needs_encoder
def test_sampling_is_of_the_step(tmp_path: Path) -> None:
    """Some steps of forty, and of these both ranks; the same ones again another time."""
    run(tmp_path / "out", ranks=2, steps=40)
    kept = []
    for name in ("a", "b"):
        sampler = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.3"}
        export(tmp_path / "out", "--to", f"otlp-json:{tmp_path / name}", **sampler)
        kept.append([{s["attributes"]["fsdp.step"] for about, s in spans(tmp_path / f"{name}.traces.jsonl")
                      if s["name"] == "fsdp.rank" and about["dl.rank"] == rank} for rank in (0, 1)])  # fmt: skip
    assert kept[0][0] == kept[0][1]
    assert kept[0] == kept[1]
    assert 0 < len(kept[0][0]) < 40


@needs_encoder
def test_detail_is_for_the_ranks_that_matter(tmp_path: Path) -> None:
    """Rank 0 unless told; a rank with a violation always."""
    for rank in range(3):
        trace = Made(rank, 3)
        trace.step()
        if rank == 2:
            trace.violation("unpaired-unshard", "layers.1", group=1)
        trace.step()
        trace.end()
        trace.write(tmp_path / "out")

    def shown(*arguments: str) -> set[tuple[int, int]]:
        export(tmp_path / "out", "--to", f"otlp-json:{tmp_path / 'x'}", *arguments)
        return {(about["dl.rank"], s["attributes"]["fsdp.step"]) for about, s in spans(tmp_path / "x.traces.jsonl")
                if s["name"] == "fsdp.units"}  # fmt: skip

    assert shown() == {(0, 0), (0, 1), (2, 1)}
    assert shown("--detail-ranks", "1") == {(1, 0), (1, 1), (2, 1)}
    assert shown("--detail-ranks", "none") == {(2, 1)}
    assert shown("--detail-ranks", "all") == {(rank, step) for rank in range(3) for step in range(2)}
    (rank,) = [s for about, s in spans(tmp_path / "x.traces.jsonl") if s["name"] == "fsdp.rank" and about["dl.rank"] == 2
               and s["attributes"]["fsdp.step"] == 1]  # fmt: skip
    assert rank["status"] == {"code": 2, "message": "unpaired-unshard at layers.1"}
    assert [event["name"] for event in rank["events"]] == ["fsdp.violation"]
    logs = (tmp_path / "x.logs.jsonl").read_text()
    assert logs.count("unpaired-unshard at layers.1 change it") == 1


@needs_encoder
@pytest.mark.parametrize("between", [False, True], ids=["in a step", "between steps"])
def test_the_last_span_of_a_dead_trainer(tmp_path: Path, between: bool) -> None:
    trace = made(1)
    if not between:
        trace.unshard(0, 1000, "forward")
    trace.line(
        {"kind": "heartbeat", "t": 900, "last": trace.seq, "step": 1, "collective": {"kind": "unshard", "model": 0, "group": 1}}
    )
    trace.write(tmp_path / "out")
    export(tmp_path / "out", "--to", f"otlp-json:{tmp_path / 'x'}")
    (last,) = [s for _, s in spans(tmp_path / "x.traces.jsonl") if s["attributes"].get("fsdptrace.process.died")]
    assert (last["name"], last["attributes"]["fsdp.step"], int(last["endTimeUnixNano"])) == ("fsdp.rank", 1, 1900)
    assert int(last["startTimeUnixNano"]) == (1185 if between else 1190)
    assert last["status"]["code"] == 2
    assert "the process ended without a word (rank 0, pid 100 on node)" in last["status"]["message"]
    assert "it had entered unshard of layers.1 and not left it" in last["status"]["message"]
    assert "ended without a word" in (tmp_path / "x.logs.jsonl").read_text()


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (("--to", "nope"), {}, "--to nope: there is no such exporter; installed are otlp, otlp-json, prometheus"),
        ((), {}, "--to is missing"),
        pytest.param(("--to", "otlp-json"), {}, "otlp-json needs a file", marks=needs_encoder),
        pytest.param(("--to", "otlp-json:/nowhere/x"), {}, "/nowhere/x.traces.jsonl: cannot be written", marks=needs_encoder),
        (("--to", "otlp:x"), {}, "otlp takes nothing after the colon"),
        (("--to", "prometheus"), {}, "add --follow"),
        (("--to", "prometheus:0", "--follow"), {}, "'0' is not a port"),
        (("--to", "otlp", "--detail-ranks", "x"), {}, "'x' is none of 0,8 or all or none"),
        (("--to", "otlp"), {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "'http/json' is not supported here"),
        (("--to", "otlp"), {"OTEL_SDK_DISABLED": "true"}, "OTEL_SDK_DISABLED=true turns OpenTelemetry off"),
        (("--to", "otlp"), {"OTEL_METRIC_EXPORT_INTERVAL": "soon"}, "OTEL_METRIC_EXPORT_INTERVAL='soon' is not a whole number"),
        (
            ("--to", "otlp"),
            {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"},
            "turn every signal off",
        ),
    ],
)  # fmt: skip
def test_bad_use_is_one_clear_line(
    arguments: tuple[str, ...], environment: dict[str, str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run(tmp_path / "out", ranks=1, steps=1)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main([str(tmp_path / "out"), *arguments]) == 2
    assert [says in line for line in capfd.readouterr().err.splitlines()] == [True]


@needs_encoder
def test_a_full_disk_stops_the_export(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    run(tmp_path / "out", ranks=1, steps=1)
    (tmp_path / "x.traces.jsonl").symlink_to("/dev/full")
    words = export(tmp_path / "out", "--to", f"otlp-json:{tmp_path / 'x'}", code=2)
    assert "x.traces.jsonl: cannot be written on" in words


@needs_encoder
def test_exporting_needs_no_torch(tmp_path: Path) -> None:
    run(tmp_path / "out", ranks=1, steps=1)
    program = (
        "import sys; from pathlib import Path; from fsdptrace_exporters.__main__ import export;"
        f"export(Path({str(tmp_path / 'out')!r}), ['otlp-json:{tmp_path / 'x'}']);"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@needs_encoder
def test_the_command(tmp_path: Path) -> None:
    """``fsdptrace export`` as the docs have it, for two runs in one folder: the newest one unless told."""
    run(tmp_path / "traces", ranks=1, steps=1, run_id="old")
    run(tmp_path / "traces", ranks=1, steps=2, run_id="new", clock={"perf_counter_ns": 0, "unix_ns": 2_000})
    command = str(Path(sys.executable).with_name("fsdptrace"))
    for arguments, count in (((), 2), (("--run", "old"), 1)):
        done = subprocess.run(
            [command, "export", "traces", "--to", "otlp-json:run.json", *arguments],
            cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, f"note: {count} steps delivered\n")
        assert sum(s["name"] == "fsdp.step" for _, s in spans(tmp_path / "run.traces.json")) == count
    bad = subprocess.run(
        [command, "export", "nowhere", "--to", "otlp"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (bad.returncode, bad.stderr) == (2, "fsdptrace: nowhere: no such file or folder\n")
