"""The page in a real browser: drawn, searched, clicked, in light and dark, without a request and without an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fsdptrace.analysis import load
from fsdptrace.cli.app import app
from fsdptrace.html import render, tables, write
from fsdptrace.html.choice import choose
from fsdptrace.html.data import page_data
from support.browser import Browser, Page
from support.made import STEP_EVENTS, Made, run

MESSAGE = "layers.0 was gathered after its backward </script><script>window.hacked = 1</script>"


def faulty(folder: Path, ranks: int = 2, steps: int = 3, **header: Any) -> None:
    """Ranks of whole steps; in the last one rank 1 gathers layers.0 twice more and never uses it."""
    for rank in range(ranks):
        made = Made(rank, ranks, **header)
        for _ in range(steps - 1):
            made.step()
        if rank == 1:
            made.unshard(1, 3000, "forward")
            at = made.unshard(0, 1000, "backward", issuer=1, direction="backward", mode="implicit")
            made.violation("gather-after-backward", "layers.0", group=0, message=MESSAGE, evidence=[at - 1, at], bytes=1000)
            made.event("reshard", 0, bytes=1000, **{"pass": "backward"})
            made.end_step(4000)
        else:
            made.step()
        made.end()
        made.write(folder)


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    faulty(tmp_path)
    shown = open_page(browser, tmp_path)
    yield shown
    assert shown.errors == []
    assert [url for url in shown.requests if not url.startswith("data:")] == [(tmp_path / "page.html").as_uri()]
    shown.close()


def open_page(browser: Browser, folder: Path, dark: bool = False) -> Page:
    write(load(folder), folder / "page.html")
    shown = browser.page(dark)
    shown.size(1400, 900)
    shown.open(folder / "page.html")
    shown.wait("window.fsdptrace && window.fsdptrace.ready")
    return shown


def colour(page: Page, time: float, rank: int, lane: str, dy: float = 4) -> list[int]:
    """The pixel at a time, ``dy`` below the top of a lane."""
    value = page.js(f"""(() => {{
        const t = fsdptrace.timeline, p = t.processes.findIndex((process) => process.rank === {rank});
        const row = t.rows.find((r) => r.p === p && r.lane >= 0 && t.processes[p].laneName(r.lane) === {json.dumps(lane)});
        t.draw();
        const one = document.createElement("canvas"), g = one.getContext("2d", {{ willReadFrequently: true }});
        g.drawImage(t.canvas, -Math.floor(t.x({time})), -(row.y - t.host.scrollTop + {dy}));
        return [...g.getImageData(0, 0, 1, 1).data].slice(0, 3);
    }})()""")
    assert isinstance(value, list)
    return value


def rgb(page: Page, name: str) -> list[int]:
    """A colour of the style sheet."""
    text = page.js(f"css('--{name}')")
    return [int(text[i : i + 2], 16) for i in (1, 3, 5)]


def test_the_timeline_is_drawn(page: Page) -> None:
    assert page.js("fsdptrace.processes.map((p) => [p.rank, p.holds.length, p.uses.length])") == [[0, 9, 6], [1, 8, 4]]
    # Rank 0 begins at event 1, at 10 ns, which is 0 on the axis: layers.0 is gathered from 0 to 30 ns and ready at 15.
    page.js("fsdptrace.timeline.show(0, 200)")
    background, forward, backward = rgb(page, "bg"), rgb(page, "forward"), rgb(page, "backward")
    assert colour(page, 22, 0, "layers.0") == forward
    assert colour(page, 7, 0, "layers.0") not in (forward, background)  # pale: issued, not waited for
    assert colour(page, 43, 0, "layers.0") == background
    assert colour(page, 150, 0, "layers.0") == backward
    assert colour(page, 100, 0, "layers.1") == forward
    assert colour(page, 77, 0, "layers.1", 8) == rgb(page, "forward-dark")  # computing
    # What rank 1 gathered for nothing has a red edge, and a mark above.
    start, end = page.js("[7, 7].map((i, k) => [fsdptrace.processes[1].holds.t0[i], fsdptrace.processes[1].holds.t1[i]][k])")
    page.js("fsdptrace.timeline.show(200, 560)")
    assert colour(page, (start + end) / 2, 1, "layers.0", 3) == rgb(page, "error")


def test_a_spike_does_not_last(browser: Browser, tmp_path: Path) -> None:
    """Bytes that were gathered for less than a pixel are one pixel wide in the curve of the rank's row."""
    made = Made(0, 1)
    made.step()
    made.tick = 1000  # from here on each event is 1,000 ns after the one before, and the first one late
    made.end_step()
    made.end()
    made.write(tmp_path)
    page = open_page(browser, tmp_path)
    assert page.js("fsdptrace.timeline.fit() ?? fsdptrace.processes[0].levels.t.length") == 6
    wide, most = page.js("""(() => { const t = fsdptrace.timeline, seen = [];
        fsdptrace.processes[0].levels.walk(t, t.end, (x0, x1, bytes) => seen.push([x1 - x0, bytes]));
        const held = seen.filter(([, bytes]) => bytes);
        return [held.reduce((sum, [wide]) => sum + wide, 0), Math.max(...held.map(([, bytes]) => bytes))]; })()""")
    # All is gathered and freed in 170 of 19,170 ns, which is less than ten of the 1,000 pixels.
    assert (wide < 20, most) == (True, 4000)
    page.close()


