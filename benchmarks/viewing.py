"""How fast the pictures are: the HTML page drawn and redrawn in headless Chromium, and the Perfetto trace written.

    python benchmarks/viewing.py [--events 50000] [--ranks 4]

Prints what DESIGN calls the budget beside what was measured: 50,000 events on the page, first draw at most 0.5 s, a redraw
at most 16 ms. Needs chromium (Debian: apt-get install chromium); the browser draws in software, as it does without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fsdptrace.analysis import load
from fsdptrace.html import write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

BLOCKS = 47  # two units each, and the root


def unit(number: int, fqn: str, size: int, world: int) -> dict[str, Any]:
    """A group of a `model` line."""
    return {
        "id": number, "fqn": fqn, "unit": number, "modules": [fqn], "params": [], "tensors": 6, "bytes": size,
        "sharded_bytes": size // world, "dtype": "bfloat16", "reduce_dtype": "float32", "world": world,
        "post_forward_world": world, "replicate_world": 1, "mesh": {"0": world}, "reshard_after_forward": True,
        "auto_policy": False, "trainable": 6, "offload": False,
    }  # fmt: skip


def make(folder: Path, ranks: int, events: int) -> int:
    """Writes a run of a model of 95 units with about so many events; how many there are."""
    names = [""] + [f"model.layers.{i}{part}" for i in range(BLOCKS) for part in ("", ".mlp.experts")]
    per_step = 2 + 13 * (len(names) - 1)
    steps = max(1, round(events / ranks / per_step))
    written = 0
    (folder / "bench").mkdir(parents=True)
    for rank in range(ranks):
        lines = [
            {"schema": "fsdptrace/1", "rank": rank, "world_size": ranks, "local_rank": rank, "role": None, "host": "node",
             "pid": 100 + rank, "run_id": "bench", "run_id_source": "environment", "attempt": 0,
             "versions": {"torch": "2.13.0"}, "options": {"detail": "full"}, "coverage": [],
             "clock": {"perf_counter_ns": 0, "unix_ns": 1_700_000_000_000_000_000}},
            {"kind": "model", "model": 0, "root": "Model", "uncovered": [],
             "units": [{"id": i, "fqn": n, "modules": [n], "groups": [i], "sharded": True} for i, n in enumerate(names)],
             "groups": [unit(i, n, 300 << 20, ranks) for i, n in enumerate(names)]},
        ]  # fmt: skip
        maker = _Maker(lines, rank, ranks)
        for step in range(steps):
            maker.step(step, range(1, len(names)))
        written += maker.seq
        lines.append({"kind": "end", "events": maker.seq, "dropped": 0, "violations": 0, "t": maker.now})
        path = folder / "bench" / f"rank{rank:05d}.node-{100 + rank}.jsonl"
        path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return written


class _Maker:
    """Events of one rank: forward and backward over all units, each gathered twice and prefetched in backward."""

    def __init__(self, lines: list[dict[str, Any]], rank: int, ranks: int) -> None:
        self.ranks = ranks
        self.lines, self.seq, self.now, self.step_number = lines, 0, 1_000_000 + 777 * rank, 0

    def event(self, kind: str, group: int | None, pass_: str, wide: int, **data: Any) -> None:
        self.seq += 1
        self.now += 3_000 + 911 * (self.seq % 7)
        line = {"seq": self.seq, "kind": kind, "pass": pass_, "group": group, "t0": self.now, "t1": self.now + wide,
                "step": self.step_number, **data}  # fmt: skip
        self.lines.append({key: value for key, value in line.items() if value is not None})
        self.now += wide

    def step(self, number: int, groups: range) -> None:
        self.step_number = number
        begin = len(self.lines)
        size = {"bytes": 300 << 20}
        for group in groups:
            self.event("unshard", group, "forward", 20_000, **size)
            self.event("wait", group, "forward", 9_000, **size)
            self.event("pre_forward", group, "forward", 4_000)
            self.now += 1_500_000
            self.event("reshard", group, "forward", 5_000, **size)
            self.event("post_forward", group, "forward", 3_000)
        ahead = {"direction": "backward", "mode": "implicit"}
        self.event("unshard", groups[-1], "backward", 20_000, **size)
        for group in reversed(groups):
            self.event("wait", group, "backward", 9_000, **size)
            self.event("pre_backward", group, "backward", 4_000)
            if group > groups[0]:
                self.event("prefetch", group, "backward", 9_000, target=group - 1, **ahead)
                self.event("unshard", group - 1, "backward", 20_000, **size, issuer=group, **ahead)
            self.now += 3_000_000
            self.event(
                "reduce_scatter", group, "backward", 60_000, bytes=600 << 20, dtype="float32", world=self.ranks, tensors=6
            )
            self.event("reshard", group, "backward", 5_000, **size)
            self.event("post_backward", group, "backward", 3_000, tensors=6)
            self.event("param_change", group, "none", 1_000, cause="optimizer_step", tensors=6)
        counts: dict[str, int] = {}
        for line in self.lines[begin:]:
            counts[line["kind"]] = counts.get(line["kind"], 0) + 1
        self.event("step", None, "none", 1_000, unsharded_bytes=0, unsharded_peak=600 << 20, past_backward_bytes=0,
                   dropped=0, counts=counts)  # fmt: skip


def page(folder: Path, events: int) -> None:
    """The HTML page: making it, its first draw, and redraws while zooming and moving."""
    from support.browser import Browser, executable  # type: ignore[import-not-found]

    path = executable()
    if path is None:
        raise SystemExit("no chromium here: install it (Debian: apt-get install chromium) or set TEST_CHROMIUM to its path")
    started = time.perf_counter()
    run = load(folder)
    loaded = time.perf_counter() - started
    target = write(run, folder / "page.html", limit=10 * events)
    made = time.perf_counter() - started - loaded
    print(f"HTML page, {events:,} events: read {loaded:.2f} s, page made {made:.2f} s, {target.stat().st_size / 1e6:.1f} MB")
    browser = Browser(path)
    firsts, redraws, work = [], [], {}
    for _ in range(3):
        shown = browser.page()
        shown.size(1600, 1000)
        shown.open(target)
        shown.wait("window.fsdptrace && fsdptrace.ready")
        shown_events = shown.js("fsdptrace.processes.reduce((sum, p) => sum + p.calls.length, 0)")
        assert shown_events == events, (shown_events, events)
        firsts.append(shown.js("performance.getEntriesByName('fsdptrace-drawn')[0].startTime"))
        redraws += shown.js("""(() => { const t = fsdptrace.timeline, out = [];
            const once = () => { t.draw(); t.painter.g.getImageData(0, 0, 1, 1); };
            t.folded.clear(); t.layout();
            for (let i = 0; i < 60; i++) {
                if (i < 20) t.zoom(0.8); else if (i < 40) t.zoom(1.25); else t.host.scrollTop += 40;
                const start = performance.now(); once(); out.push(performance.now() - start);
            }
            return out; })()""")
        work = shown.js("(() => { const t = fsdptrace.timeline; t.fit(); t.draw(); return t.painter.counts; })()")
        shown.close()
    browser.close()
    redraws.sort()
    print(f"  first draw {min(firsts) / 1000:.2f} s best, {statistics.median(firsts) / 1000:.2f} s median (aim: 0.5 s)")
    print(
        f"  redraw {statistics.median(redraws):.1f} ms median, {redraws[int(0.95 * len(redraws))]:.1f} ms of 95 in 100, "
        f"{redraws[-1]:.1f} ms at most (aim: 16 ms)"
    )
    print(f"  with all of it in sight a redraw looks at {work['spans']:,} spans and draws {work['rects']:,} rectangles")


def perfetto(folder: Path, events: int) -> None:
    """The run as one Perfetto trace, in both formats."""
    from fsdptrace_exporters.perfetto import merge

    run = load(folder)
    for name in ("trace.pftrace", "trace.json.gz"):
        started = time.perf_counter()
        merged = merge(run, folder / name)
        took = time.perf_counter() - started
        assert merged.events == events, (merged.events, events)
        print(
            f"merge to {name}: {merged.slices:,} slices, {took:.2f} s, {events / took:,.0f} events a second, "
            f"{merged.path.stat().st_size / 1e6:.1f} MB"
        )


def main() -> None:
    """Makes a run and times what is drawn of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--events", type=int, default=50_000)
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        events = make(Path(folder), arguments.ranks, arguments.events)
        page(Path(folder), events)
        perfetto(Path(folder), events)


if __name__ == "__main__":
    main()
