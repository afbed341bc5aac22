"use strict";
// Units per rank over time, on one canvas. Drawn are only the lanes in sight, and of what falls on one pixel only the first.
const GUTTER = 250, AXIS = 28, RANK_ROW = 30, PASS_ROW = 24, UNIT_ROW = 20, SHORTEST = 200;
const PASS_COLOUR = ["none", "forward", "backward", "recompute"];

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
    let end = 1;
    for (const process of processes) {
      for (const layer of [process.calls, process.holds]) for (const t of layer.t1) if (t > end) end = t;
    }
    this.end = end;
    this.readColours();
    this.layout();
    this.fit();
    new Controls(this);
  }

  readColours() {
    this.colours = {};
    for (const name of ["bg", "fg", "muted", "line", "strong", "accent", "forward", "forward-dark", "backward", "backward-dark", "recompute",
      "recompute-dark", "none", "none-dark", "pending", "error", "warning", "info", "match", "select", "shade", "tick", "card"]) {
      this.colours[name] = css(`--${name}`);
    }
    this.invalidate();
  }

  // -- rows and size
  layout() {
    const rows = [];
    let y = AXIS;
    const add = (row, height) => { rows.push({ ...row, y, height }); y += height; };
    this.processes.forEach((process, p) => {
      add({ type: "rank", p, lane: -1 }, RANK_ROW);
      if (this.folded.has(p)) return;
      process.lanes.forEach((info, lane) => {
        const matched = this.matches(process, lane);
        if (this.only && this.query && !matched) return;
        add({ type: info.group < 0 ? "passes" : "unit", p, lane, matched }, info.group < 0 ? PASS_ROW : UNIT_ROW);
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
    let row = this.rows.find((item) => item.p === p && item.lane === lane);
    if (!row && this.only) {
      this.only = false;
      this.layout();
      row = this.rows.find((item) => item.p === p && item.lane === lane);
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
    const order = row.type === "passes" || inside > row.height - 7 ? ["calls", "uses", "holds"] : ["uses", "holds", "calls"];
    for (const layer of order) {
      const i = process[layer].at(row.lane, time, layer === "calls" ? slack : 0);
      if (i >= 0) return { row, layer, p: row.p, i };
    }
    return { row };
  }

  rowAt(y) {
    if (y < AXIS) return null;
    const at = y + this.host.scrollTop;
    return this.rows.find((row) => row.y <= at && at < row.y + row.height) || null;
  }

  toggle(p) {
    if (!this.folded.delete(p)) this.folded.add(p);
    this.layout();
  }

  // -- drawing
  invalidate() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => { this.pending = false; this.draw(); });
  }

  draw() {
    const started = performance.now();
    const g = this.g = this.canvas.getContext("2d");
    const c = this.colours;
    g.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    g.fillStyle = c.bg;
    g.fillRect(0, 0, this.width, this.height);
    const scroll = this.host.scrollTop;
    g.save();
    g.beginPath();
    g.rect(0, AXIS, this.width, this.height - AXIS);
    g.clip();
    const seen = this.rows.filter((row) => row.y + row.height > scroll + AXIS && row.y < scroll + this.height);
    for (const row of seen) this.drawBack(row, row.y - scroll);
    this.drawGrid();
    g.save();
    g.beginPath();
    g.rect(GUTTER, AXIS, this.width - GUTTER, this.height - AXIS);
    g.clip();
    for (const row of seen) {
      if (row.type === "rank") this.drawLevels(row, row.y - scroll);
      else if (row.type === "passes") this.drawPasses(row, row.y - scroll);
      else this.drawUnit(row, row.y - scroll);
    }
    for (const row of seen) this.drawMarks(row, row.y - scroll);
    this.drawSelection(scroll);
    g.restore();
    for (const row of seen) this.drawLabel(row, row.y - scroll);
    g.restore();
    this.drawAxis();
    this.draws++;
    this.lastDraw = performance.now() - started;
  }

  drawBack(row, y) {
    const { g, colours: c } = this;
    if (row.type === "rank") {
      g.fillStyle = c.card;
      g.fillRect(0, y, this.width, row.height);
    } else if (row.matched) {
      g.fillStyle = c.match;
      g.fillRect(0, y, this.width, row.height);
    }
    g.fillStyle = c.line;
    g.fillRect(0, y + row.height - 1, this.width, 1);
  }

  drawLabel(row, y) {
    const { g, colours: c } = this;
    const process = this.processes[row.p];
    g.textBaseline = "middle";
    g.fillStyle = row.type === "rank" ? c.fg : row.matched ? c.fg : c.muted;
    g.font = row.type === "rank" ? "600 13px system-ui, sans-serif" : "12px ui-monospace, 'DejaVu Sans Mono', monospace";
    const text = row.type === "rank"
      ? `${this.folded.has(row.p) ? "▸" : "▾"} ${process.title}  ${process.data.host}` : process.laneName(row.lane);
    g.fillText(shorten(g, text, GUTTER - (row.type === "rank" ? 120 : 28)), row.type === "rank" ? 8 : 22, y + row.height / 2);
    if (row.type === "rank" && process.peak) {
      g.font = "11px system-ui, sans-serif";
      g.fillStyle = c.muted;
      g.textAlign = "right";
      g.fillText(`peak ${showBytes(process.peak)}`, GUTTER - 10, y + row.height / 2);
      g.textAlign = "left";
    }
  }

  // Calls `each(i, x0, x1)` for the lane's spans in sight; further ones that begin on a pixel already drawn and are
  // shorter than one are left out.
  spans(layer, lane, each) {
    const list = layer.byLane[lane], { t0, t1 } = layer;
    const scale = (this.width - GUTTER) / (this.t1 - this.t0), from = this.t0, to = this.t1;
    let drawn = -1;
    for (let j = layer.first(lane, from); j < list.length; j++) {
      const i = list[j];
      if (t0[i] >= to) break;
      if (t1[i] < from) continue;
      const x0 = Math.max(GUTTER + (t0[i] - from) * scale, GUTTER - 2);
      const x1 = Math.min(GUTTER + (t1[i] - from) * scale, this.width + 2);
      if (x1 - x0 < 1) {
        const pixel = Math.floor(x0);
        if (pixel === drawn) continue;
        drawn = pixel;
        each(i, pixel, pixel + 1);
      } else each(i, x0, x1);
    }
  }

  drawUnit(row, y) {
    const { g, colours: c } = this;
    const { holds, uses, calls } = this.processes[row.p];
    const scale = (this.width - GUTTER) / (this.t1 - this.t0);
    this.spans(holds, row.lane, (i, x0, x1) => {
      g.fillStyle = c[PASS_COLOUR[holds.pass[i]]];
      g.fillRect(x0, y + 2, x1 - x0, row.height - 6);
      const ready = holds.columns.ready[i];
      const until = ready < 0 ? x1 : Math.min(x1, Math.max(x0, GUTTER + (holds.t0[i] + ready - this.t0) * scale));
      if (until - x0 >= 1) {
        g.fillStyle = c.pending;
        g.fillRect(x0, y + 2, until - x0, row.height - 6);
      }
      if (!holds.columns.use[i] && holds.columns.end[i] !== 0 && holds.columns.end[i] !== 4) {
        g.fillStyle = c.error;
        g.fillRect(x0, y + 2, x1 - x0, 3);
      }
    });
    this.spans(uses, row.lane, (i, x0, x1) => {
      g.fillStyle = c[`${PASS_COLOUR[uses.pass[i]]}-dark`];
      g.fillRect(x0, y + 6, x1 - x0, row.height - 14);
    });
    g.fillStyle = c.tick;
    this.spans(calls, row.lane, (i, x0, x1) => g.fillRect(x0, y + row.height - 4, Math.max(1, x1 - x0 - 0.5), 2));
  }

  drawPasses(row, y) {
    const { g, colours: c, kind } = this;
    const { calls } = this.processes[row.p];
    const colour = {
      [kind.forward]: "forward", [kind.backward]: "backward", [kind.recompute]: "recompute", [kind.region]: "forward-dark",
      [kind.optimizer_step]: "accent", [kind.exception]: "error", [kind.step]: "strong", [kind.prefetch]: "none-dark",
    };
    g.font = "11px system-ui, sans-serif";
    g.textBaseline = "middle";
    this.spans(calls, row.lane, (i, x0, x1) => {
      const number = calls.columns.kind[i], inset = Math.min(calls.columns.depth[i], 3) * 3;
      g.fillStyle = c[colour[number] || "none-dark"];
      g.fillRect(x0, y + 3 + inset, Math.max(x1 - x0, number === kind.exception ? 3 : 1), row.height - 7 - inset * 1.5);
      if (x1 - x0 > 56 && !inset) {
        const name = this.names.kinds[number].replace("_", " ");
        if (g.measureText(name).width < x1 - x0 - 8) {
          g.fillStyle = c.fg;
          g.fillText(name, x0 + 5, y + row.height / 2);
        }
      }
    });
  }

  drawLevels(row, y) {
    const { g, colours: c } = this;
    const { t, bytes } = this.processes[row.p].levels;
    const scale = (row.height - 6) / this.peak, base = y + row.height - 2;
    let j = Math.max(0, bisect(t, this.t0) - 1);
    g.fillStyle = c.forward;
    g.globalAlpha = 0.55;
    let pixel = -1, most = 0;
    const flush = (to) => { if (most > 0 && to > pixel) g.fillRect(pixel, base - most * scale, to - pixel, most * scale); };
    for (; j < t.length && t[j] < this.t1; j++) {
      const x = Math.max(GUTTER, Math.floor(this.x(t[j])));
      if (x > pixel) { flush(x); pixel = x; most = bytes[j]; } else most = Math.max(most, bytes[j]);
    }
    const last = j > 0 ? Math.min(this.width, this.x(Math.min(this.t1, t[Math.min(j, t.length - 1)]))) : 0;
    if (pixel >= 0) flush(j < t.length ? last : Math.min(this.width, this.x(this.end)));
    g.globalAlpha = 1;
  }

  drawMarks(row, y) {
    const { g, colours: c } = this;
    const process = this.processes[row.p];
    const marks = row.type === "rank" ? process.data.marks : process.marksByLane.get(row.lane) || [];
    let drawn = -9;
    for (const [call, severity] of marks) {
      const time = process.calls.t0[call];
      if (time < this.t0 || time > this.t1) continue;
      const x = this.x(time);
      if (Math.abs(x - drawn) < 1) continue;
      drawn = x;
      g.fillStyle = c[this.hooks.text(severity)] || c.info;
      g.beginPath();
      g.moveTo(x - 5, y);
      g.lineTo(x + 5, y);
      g.lineTo(x, y + 9);
      g.fill();
    }
  }

  rowOf(p, lane) { return this.rows.find((row) => row.p === p && row.lane === lane); }

  drawSelection(scroll) {
    const { g, colours: c } = this;
    for (const { p, i } of this.evidence) {
      const calls = this.processes[p].calls, row = this.rowOf(p, calls.lane[i]);
      if (!row) continue;
      const x = this.x(calls.t0[i]);
      g.strokeStyle = c.error;
      g.lineWidth = 1.5;
      g.setLineDash([3, 3]);
      g.beginPath();
      g.moveTo(x, AXIS);
      g.lineTo(x, this.height);
      g.stroke();
      g.setLineDash([]);
      g.beginPath();
      g.arc(x, row.y - scroll + row.height / 2, 6, 0, 2 * Math.PI);
      g.stroke();
    }
    const item = this.selected;
    if (!item) return;
    const process = this.processes[item.p], layer = process[item.layer], row = this.rowOf(item.p, layer.lane[item.i]);
    if (!row) return;
    g.strokeStyle = c.select;
    g.lineWidth = 2;
    const x0 = Math.max(this.x(layer.t0[item.i]), GUTTER - 4), x1 = Math.min(this.x(layer.t1[item.i]), this.width + 4);
    g.strokeRect(x0 - 1, row.y - scroll + 1, Math.max(3, x1 - x0) + 2, row.height - 3);
    const issuer = item.layer === "holds" ? layer.columns.issuer[item.i] : -1;
    const from = issuer >= 0 ? this.rowOf(item.p, issuer) : null;
    if (from) this.drawArrow(this.x(layer.t0[item.i]), from.y - scroll + from.height / 2, row.y - scroll + row.height / 2);
  }

  drawArrow(x, from, to) {
    const { g } = this, down = Math.sign(to - from) || 1;
    g.beginPath();
    g.moveTo(x, from);
    g.lineTo(x, to - down * 4);
    g.moveTo(x - 4, to - down * 8);
    g.lineTo(x, to - down * 3);
    g.lineTo(x + 4, to - down * 8);
    g.stroke();
    g.beginPath();
    g.arc(x, from, 3, 0, 2 * Math.PI);
    g.stroke();
  }

  drawGrid() {
    const { g, colours: c } = this;
    g.fillStyle = c.line;
    for (const time of this.ticks()) g.fillRect(Math.round(this.x(time)), AXIS, 1, this.height);
    g.fillStyle = c.strong;
    for (const { time } of this.boundaries()) g.fillRect(Math.round(this.x(time)), AXIS, 1, this.height);
  }

  drawAxis() {
    const { g, colours: c } = this;
    g.fillStyle = c.bg;
    g.fillRect(0, 0, this.width, AXIS);
    g.fillStyle = c.strong;
    g.fillRect(0, AXIS - 1, this.width, 1);
    g.font = "11px system-ui, sans-serif";
    g.textBaseline = "middle";
    g.fillStyle = c.muted;
    for (const time of this.ticks()) {
      const x = this.x(time);
      if (x >= GUTTER) g.fillText(showTime(time), x + 4, 9);
    }
    let free = GUTTER;
    const steps = this.boundaries().map(({ time, step }) => ({ x: this.x(time), label: `step ${step}` }));
    steps.forEach(({ x, label }, i) => {
      const at = Math.max(x, GUTTER), wide = g.measureText(label).width + 8;
      // The name of the step that the view begins in makes room for one that begins in sight.
      if (at < free || at + wide > this.width || (x < GUTTER && i + 1 < steps.length && steps[i + 1].x < at + wide)) return;
      g.fillStyle = c.fg;
      g.fillText(label, at + 4, 20);
      free = at + wide + 4;
    });
    g.fillStyle = c.muted;
    g.fillText(`${showTime(this.t1 - this.t0)} in sight`, 8, 14);
  }

  ticks() {
    const raw = (this.t1 - this.t0) / Math.max(2, (this.width - GUTTER) / 130), power = 10 ** Math.floor(Math.log10(raw));
    const size = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw) || power * 10;
    const out = [];
    for (let n = Math.ceil(this.t0 / size); n * size <= this.t1; n++) out.push(n * size);
    return out;
  }

  // Begins of steps on the first process in sight; the one that the view begins in counts too.
  boundaries() {
    const scroll = this.host.scrollTop, row = this.rows.find((item) => item.y + item.height > scroll + AXIS);
    if (!row) return [];
    return this.processes[row.p].data.steps.filter((s) => s[2] <= this.t1 && s[3] >= this.t0).map((s) => ({ time: s[2], step: s[1] }));
  }
}

// Mouse, wheel and keys.
class Controls {
  constructor(timeline) {
    const { canvas, host } = timeline;
    let drag = null;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      drag = { x: event.clientX, y: event.clientY, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) {
        timeline.hooks.onHover(timeline.pick(...place(event)), event);
        return;
      }
      const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
      if (!drag.moved && Math.abs(dx) + Math.abs(dy) < 4) return;
      drag.moved = true;
      canvas.classList.add("dragging");
      timeline.hooks.onHover(null, event);
      timeline.pan(-dx);
      host.scrollTop -= dy;
      drag.x = event.clientX;
      drag.y = event.clientY;
    });
    canvas.addEventListener("pointerup", (event) => {
      const moved = drag && drag.moved;
      drag = null;
      canvas.classList.remove("dragging");
      if (moved) return;
      const hit = timeline.pick(...place(event));
      if (!hit) return;
      if (hit.row.type === "rank") timeline.toggle(hit.row.p);
      else if (hit.layer) {
        timeline.evidence = [];
        timeline.select({ layer: hit.layer, p: hit.p, i: hit.i });
      } else timeline.select(null);
    });
    canvas.addEventListener("pointercancel", () => { drag = null; });
    canvas.addEventListener("pointerleave", (event) => timeline.hooks.onHover(null, event));
    canvas.addEventListener("dblclick", (event) => {
      const hit = timeline.pick(...place(event));
      if (hit && hit.layer) {
        const layer = timeline.processes[hit.p][hit.layer];
        timeline.show(layer.t0[hit.i], layer.t1[hit.i], 0.1);
      }
    });
    host.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        timeline.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.008), Math.max(GUTTER, place(event)[0]));
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        timeline.pan(event.deltaX || event.deltaY);
      }
    }, { passive: false });
    host.addEventListener("scroll", () => timeline.invalidate());
    host.addEventListener("keydown", (event) => {
      const step = (timeline.width - GUTTER) / 6;
      const actions = {
        w: () => timeline.zoom(0.7), s: () => timeline.zoom(1 / 0.7), a: () => timeline.pan(-step), d: () => timeline.pan(step),
        ArrowLeft: () => timeline.pan(-step), ArrowRight: () => timeline.pan(step), 0: () => timeline.fit(),
        Escape: () => { timeline.evidence = []; timeline.select(null); },
      };
      const action = actions[event.key];
      if (action && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); action(); }
    });
    new ResizeObserver(() => { if (host.clientWidth !== timeline.width) timeline.layout(); }).observe(host);
  }
}

function bisect(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The end of a name says more than its begin.
function shorten(g, text, room) {
  if (g.measureText(text).width <= room) return text;
  let cut = Math.max(1, text.length - Math.floor(text.length * room / g.measureText(text).width));
  while (cut < text.length && g.measureText(`…${text.slice(cut)}`).width > room) cut++;
  return `…${text.slice(cut)}`;
}