def test_what_the_device_did_has_lanes(browser: Browser, tmp_path: Path) -> None:
    made = Made(world=1)
    made.step()
    made.line({
        "kind": "device_times", "model": 0, "step": 0, "base": 10, "span": 900, "missing": 0, "seq": [1, 6, 7, 10, 16, 20],
        "what": ["unshard", "unshard", "wait", "wait", "reduce_scatter", "forward"], "pass": [1, 1, 1, 2, 2, 0],
        "group": [0, 1, 1, 0, 0, -1], "t0": [20, 60, 90, 150, 200, 0], "ns": [30, 60, 30, 0, 50, 140],
        "exposed": [0, 30, -1, -1, 12, -1],
    })  # fmt: skip
    made.end()
    made.write(tmp_path)
    page = open_page(browser, tmp_path)
    names = page.js("""fsdptrace.timeline.rows.map(
        (row) => row.type + ' ' + fsdptrace.processes[0].laneName(Math.max(0, row.lane)))""")
    assert names == [
        "rank Net: passes", "passes Net: passes", "device device: all-gather", "device device: reduce-scatter",
        "device device: compute stands still", "device device: compute", "unit layers.0", "unit layers.1",
    ]  # fmt: skip
    assert page.js("fsdptrace.processes[0].device.length") == 5  # a wait that took no time is not shown
    # Event 1, at 10 ns, is 0 on the axis; the device's times count from 10 ns.
    page.js("fsdptrace.timeline.show(0, 300)")
    assert colour(page, 35, 0, "device: all-gather") == rgb(page, "forward")
    assert colour(page, 55, 0, "device: all-gather") == rgb(page, "bg")
    assert colour(page, 225, 0, "device: reduce-scatter") == rgb(page, "backward")
    assert colour(page, 105, 0, "device: compute stands still") == rgb(page, "warning")
    assert colour(page, 105, 0, "device: compute") == rgb(page, "forward-dark")
    page.js("""(() => { const t = fsdptrace.timeline, hit = (time, row) => t.pick(t.x(time), row.y - t.host.scrollTop + 5);
        window.hits = t.rows.filter((row) => row.type === "device").map(
            (row) => [35, 80, 105, 225].map((at) => hit(at, row)).filter((found) => found.layer));
        t.select(hits[0][1]); })()""")
    assert page.js("hits.map((found) => found.length)") == [3, 1, 1, 3]
    details = page.js("document.querySelector('#details').innerText")
    assert details.startswith("all-gather of layers.1, on the device")
    assert "for\n60 ns" in details
    assert "call\nunshard of layers.1 (event 6)" in details
    assert "exposed\n30 ns: compute stood still for it" in details
    assert "compute stands still (device)" in page.js("document.querySelector('#legend').innerText")
    page.type("#search", "layers.1")
    assert page.js("fsdptrace.timeline.rows.filter((row) => row.matched).map((row) => row.type)") == ["unit"]
    assert page.errors == []
    page.close()


