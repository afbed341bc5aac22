"use strict";
// Draws the timeline. Drawn are only the lanes in sight, and of what falls on one pixel only the first. A frame makes no objects
// that the next one could not use again: rectangles are gathered by colour in arrays that stay, and names are measured once.
const COLOURS = ["bg", "fg", "muted", "line", "strong", "accent", "forward", "forward-dark", "backward", "backward-dark", "recompute",
  "recompute-dark", "none", "none-dark", "pending", "error", "warning", "info", "match", "select", "tick", "card"];
const PASS_COLOUR = ["none", "forward", "backward", "recompute"], PASS_DARK = PASS_COLOUR.map((name) => `${name}-dark`);
const CALL_COLOUR = {
  forward: "forward", backward: "backward", recompute: "recompute", region: "forward-dark", optimizer_step: "accent",
  exception: "error", step: "strong",
};
const STRONG = new Set(["accent", "error", "forward-dark", "none-dark"]); // text on these is in the colour of the page
const SMALL = "11px system-ui, sans-serif", MONO = "12px ui-monospace, 'DejaVu Sans Mono', monospace", BOLD = "600 13px system-ui, sans-serif";

// Rectangles of one colour, x, y, width, height each; `layer` orders them: what is drawn above what.
class Rects {
  constructor(colour) {
    this.colour = colour;
    this.values = new Float64Array(1024);
    this.length = 0;
  }

  put(x, y, width, height) {
    if (this.length + 4 > this.values.length) {
      const more = new Float64Array(this.values.length * 2);
      more.set(this.values);
      this.values = more;
    }
    const { values } = this;
    let at = this.length;
    values[at++] = x;
    values[at++] = y;
    values[at++] = width;
    values[at++] = height;
    this.length = at;
  }

  flush(g, colours) {
    if (!this.length) return 0;
    const { values, length } = this;
    g.fillStyle = colours[this.colour];
    for (let i = 0; i < length; i += 4) g.fillRect(values[i], values[i + 1], values[i + 2], values[i + 3]);
    this.length = 0;
    return length / 4;
  }
}

class Painter {
  constructor(view) {
    this.view = view;
    this.names = new Names();
    this.labels = new Labels(view, this.names);
    this.counts = { spans: 0, rects: 0, labels: 0 }; // work of the last frame
    this.levels = new Rects("forward");
    this.held = PASS_COLOUR.map((name) => new Rects(name));
    this.pending = new Rects("pending");
    this.unused = new Rects("error");
    this.used = PASS_DARK.map((name) => new Rects(name));
    this.stalls = new Rects("warning");
    this.ticks = new Rects("tick");
    // From below to above. Lanes do not reach into each other, so that one order serves all of them.
    this.batches = [this.levels, ...this.held, this.pending, this.unused, ...this.used, this.stalls, this.ticks];
    this.callColour = view.names.kinds.map((name) => CALL_COLOUR[name] || "none-dark");
    this.callName = view.names.kinds.map((name) => name.replace("_", " "));
    this.readColours();
    this.eachOf();
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    this.colours = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.labels.forget();
  }

  draw() {
    const { view, counts, colours: c } = this, g = this.g = this.g || view.canvas.getContext("2d");
    counts.spans = counts.rects = 0;
    const scroll = this.scroll = view.host.scrollTop;
    const from = view.rowAfter(scroll + AXIS), to = view.rowAfter(scroll + view.height, true);
    g.setTransform(view.ratio, 0, 0, view.ratio, 0, 0);
    g.fillStyle = c.bg;
    g.fillRect(0, 0, view.width, view.height);
    for (let i = from; i < to; i++) this.drawBack(view.rows[i], view.rows[i].y - scroll);
    this.drawGrid();
    g.save();
    g.beginPath();
    g.rect(GUTTER, AXIS, view.width - GUTTER, view.height - AXIS);
    g.clip();
    for (let i = from; i < to; i++) this.gather(view.rows[i]);
    for (const batch of this.batches) {
      g.globalAlpha = batch === this.levels ? 0.55 : 1;
      counts.rects += batch.flush(g, c);
    }
    g.textBaseline = "middle";
    g.font = SMALL;
    for (let i = from; i < to; i++) if (view.rows[i].type === "passes") this.drawPasses(view.rows[i]);
    for (let severity = SEVERITIES.length - 1; severity >= 0; severity--) this.drawMarks(from, to, severity);
    this.drawSelection(scroll);
    g.restore();
    counts.labels = this.labels.draw(g, scroll, from, to, c);
    this.drawAxis();
  }

