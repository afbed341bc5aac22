"use strict";
// Units per rank over time: which rows there are, what part of time is in sight, what is found, selected and marked.
const GUTTER = 250, AXIS = 28, RANK_ROW = 30, PASS_ROW = 24, UNIT_ROW = 20, SHORTEST = 200, STALLS = "compute stands still";

class Timeline {
  constructor(host, processes, names, hooks) {
    this.host = host;
    this.processes = processes;
    this.names = names;
    this.hooks = hooks;
    this.kind = Object.fromEntries(names.kinds.map((name, number) => [name, number]));
    this.inner = element("div");
    this.canvas = element("canvas");
    this.inner.append(this.canvas);
    host.append(this.inner);
    this.query = "";
    this.only = false;
    this.selected = null;
    this.evidence = [];
    this.draws = 0;
    this.lastDraw = 0;
    this.peak = Math.max(1, ...processes.map((process) => process.peak));
    const lanes = processes.reduce((sum, process) => sum + process.lanes.length + 1, 0);
    this.folded = new Set(lanes > 90 ? processes.keys() : []);
    if (this.folded.size) this.folded.delete(0);
    this.end = processes.reduce((end, process) => Math.max(end, process.end), 1);
    this.painter = new Painter(this);
    this.layout();
    this.fit();
    new Controls(this);
  }

  readColours() {
    this.painter.readColours();
    this.invalidate();
  }

  // -- rows and size
  layout() {
    const rows = [];
    let y = AXIS;
    this.places = this.processes.map((process) => new Int32Array(process.lanes.length + 1).fill(-1)); // by lane, the rank's row first
    const add = (row, height) => {
      this.places[row.p][row.lane + 1] = rows.length;
      rows.push({ ...row, y, height });
      y += height;
    };
    this.processes.forEach((process, p) => {
      add({ type: "rank", p, lane: -1 }, RANK_ROW);
      // Only those that were found: side by side, from every rank.
      if (this.folded.has(p) && !(this.only && this.query)) return;
      process.lanes.forEach((info, lane) => {
        const matched = this.matches(process, lane);
        if (this.only && this.query && !matched) return;
        const type = info.stream ? "device" : info.group < 0 ? "passes" : "unit";
        add({ type, p, lane, matched }, type === "passes" ? PASS_ROW : UNIT_ROW);
      });
    });
    this.rows = rows;
    this.content = y + 8;
    this.width = Math.max(GUTTER + 100, this.host.clientWidth);
    this.height = Math.min(this.content, Math.max(260, Math.round(window.innerHeight * 0.66)));
    this.host.style.height = `${this.height + 2}px`;
    this.inner.style.height = `${this.content}px`;
    const ratio = this.ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.invalidate();
  }

  matches(process, lane) {
    return this.query !== "" && process.lanes[lane].group >= 0 && process.laneName(lane).toLowerCase().includes(this.query);
  }

  // -- the view
  fit() { this.show(0, this.end, 0.01); }

  show(from, to, margin = 0) {
    let span = Math.max(to - from, SHORTEST);
    const middle = (from + to) / 2;
    span = Math.min(span * (1 + 2 * margin), this.end * 1.2 + SHORTEST);
    this.t0 = Math.min(Math.max(middle - span / 2, -this.end * 0.1), this.end * 1.1 - span * 0.1);
    this.t1 = this.t0 + span;
    this.hooks.onView(this.t0, this.t1);
    this.invalidate();
  }

  zoom(factor, x = (GUTTER + this.width) / 2) {
    const at = this.timeAt(x);
    const span = Math.min(Math.max((this.t1 - this.t0) * factor, SHORTEST), this.end * 1.2 + SHORTEST);
    const from = at - (at - this.t0) * span / (this.t1 - this.t0);
    this.show(from, from + span);
  }

  pan(pixels) {
    const shift = pixels * (this.t1 - this.t0) / (this.width - GUTTER);
    this.show(this.t0 + shift, this.t1 + shift);
  }