def test_the_curve_has_what_the_allocator_gave_out(browser: Browser, tmp_path: Path) -> None:
    made = Made(0, 1)
    forward = {"pass": "forward"}
    made.unshard(0, 1000, "forward")
    at = made.event("wait", 0, bytes=1000, **forward)
    made.event("memory", 0, allocated=5000, reserved=9000, parent=at, **forward)
    made.event("pre_forward", 0, **forward)
    made.event("reshard", 0, bytes=1000, **forward)
    made.event("memory", 0, allocated=4000, reserved=9000, **forward)
    made.event("post_forward", 0, **forward)
    made.end_step(1000)
    made.end()
    made.write(tmp_path)
    page = open_page(browser, tmp_path)
    # Gathered at 0 and freed at 40 ns; the allocator was asked at 20 and at 50.
    assert page.js("curve.plot.data.map((column) => Array.from(column, (value) => value ?? -1))") == [
        [0, 20, 40, 50], [1000, -1, 0, -1], [-1, 5000, -1, 4000],
    ]  # fmt: skip
    assert page.js("document.querySelector('#curve .u-title').textContent").endswith("allocator had given out (dashed)")
    assert page.errors == []
    page.close()


NAIVE = """(view, layer, lane, from, to) => { const out = [], scale = (view.width - GUTTER) / (to - from); let drawn = -1;
    for (let i = 0; i < layer.length; i++) {
        if (layer.lane[i] !== lane || layer.t1[i] <= from || layer.t0[i] >= to) continue;
        const x0 = Math.max(GUTTER + (layer.t0[i] - from) * scale, GUTTER - 2);
        const x1 = Math.min(GUTTER + (layer.t1[i] - from) * scale, view.width + 2), pixel = Math.floor(x0);
        if (x1 - x0 >= 1) out.push(i);
        else if (pixel !== drawn) { drawn = pixel; out.push(i); }
    }
    return out; }"""


def test_a_frame_does_little_however_much_there_is(browser: Browser, tmp_path: Path) -> None:
    made = Made(0, 1)
    for step in range(1500):
        made.step()
        # So that spans begin anywhere on a pixel, and some far from the others.
        made.seq += step % 7 + (9000 if step % 500 == 499 else 0)
    made.end()
    made.write(tmp_path)
    page = open_page(browser, tmp_path)
    assert page.js("fsdptrace.processes[0].calls.length") == 27_000
    assert page.js("fsdptrace.processes[0].holds.length") == 4_500
    # What is drawn is what looking at every span gives, far away and near.
    same = f"""(() => {{ const t = fsdptrace.timeline, p = t.processes[0], naive = {NAIVE}, out = [];
        for (const span of [t.end, t.end / 10, t.end / 300, 5000, 300]) for (const layer of [p.calls, p.holds, p.uses]) {{
            t.show(t.end * 0.05, t.end * 0.05 + span);
            for (let lane = 0; lane < 3; lane++) {{
                const seen = [];
                layer.walk(lane, t, (i) => seen.push(i));
                const same = JSON.stringify(seen) === JSON.stringify(naive(t, layer, lane, t.t0, t.t1));
                out.push(same && (seen.length > 0 || lane === 0) || [span, lane, seen.length].join(" "));
            }}
        }}
        return out; }})()"""
    assert page.js(same) == [True] * 45
    # With everything in sight: the 37,500 spans and changes of the curve lie on about 900 pixels.
    page.js("fsdptrace.timeline.fit(); fsdptrace.timeline.draw()")
    far = page.js("fsdptrace.timeline.painter.counts")
    assert far["spans"] < 12_000
    assert far["rects"] < 6_000
    # Names are measured and drawn once; moving and zooming take them as they are.
    page.js("""(() => { const g = CanvasRenderingContext2D.prototype, plain = g.measureText; window.measured = 0;
        g.measureText = function (text) { measured++; return plain.call(this, text); };
        const t = fsdptrace.timeline, move = () => { t.zoom(0.5); t.draw(); t.pan(20); t.draw(); t.fit(); t.draw(); };
        move(); measured = 0; move(); })()""")
    assert page.js("[fsdptrace.timeline.painter.counts.labels, measured]") == [0, 0]
    # However many moves come between two frames, there is one frame.
    before = page.js("fsdptrace.timeline.draws")
    page.js("for (let i = 0; i < 50; i++) fsdptrace.timeline.pan(1)")
    page.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.js("fsdptrace.timeline.draws") == before + 1
    assert page.errors == []
    page.close()


