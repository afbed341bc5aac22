"use strict";
// Charts by uPlot: the curve of gathered bytes of one rank, and bytes and times per step.
const PALETTE = ["#4c8df0", "#e0803a", "#3aa676", "#c75bb5", "#b5a22a", "#5bb7c7", "#d0605e", "#8f7be0"];

function axes(x, y) {
  const look = { stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
  return [
    { ...look, values: (_, values) => values.map(x), space: 90 },
    { ...look, values: (_, values) => values.map(y), size: 76, incrs: undefined },
  ];
}

const byteSteps = Array.from({ length: 44 }, (_, power) => 2 ** power);

function chart(host, title, series, data, { x, y, height = 200, bytes = false }) {
  host.replaceChildren();
  const made = new uPlot({
    title, width: Math.max(320, host.clientWidth), height,
    scales: { x: { time: false }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.08 : 1] } },
    axes: axes(x, y).map((axis, i) => (i && bytes ? { ...axis, incrs: byteSteps } : axis)),
    series: [{ label: title.startsWith("Gathered") ? "at" : "step", value: (_, value) => (value == null ? "–" : x(value)) }, ...series],
    cursor: { drag: { x: true, y: false } },
    legend: { live: true },
  }, data, host);
  return made;
}

class Curve {
  constructor(host, processes, onView) {
    this.host = host;
    this.processes = processes;
    this.onView = onView;
    this.rank = 0;
  }

  show(p = this.rank) {
    this.rank = p;
    const process = this.processes[p], { t, bytes } = process.levels, { allocated } = process;
    const range = this.plot ? [this.plot.scales.x.min, this.plot.scales.x.max] : null;
    const stepped = { width: 1.5, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }), value: (_, value) => (value == null ? "–" : showBytes(value)) };
    const series = [{ ...stepped, label: "gathered", stroke: css("--forward-dark"), fill: `${css("--forward")}44` }];
    let data = [t, bytes], title = `Gathered bytes of rank ${process.rank}`;
    if (allocated.t.length) {
      series.push({ ...stepped, label: "allocated", stroke: css("--recompute-dark"), dash: [5, 4] });
      data = uPlot.join([data, [allocated.t, allocated.bytes]]);
      title += ", and what the device's allocator had given out (dashed)";
    }
    this.plot = chart(this.host, title, series, data, { x: showTime, y: showBytes, height: 220, bytes: true });
    if (range && range[0] != null) this.plot.setScale("x", { min: range[0], max: range[1] });
    // A range that is drawn with the mouse moves the timeline too.
    this.plot.hooks.setSelect = [(plot) => {
      if (plot.select.width > 2) this.onView(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"));
    }];
  }

  // Goes where the timeline goes, once that stands still: drawing the curve takes longer than a frame may.
  follow(view) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.range(view.t0, view.t1), 60);
  }

  range(from, to) {
    if (this.plot) this.plot.setScale("x", { min: from, max: to });
  }
}

// One chart over steps; `names` are columns of them, each with a line per rank, or one of the largest of all ranks.
function stepChart(host, title, steps, names, show, bytes) {
  const series = [], data = [];
  names.forEach(({ name, label, dash }) => steps[name].forEach((line, i) => {
    data.push(line);
    series.push({
      label: [label, steps.names[i]].filter(Boolean).join(", "), stroke: PALETTE[i % PALETTE.length], dash, width: 1.5, spanGaps: true,
      points: { show: steps.first.length < 60, size: 5 }, value: (_, value) => (value == null ? "–" : show(value)),
    });
  }));
  const x = (value) => (Number.isInteger(value) ? String(value) : "");
  const all = steps.together > 1 ? `${title}; each point the largest of ${steps.together} steps` : title;
  return chart(host, all, series, [steps.first, ...data], { x, y: show, height: 220, bytes });
}