  drawBack(row, y) {
    const { g, colours: c } = this;
    if (row.type === "rank" || row.matched) {
      g.fillStyle = row.matched ? c.match : c.card;
      g.fillRect(0, y, this.view.width, row.height);
    }
    g.fillStyle = c.line;
    g.fillRect(0, y + row.height - 1, this.view.width, 1);
  }

  // What is done with each span: made once, and told by `row`, `y` and `process` which lane it is.
  eachOf() {
    const { view } = this;
    this.putLevel = (x0, x1, bytes) => {
      const high = bytes * (this.row.height - 6) / view.peak;
      if (high > 0) this.levels.put(x0, this.y + this.row.height - 2 - high, x1 - x0, high);
    };
    this.putHold = (i, x0, x1) => {
      const { holds } = this.process, high = this.row.height - 6;
      this.held[holds.pass[i]].put(x0, this.y + 2, x1 - x0, high);
      const ready = holds.columns.ready[i];
      const until = ready < 0 ? x1 : Math.min(x1, Math.max(x0, view.x(holds.t0[i] + ready)));
      if (until - x0 >= 1) this.pending.put(x0, this.y + 2, until - x0, high);
    };
    this.putUnused = (i, x0, x1) => this.unused.put(x0, this.y + 2, x1 - x0, 3);
    this.putUse = (i, x0, x1) => this.used[this.process.uses.pass[i]].put(x0, this.y + 6, x1 - x0, this.row.height - 14);
    const quiet = view.kind.param_change; // has the times of its optimizer's step
    this.putCall = (i, x0, x1) => {
      if (this.process.calls.columns.kind[i] !== quiet) this.ticks.put(x0, this.y + this.row.height - 4, Math.max(1, x1 - x0 - 0.5), 2);
    };
    this.putDevice = (i, x0, x1) => {
      const { device } = this.process, stream = this.process.lanes[this.row.lane].stream;
      const batch = stream === STALLS ? this.stalls : stream === "compute" ? this.used[device.pass[i]] : this.held[device.pass[i]];
      batch.put(x0, this.y + 3, x1 - x0, this.row.height - 7);
    };
    this.putPass = (i, x0, x1) => this.drawPass(i, x0, x1);
  }

  at(row) {
    this.row = row;
    this.y = row.y - this.scroll;
    this.process = this.view.processes[row.p];
  }

  gather(row) {
    this.at(row);
    const { process, counts, view } = this;
    if (row.type === "rank") counts.spans += process.levels.walk(view, view.end, this.putLevel);
    else if (row.type === "device") counts.spans += process.device.walk(row.lane, view, this.putDevice);
    else if (row.type === "unit") {
      counts.spans += process.holds.walk(row.lane, view, this.putHold) + process.wasted.walk(row.lane, view, this.putUnused)
        + process.uses.walk(row.lane, view, this.putUse) + process.calls.walk(row.lane, view, this.putCall);
    }
  }

  drawPasses(row) {
    this.at(row);
    this.counts.spans += this.process.calls.walk(row.lane, this.view, this.putPass);
  }

  // Calls lie in each other, so that each is drawn when its turn comes.
  drawPass(i, x0, x1) {
    const { g, row, y, colours: c } = this, { calls } = this.process;
    const number = calls.columns.kind[i], inset = Math.min(calls.columns.depth[i], 3) * 3;
    g.fillStyle = c[this.callColour[number]];
    g.fillRect(x0, y + 3 + inset, Math.max(x1 - x0, number === this.view.kind.exception ? 3 : 1), row.height - 7 - inset * 1.5);
    this.counts.rects++;
    if (x1 - x0 > 56 && !inset && this.names.width(g, this.callName[number]) < x1 - x0 - 8) {
      g.fillStyle = STRONG.has(this.callColour[number]) ? c.bg : c.fg;
      g.fillText(this.callName[number], x0 + 5, y + row.height / 2);
    }
  }