def test_search_finds_a_unit(page: Page) -> None:
    page.type("#search", "AYERS.1")
    assert page.js("document.querySelector('#matches').textContent") == "1 of 2: layers.1, rank 0 (Enter: next)"
    assert page.js("fsdptrace.timeline.rows.filter((row) => row.matched).length") == 2
    page.key("Enter")
    assert page.js("document.querySelector('#matches').textContent").startswith("2 of 2: layers.1, rank 1")
    page.click("#only")
    assert page.js("fsdptrace.timeline.rows.map((row) => row.type)") == ["rank", "unit", "rank", "unit"]
    page.js("document.querySelector('#search').select()")
    page.type("#search", "nothing like it")
    assert page.js("document.querySelector('#matches').textContent") == "no unit of that name"


def test_a_click_on_a_finding_moves_the_view(page: Page) -> None:
    page.wait("fsdptrace.timeline.t1 - fsdptrace.timeline.t0 > 500")
    page.js("fsdptrace.timeline.toggle(1)")  # folded away: it must come back
    page.click("#finding-0")
    event = 2 * STEP_EVENTS + 2
    at, low, high = page.js(
        "[fsdptrace.processes[1].calls.t0[fsdptrace.timeline.selected.i], fsdptrace.timeline.t0, fsdptrace.timeline.t1]"
    )
    assert at == 10 * event - 10
    assert low < at < high
    assert not page.js("fsdptrace.timeline.folded.has(1)")
    assert page.js("fsdptrace.timeline.evidence.map(({p, i}) => fsdptrace.processes[p].seq[i])") == [event - 1, event]
    details = page.js("document.querySelector('#details').innerText")
    assert "unshard of layers.0" in details
    assert f"event\n{event}" in details
    assert "issuer\nlayers.1" in details
    assert page.js("document.querySelector('#rank').value") == "1"  # the curve below is that rank's


def test_mouse_and_keys(page: Page) -> None:
    page.js("document.querySelector('#timeline').scrollIntoView(); fsdptrace.timeline.show(0, 200)")
    place = """(() => { const t = fsdptrace.timeline, row = t.rows.find((r) => r.p === 0 && r.lane === 2);
        const b = t.canvas.getBoundingClientRect();
        return [b.x + t.x(%s), b.y + row.y - t.host.scrollTop + 3]; })()"""
    page.mouse(*page.js(place % 100), "mouseMoved")
    assert page.js("!document.querySelector('#tip').hidden")
    assert page.js("document.querySelector('#tip').textContent").startswith("layers.1 gathered")
    page.mouse(*page.js(place % 100))
    assert "bytes\n3,000 B" in page.js("document.querySelector('#details').innerText")
    x, y = page.js(place % 100)
    page.mouse(x, y, "mousePressed")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x - 200, y=y, button="left", buttons=1)
    page.mouse(x - 200, y, "mouseReleased")
    assert page.js("fsdptrace.timeline.t0") == pytest.approx(200 * 200 / page.js("fsdptrace.timeline.width - GUTTER"), rel=0.01)
    before = page.js("fsdptrace.timeline.t1 - fsdptrace.timeline.t0")
    page.js("document.querySelector('#timeline').focus()")
    page.key("s")
    assert page.js("fsdptrace.timeline.t1 - fsdptrace.timeline.t0") > before
    page.click("#fit")
    assert page.js("fsdptrace.timeline.t0 <= 0 && fsdptrace.timeline.t1 >= fsdptrace.timeline.end")


