"use strict";
// Draws the timeline. Drawn are only the lanes in sight, and of what falls on one pixel only the first.
const COLOURS = ["bg", "fg", "muted", "line", "strong", "accent", "forward", "forward-dark", "backward", "backward-dark", "recompute",
  "recompute-dark", "none", "none-dark", "pending", "error", "warning", "info", "match", "select", "tick", "card"];
const PASS_COLOUR = ["none", "forward", "backward", "recompute"];

class Painter {
  constructor(view) {
    this.view = view;
    this.readColours();
  }

  readColours() {
    this.colours = Object.fromEntries(COLOURS.map((name) => [name, css(`--${name}`)]));
  }

  draw() {
    const g = this.g = this.view.canvas.getContext("2d");
    const c = this.colours;
    g.setTransform(this.view.ratio, 0, 0, this.view.ratio, 0, 0);
    g.fillStyle = c.bg;
    g.fillRect(0, 0, this.view.width, this.view.height);
    const scroll = this.view.host.scrollTop;
    g.save();
    g.beginPath();
    g.rect(0, AXIS, this.view.width, this.view.height - AXIS);
    g.clip();
    const seen = this.view.rows.filter((row) => row.y + row.height > scroll + AXIS && row.y < scroll + this.view.height);
    for (const row of seen) this.drawBack(row, row.y - scroll);
    this.drawGrid();
    g.save();
    g.beginPath();
    g.rect(GUTTER, AXIS, this.view.width - GUTTER, this.view.height - AXIS);
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
  }

  drawBack(row, y) {
    const { g, colours: c } = this;
    if (row.type === "rank") {
      g.fillStyle = c.card;
      g.fillRect(0, y, this.view.width, row.height);
    } else if (row.matched) {
      g.fillStyle = c.match;
      g.fillRect(0, y, this.view.width, row.height);
    }
    g.fillStyle = c.line;
    g.fillRect(0, y + row.height - 1, this.view.width, 1);
  }

  drawLabel(row, y) {
    const { g, colours: c } = this;
    const process = this.view.processes[row.p];
    g.textBaseline = "middle";
    g.fillStyle = row.type === "rank" ? c.fg : row.matched ? c.fg : c.muted;
    g.font = row.type === "rank" ? "600 13px system-ui, sans-serif" : "12px ui-monospace, 'DejaVu Sans Mono', monospace";
    const text = row.type === "rank"
      ? `${this.view.folded.has(row.p) ? "▸" : "▾"} ${process.title}  ${process.data.host}` : process.laneName(row.lane);
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
    const scale = (this.view.width - GUTTER) / (this.view.t1 - this.view.t0), from = this.view.t0, to = this.view.t1;
    let drawn = -1;
    for (let j = layer.first(lane, from); j < list.length; j++) {
      const i = list[j];
      if (t0[i] >= to) break;
      if (t1[i] < from) continue;
      const x0 = Math.max(GUTTER + (t0[i] - from) * scale, GUTTER - 2);
      const x1 = Math.min(GUTTER + (t1[i] - from) * scale, this.view.width + 2);
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
    const { holds, uses, calls } = this.view.processes[row.p];
    const scale = (this.view.width - GUTTER) / (this.view.t1 - this.view.t0);
    this.spans(holds, row.lane, (i, x0, x1) => {
      g.fillStyle = c[PASS_COLOUR[holds.pass[i]]];
      g.fillRect(x0, y + 2, x1 - x0, row.height - 6);
      const ready = holds.columns.ready[i];
      const until = ready < 0 ? x1 : Math.min(x1, Math.max(x0, GUTTER + (holds.t0[i] + ready - this.view.t0) * scale));
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
    const quiet = this.view.kind.param_change; // has the times of its optimizer's step
    this.spans(calls, row.lane, (i, x0, x1) => calls.columns.kind[i] === quiet || g.fillRect(x0, y + row.height - 4, Math.max(1, x1 - x0 - 0.5), 2));
  }

  drawPasses(row, y) {
    const { g, colours: c } = this, { kind } = this.view;
    const { calls } = this.view.processes[row.p];
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
        const name = this.view.names.kinds[number].replace("_", " ");
        if (g.measureText(name).width < x1 - x0 - 8) {
          g.fillStyle = c.fg;
          g.fillText(name, x0 + 5, y + row.height / 2);
        }
      }
    });
  }

  drawLevels(row, y) {
    const { g, colours: c } = this;
    const { t, bytes } = this.view.processes[row.p].levels;
    const scale = (row.height - 6) / this.view.peak, base = y + row.height - 2;
    let j = Math.max(0, bisect(t, this.view.t0) - 1);
    g.fillStyle = c.forward;
    g.globalAlpha = 0.55;
    let pixel = -1, most = 0;
    const flush = (to) => { if (most > 0 && to > pixel) g.fillRect(pixel, base - most * scale, to - pixel, most * scale); };
    for (; j < t.length && t[j] < this.view.t1; j++) {
      const x = Math.max(GUTTER, Math.floor(this.view.x(t[j])));
      if (x > pixel) { flush(x); pixel = x; most = bytes[j]; } else most = Math.max(most, bytes[j]);
    }
    const last = j > 0 ? Math.min(this.view.width, this.view.x(Math.min(this.view.t1, t[Math.min(j, t.length - 1)]))) : 0;
    if (pixel >= 0) flush(j < t.length ? last : Math.min(this.view.width, this.view.x(this.view.end)));
    g.globalAlpha = 1;
  }