  x(time) { return GUTTER + (time - this.t0) * (this.width - GUTTER) / (this.t1 - this.t0); }

  timeAt(x) { return this.t0 + (x - GUTTER) * (this.t1 - this.t0) / (this.width - GUTTER); }

  // -- finding and showing
  search(text) {
    this.query = text.trim().toLowerCase();
    this.found = [];
    this.processes.forEach((process, p) => process.lanes.forEach((_, lane) => {
      if (this.matches(process, lane)) this.found.push({ p, lane });
    }));
    this.layout();
    return this.found;
  }

  reveal(p, lane) {
    if (this.folded.delete(p)) this.layout();
    let row = this.rowOf(p, lane);
    if (!row && this.only) {
      this.only = false;
      this.layout();
      row = this.rowOf(p, lane);
    }
    if (!row) return;
    const top = this.host.scrollTop + AXIS, bottom = this.host.scrollTop + this.height;
    if (row.y < top || row.y + row.height > bottom) this.host.scrollTop = Math.max(0, row.y - this.height / 3);
    this.invalidate();
  }

  // Moves to the event `seq` of process `p` and marks what proves it. False when it is not among the events shown.
  focus(p, seq, evidence = []) {
    const process = this.processes[p];
    const call = process ? process.call(seq) : -1;
    if (call < 0) return false;
    const calls = process.calls;
    this.evidence = evidence.map((number) => ({ p, i: process.call(number) })).filter((item) => item.i >= 0);
    const ends = [call, ...this.evidence.map((item) => item.i)];
    const from = Math.min(...ends.map((i) => calls.t0[i])), to = Math.max(...ends.map((i) => calls.t1[i]));
    const room = Math.max((to - from) * 0.3, (calls.t1[call] - calls.t0[call]) * 4, 20000);
    this.show(from - room, to + room);
    this.select({ layer: "calls", p, i: call });
    this.reveal(p, calls.lane[call]);
    return true;
  }

  select(item) {
    this.selected = item;
    this.hooks.onSelect(item);
    this.invalidate();
  }

  // What lies under a point of the canvas.
  pick(x, y) {
    const row = this.rowAt(y);
    if (!row) return null;
    if (x < GUTTER || row.type === "rank") return { row };
    const process = this.processes[row.p], time = this.timeAt(x), slack = 3 * (this.t1 - this.t0) / (this.width - GUTTER);
    const inside = y + this.host.scrollTop - row.y;
    const order = row.type === "device" ? ["device"] : row.type === "passes" || inside > row.height - 7 ? ["calls", "uses", "holds"] : ["uses", "holds", "calls"];
    for (const layer of order) {
      const i = process[layer].at(row.lane, time, layer === "calls" || layer === "device" ? slack : 0);
      if (i >= 0) return { row, layer, p: row.p, i };
    }
    return { row };
  }

  rowAt(y) {
    if (y < AXIS) return null;
    const row = this.rows[this.rowAfter(y + this.host.scrollTop)];
    return row && row.y <= y + this.host.scrollTop ? row : null;
  }

  // The number of the first row that ends after `y` of the content; with `begins`, that begins at it or after it.
  rowAfter(y, begins = false) {
    let low = 0, high = this.rows.length;
    while (low < high) {
      const middle = (low + high) >> 1, row = this.rows[middle];
      if (begins ? row.y >= y : row.y + row.height > y) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // The first row in sight, and the steps of its process.
  top() { return this.rows[this.rowAfter(this.host.scrollTop + AXIS)]; }

  steps() {
    const row = this.top();
    return row ? this.processes[row.p].data.steps : [];
  }

  rowOf(p, lane) { return this.rows[this.places[p][lane + 1]]; }

  toggle(p) {
    if (!this.folded.delete(p)) this.folded.add(p);
    this.layout();
  }

  // -- drawing
  invalidate() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => { if (this.pending) this.draw(); });
  }

  draw() {
    this.pending = false;
    const started = performance.now();
    this.painter.draw();
    this.draws++;
    this.lastDraw = performance.now() - started;
  }
}