def test_names_are_text(browser: Browser, tmp_path: Path) -> None:
    evil = "<img src=x onerror='window.hacked=1'><!--<script>\u2028&amp;"
    names = {evil: 1000, "</script><script>window.hacked=1</script>": 3000}
    made = Made(0, 1, names=names, host="<b>host</b>", versions={"torch": "<i>2</i>"}, coverage=["<u>blind</u>"])
    made.step()
    made.violation(evil, evil, group=0, message=MESSAGE, hint=evil, severity="<s>", evidence=[1])
    made.end_step()
    made.end()
    made.write(tmp_path)
    page = open_page(browser, tmp_path)
    page.js("document.querySelector('button.go').click()")
    page.type("#search", evil)
    assert page.js("window.hacked") is None
    assert page.js("document.querySelectorAll('img, b b, i i, u, s').length") == 0
    assert page.js("document.querySelector('#units td').textContent") == evil
    assert page.js("document.querySelector('.message').textContent") == MESSAGE
    # Were a name to slip through as markup, the page's own policy would not run it.
    page.js("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked=1\">')")
    page.js("new Promise((done) => setTimeout(done, 100))")
    assert page.js("window.hacked") is None
    assert len(page.requests) == len([url for url in page.requests if url.startswith(("file:", "data:"))])
    page.close()