  // The marks of one severity, all of them as one path; the worst are drawn last. One per pixel.
  drawMarks(from, to, severity) {
    const { g, view } = this;
    let any = false;
    for (let r = from; r < to; r++) {
      const row = view.rows[r], process = view.processes[row.p];
      const marks = row.type === "rank" ? process.marks : process.laneMarks.get(row.lane);
      if (!marks || !marks.t.length) continue;
      const y = row.y - this.scroll, pixel = (view.t1 - view.t0) / (view.width - GUTTER);
      let next = -Infinity;
      for (let j = bisect(marks.t, view.t0 - 1); j < marks.t.length && marks.t[j] <= view.t1; j++) {
        if (marks.severity[j] !== severity || marks.t[j] < next) continue;
        next = marks.t[j] + pixel;
        if (!any) g.beginPath();
        any = true;
        const x = view.x(marks.t[j]);
        g.moveTo(x - 5, y);
        g.lineTo(x + 5, y);
        g.lineTo(x, y + 9);
      }
    }
    if (!any) return;
    g.fillStyle = this.colours[SEVERITIES[severity]];
    g.fill();
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
    const { g, view, colours: c } = this, size = this.tickSize();
    g.fillStyle = c.line;
    for (let n = Math.ceil(view.t0 / size); n * size <= view.t1; n++) g.fillRect(Math.round(view.x(n * size)), AXIS, 1, view.height);
    g.fillStyle = c.strong;
    for (const [, , begin, end] of view.steps()) {
      if (begin <= view.t1 && end >= view.t0) g.fillRect(Math.round(view.x(begin)), AXIS, 1, view.height);
    }
  }

  drawAxis() {
    const { g, view, colours: c } = this;
    g.fillStyle = c.bg;
    g.fillRect(0, 0, view.width, AXIS);
    g.fillStyle = c.strong;
    g.fillRect(0, AXIS - 1, view.width, 1);
    g.font = SMALL;
    g.textBaseline = "middle";
    g.fillStyle = c.muted;
    const size = this.tickSize();
    for (let n = Math.ceil(view.t0 / size); n * size <= view.t1; n++) {
      const x = view.x(n * size);
      if (x >= GUTTER) g.fillText(showTime(n * size), x + 4, 9);
    }
    this.drawSteps();
    // Whose lanes these are, once the row that says so is scrolled away.
    const top = view.top(), above = top && top.type !== "rank" ? `${view.processes[top.p].title}, ` : "";
    g.fillStyle = above ? c.fg : c.muted;
    g.fillText(`${above}${showTime(view.t1 - view.t0)} in sight`, 8, 14);
  }

  // Begins of steps on the first process in sight; the one that the view begins in counts too.
  drawSteps() {
    const { g, view } = this, steps = view.steps();
    g.fillStyle = this.colours.fg;
    let free = GUTTER;
    for (let i = 0; i < steps.length; i++) {
      const [, step, begin, end] = steps[i];
      if (begin > view.t1 || end < view.t0) continue;
      const x = view.x(begin), at = Math.max(x, GUTTER);
      if (at < free) continue;
      const label = `step ${step}`, wide = this.names.width(g, label) + 8, next = i + 1 < steps.length ? view.x(steps[i + 1][2]) : Infinity;
      // The name of the step that the view begins in makes room for one that begins in sight.
      if (at + wide > view.width || (x < GUTTER && next < at + wide)) continue;
      g.fillText(label, at + 4, 20);
      free = at + wide + 4;
    }
  }

  // A round number of ns between two lines of the grid.
  tickSize() {
    const { view } = this, raw = (view.t1 - view.t0) / Math.max(2, (view.width - GUTTER) / 130), power = 10 ** Math.floor(Math.log10(raw));
    return raw <= power ? power : raw <= 2 * power ? 2 * power : raw <= 5 * power ? 5 * power : 10 * power;
  }
}