  drawMarks(row, y) {
    const { g, colours: c } = this;
    const process = this.view.processes[row.p];
    const marks = row.type === "rank" ? process.data.marks : process.marksByLane.get(row.lane) || [];
    let drawn = -9;
    for (const [call, severity] of marks) {
      const time = process.calls.t0[call];
      if (time < this.view.t0 || time > this.view.t1) continue;
      const x = this.view.x(time);
      if (Math.abs(x - drawn) < 1) continue;
      drawn = x;
      g.fillStyle = c[this.view.hooks.text(severity)] || c.info;
      g.beginPath();
      g.moveTo(x - 5, y);
      g.lineTo(x + 5, y);
      g.lineTo(x, y + 9);
      g.fill();
    }
  }

  drawSelection(scroll) {
    const { g, colours: c } = this;
    for (const { p, i } of this.view.evidence) {
      const calls = this.view.processes[p].calls, row = this.view.rowOf(p, calls.lane[i]);
      if (!row) continue;
      const x = this.view.x(calls.t0[i]);
      g.strokeStyle = c.error;
      g.lineWidth = 1.5;
      g.setLineDash([3, 3]);
      g.beginPath();
      g.moveTo(x, AXIS);
      g.lineTo(x, this.view.height);
      g.stroke();
      g.setLineDash([]);
      g.beginPath();
      g.arc(x, row.y - scroll + row.height / 2, 6, 0, 2 * Math.PI);
      g.stroke();
    }
    const item = this.view.selected;
    if (!item) return;
    const process = this.view.processes[item.p], layer = process[item.layer], row = this.view.rowOf(item.p, layer.lane[item.i]);
    if (!row) return;
    g.strokeStyle = c.select;
    g.lineWidth = 2;
    const x0 = Math.max(this.view.x(layer.t0[item.i]), GUTTER - 4), x1 = Math.min(this.view.x(layer.t1[item.i]), this.view.width + 4);
    g.strokeRect(x0 - 1, row.y - scroll + 1, Math.max(3, x1 - x0) + 2, row.height - 3);
    const issuer = item.layer === "holds" ? layer.columns.issuer[item.i] : -1;
    const from = issuer >= 0 ? this.view.rowOf(item.p, issuer) : null;
    if (from) this.drawArrow(this.view.x(layer.t0[item.i]), from.y - scroll + from.height / 2, row.y - scroll + row.height / 2);
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
    for (const time of this.ticks()) g.fillRect(Math.round(this.view.x(time)), AXIS, 1, this.view.height);
    g.fillStyle = c.strong;
    for (const { time } of this.boundaries()) g.fillRect(Math.round(this.view.x(time)), AXIS, 1, this.view.height);
  }

  drawAxis() {
    const { g, colours: c } = this;
    g.fillStyle = c.bg;
    g.fillRect(0, 0, this.view.width, AXIS);
    g.fillStyle = c.strong;
    g.fillRect(0, AXIS - 1, this.view.width, 1);
    g.font = "11px system-ui, sans-serif";
    g.textBaseline = "middle";
    g.fillStyle = c.muted;
    for (const time of this.ticks()) {
      const x = this.view.x(time);
      if (x >= GUTTER) g.fillText(showTime(time), x + 4, 9);
    }
    let free = GUTTER;
    const steps = this.boundaries().map(({ time, step }) => ({ x: this.view.x(time), label: `step ${step}` }));
    steps.forEach(({ x, label }, i) => {
      const at = Math.max(x, GUTTER), wide = g.measureText(label).width + 8;
      // The name of the step that the view begins in makes room for one that begins in sight.
      if (at < free || at + wide > this.view.width || (x < GUTTER && i + 1 < steps.length && steps[i + 1].x < at + wide)) return;
      g.fillStyle = c.fg;
      g.fillText(label, at + 4, 20);
      free = at + wide + 4;
    });
    // Whose lanes these are, once the row that says so is scrolled away.
    const top = this.view.top(), above = top && top.type !== "rank" ? `${this.view.processes[top.p].title}, ` : "";
    g.fillStyle = above ? c.fg : c.muted;
    g.fillText(`${above}${showTime(this.view.t1 - this.view.t0)} in sight`, 8, 14);
  }

  ticks() {
    const raw = (this.view.t1 - this.view.t0) / Math.max(2, (this.view.width - GUTTER) / 130), power = 10 ** Math.floor(Math.log10(raw));
    const size = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw) || power * 10;
    const out = [];
    for (let n = Math.ceil(this.view.t0 / size); n * size <= this.view.t1; n++) out.push(n * size);
    return out;
  }

  // Begins of steps on the first process in sight; the one that the view begins in counts too.
  boundaries() {
    const row = this.view.top();
    if (!row) return [];
    return this.view.processes[row.p].data.steps.filter((s) => s[2] <= this.view.t1 && s[3] >= this.view.t0).map((s) => ({ time: s[2], step: s[1] }));
  }
}

// The end of a name says more than its begin.
function shorten(g, text, room) {
  if (g.measureText(text).width <= room) return text;
  let cut = Math.max(1, text.length - Math.floor(text.length * room / g.measureText(text).width));
  while (cut < text.length && g.measureText(`…${text.slice(cut)}`).width > room) cut++;
  return `…${text.slice(cut)}`;
}