def test_dark(browser: Browser, tmp_path: Path) -> None:
    run(tmp_path)
    page = open_page(browser, tmp_path, dark=True)
    assert page.js("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 28)"
    assert colour(page, 45, 0, "layers.0") == [18, 22, 28]
    page.click("#theme")
    assert page.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert colour(page, 45, 0, "layers.0") == [255, 255, 255]
    assert "Nothing found." in page.js("document.querySelector('#findings').innerText")
    assert page.js("document.querySelectorAll('.uplot canvas').length") == 3  # the curve, bytes and times per step
    assert page.errors == []
    page.close()


def test_a_run_without_detail_says_so(browser: Browser, tmp_path: Path) -> None:
    made = Made(0, 1)
    made.one_line_step()
    made.end()
    made.write(tmp_path)
    write(load(tmp_path), tmp_path / "page.html")
    page = browser.page()
    page.open(tmp_path / "page.html")
    page.wait("window.fsdptrace && window.fsdptrace.ready")
    assert "there is nothing to draw" in page.js("document.body.innerText")
    assert page.errors == []
    page.close()


# -- without a browser -------------------------------------------------------------------------------------------------
def test_what_is_shown_when_not_all_fits(tmp_path: Path) -> None:
    faulty(tmp_path, ranks=3, steps=5)
    loaded = load(tmp_path)
    assert choose(loaded).left_out == 0
    told: list[tuple[int, int]] = []
    page_data(loaded, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] == sum(path.stat().st_size for path in tmp_path.rglob("*.jsonl"))
    # Room for three steps: first the one that the finding is about, of its own rank, then of the others.
    few = choose(loaded, 3 * STEP_EVENTS)
    assert few.steps == {1: {(0, 4)}, 0: {(0, 4)}, 2: {(0, 4)}}
    assert few.left_out == 12
    data = page_data(loaded, 3 * STEP_EVENTS)
    assert "12 more steps" in data["run"]["left_out"]
    assert [process["rank"] for process in data["processes"]] == [0, 1, 2]


@pytest.mark.parametrize("wrong", [{"pass": [9]}, {"exposed": ["x"]}, {"ns": [-5]}, {"t0": [None]}, {"seq": []}])
def test_device_times_that_no_recorder_writes_are_left_out(tmp_path: Path, wrong: dict[str, list[Any]]) -> None:
    made = Made(0, 1)
    made.step()
    line = {"kind": "device_times", "model": 0, "step": 0, "base": 10, "span": 900, "missing": 0, "seq": [1], "pass": [1],
            "what": ["unshard"], "group": [0], "t0": [20], "ns": [30], "exposed": [0]}  # fmt: skip
    made.line(line)
    made.line({**line, **wrong})
    made.end()
    made.write(tmp_path)
    (process,) = page_data(load(tmp_path))["processes"]
    assert process["device"]["dur"] == [30]


def test_a_chart_of_very_many_steps_keeps_what_stands_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MANY_STEPS", 4)
    for rank in range(2):
        made = Made(rank, 2)
        for step in range(10 - rank):
            made.one_line_step(peak=9000 + rank if step == 4 else 1000 * rank + step)
        made.end()
        made.write(tmp_path)
    lines = tables.step_lines(load(tmp_path))
    # Ten steps in four points, of three steps each; rank 1 has no last step.
    assert (lines["first"], lines["together"], lines["names"]) == ([0, 3, 6, 9], 3, ["rank 0", "rank 1"])
    assert lines["unsharded_peak"] == [[2, 9000, 8, 9], [1002, 9001, 1008, None]]
    # The first step's begin is not known where it is one line; each further one takes 18 events of 10 ns.
    assert lines["duration_ns"] == [[180, 180, 180, 180], [180, 180, 180, None]]


def test_a_chart_of_many_ranks_is_of_the_largest(tmp_path: Path) -> None:
    for rank in range(9):
        made = Made(rank, 9)
        for step in range(2):
            made.one_line_step(peak=100 * step + rank, past=rank)
        made.end()
        made.write(tmp_path)
    lines = tables.step_lines(load(tmp_path))
    assert (lines["first"], lines["together"], lines["names"]) == ([0, 1], 1, ["largest of all ranks"])
    assert lines["unsharded_peak"] == [[8, 108]]


def test_a_step_that_never_ended_comes_before_the_healthy_ones(tmp_path: Path) -> None:
    made = Made(0, 1)
    for _ in range(3):
        made.step()
    made.unshard(0, 1000, "forward")
    made.write(tmp_path)
    assert choose(load(tmp_path), STEP_EVENTS).steps == {0: {(0, 3)}}


def test_the_clocks_of_ranks_are_one(tmp_path: Path) -> None:
    run(tmp_path, ranks=1, steps=1, world=2, clock={"perf_counter_ns": 0, "unix_ns": 1_000_000_000})
    later = Made(1, 2, host="other", clock={"perf_counter_ns": 7, "unix_ns": 1_000_000_507})
    later.step()
    later.end()
    later.write(tmp_path)
    data = page_data(load(tmp_path))
    assert data["base_ns"] == "1000000010"
    assert [process["calls"]["t0"][0] for process in data["processes"]] == [0, 500]


def test_the_command_and_its_errors(tmp_path: Path) -> None:
    run(tmp_path)
    target = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--html", str(target)])
    assert result.exit_code == 0
    assert result.output == f"wrote {target}\n"
    text = target.read_text()
    assert text == render(load(tmp_path))
    assert "Leon Sorokin" in text  # uPlot's licence
    assert 'http-equiv="Content-Security-Policy" content="default-src &#x27;none&#x27;' in text
    missing = CliRunner().invoke(app, ["report", str(tmp_path), "--html", str(tmp_path / "no" / "x.html")])
    assert missing.exit_code == 2
    assert "No such file or directory" in missing.output
    assert list(tmp_path.glob(".*part")) == []
