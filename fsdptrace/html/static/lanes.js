"use strict";
// The data of the time axis: columns as typed arrays, sorted by begin, and an index by lane for fast drawing.
const BLOCK = 8; // so many spans are passed over at once where they all fall on one pixel

function undelta(column, type = Float64Array) {
  const out = new type(column.length);
  let sum = 0;
  for (let i = 0; i < column.length; i++) out[i] = sum += column[i];
  return out;
}

// A column in which values recur was written as runs: value, how often, value, how often …
function unpack(column) {
  if (!column.runs) return column;
  const out = [];
  for (let i = 0; i < column.runs.length; i += 2) for (let n = column.runs[i + 1]; n > 0; n--) out.push(column.runs[i]);
  return out;
}

// A layer: spans of one kind. Its index is made on first use, since ranks that are folded away need none: `order` lists the
// spans lane by lane (those of a lane from start[lane] on) by begin; `reach` is the latest end so far in the lane, which grows,
// so that the first span that can be seen is found by bisection although calls lie in each other; `longest` is the longest
// span of each block of `order`, `most` that of each lane.
class Layer {
  constructor(columns, lanes, t0 = undelta(columns.t0)) {
    for (const name of Object.keys(columns)) columns[name] = unpack(columns[name]);
    this.t0 = t0;
    const t1 = this.t1 = new Float64Array(columns.dur);
    for (let i = 0; i < t1.length; i++) t1[i] += t0[i];
    this.lane = new Int32Array(columns.lane);
    this.pass = new Uint8Array(columns.pass);
    this.columns = columns;
    this.lanes = lanes;
    this.order = null;
  }

  // Those spans for which `wanted(i)`, as a layer of their own.
  only(wanted) {
    const kept = [];
    for (let i = 0; i < this.length; i++) if (wanted(i)) kept.push(i);
    const column = (values) => kept.map((i) => values[i]);
    return new Layer({ dur: kept.map((i) => this.t1[i] - this.t0[i]), lane: column(this.lane), pass: column(this.pass) }, this.lanes,
      Float64Array.from(kept, (i) => this.t0[i]));
  }

  get length() { return this.t0.length; }

  get end() {
    let end = 0;
    for (let i = 0; i < this.t1.length; i++) if (this.t1[i] > end) end = this.t1[i];
    return end;
  }

  index() {
    const { t0, t1, lane, length } = this;
    const start = this.start = new Int32Array(this.lanes + 1);
    for (let i = 0; i < length; i++) start[lane[i] + 1]++;
    for (let i = 0; i < this.lanes; i++) start[i + 1] += start[i];
    const at = start.slice(), order = this.order = new Int32Array(length);
    for (let i = 0; i < length; i++) order[at[lane[i]]++] = i;
    const reach = this.reach = new Float64Array(length), longest = this.longest = new Float64Array(Math.ceil(length / BLOCK));
    const longestOf = this.most = new Float64Array(this.lanes);
    let most = 0;
    for (let j = 0; j < length; j++) {
      const i = order[j];
      most = j && lane[order[j - 1]] === lane[i] && most > t1[i] ? most : t1[i];
      reach[j] = most;
      const block = j / BLOCK | 0;
      longest[block] = Math.max(longest[block], t1[i] - t0[i]);
      longestOf[lane[i]] = Math.max(longestOf[lane[i]], t1[i] - t0[i]);
    }
  }

  // The first place in the lane's part of `order` whose span, or an earlier one, ends after `time`.
  first(lane, time) {
    if (!this.order) this.index();
    let low = this.start[lane], high = this.start[lane + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.reach[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // The first place from `low` on, before `high`, whose span begins at `time` or later.
  after(time, low, high) {
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.t0[this.order[middle]] >= time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // Calls `each(i, x0, x1)` for the lane's spans in sight; further ones that begin on a pixel already drawn and are shorter
  // than one are left out. How many were looked at, a block that was passed over as one.
  walk(lane, view, each) {
    const { t0, t1 } = this, from = view.t0, to = view.t1, scale = (view.width - GUTTER) / (to - from), pixelWide = 1 / scale;
    let j = this.first(lane, from), drawn = -1, next = -Infinity, seen = 0; // next: when the pixel after the one drawn begins
    const { order, longest } = this, stop = this.start[lane + 1], allShort = this.most[lane] < pixelWide;
    while (j < stop) {
      seen++;
      if (j % BLOCK === 0 && j + BLOCK <= stop && longest[j / BLOCK] < pixelWide && t0[order[j + BLOCK - 1]] < next) {
        j += BLOCK;
        continue;
      }
      const i = order[j++];
      if (t0[i] >= to) break;
      if (t1[i] < from) continue;
      const x0 = Math.max(GUTTER + (t0[i] - from) * scale, GUTTER - 2), x1 = Math.min(GUTTER + (t1[i] - from) * scale, view.width + 2);
      if (x1 - x0 >= 1) {
        each(i, x0, x1);
        continue;
      }
      const pixel = Math.floor(x0);
      if (pixel === drawn) continue;
      drawn = pixel;
      next = from + (pixel + 1 - GUTTER) / scale;
      each(i, pixel, pixel + 1);
      if (allShort) j = this.after(next, j, stop);
    }
    return seen;
  }

  // The innermost span of the lane at `time`, or one that begins or ends within `slack` of it; -1 for none.
  at(lane, time, slack) {
    let best = -1, least = Infinity;
    for (let j = this.first(lane, time - slack); j < this.start[lane + 1]; j++) {
      const i = this.order[j];
      if (this.t0[i] > time + slack) break;
      if (this.t1[i] < time - slack) continue;
      const inside = this.t0[i] <= time && time <= this.t1[i];
      const size = this.t1[i] - this.t0[i] + (inside ? 0 : slack * 2);
      if (size <= least) { least = size; best = i; }
    }
    return best;
  }
}

// The gathered bytes from each moment on, and the most of each block of moments.
class Levels {
  constructor(data) {
    this.t = undelta(data.t);
    this.bytes = undelta(data.bytes);
    this.most = new Float64Array(Math.ceil(this.t.length / BLOCK));
    this.peak = 0;
    for (let j = 0; j < this.t.length; j++) {
      const block = j / BLOCK | 0;
      if (this.bytes[j] > this.most[block]) this.most[block] = this.bytes[j];
      if (this.bytes[j] > this.peak) this.peak = this.bytes[j];
    }
  }

  // Calls `each(x0, x1, bytes)` for the steps of the curve in sight: a pixel in which it changes has the most that it reached.
  // The last level lasts until `end`. How many changes were looked at, a block that falls on one pixel as one.
  walk(view, end, each) {
    const { t, bytes, most } = this, n = t.length, scale = (view.width - GUTTER) / (view.t1 - view.t0);
    let j = Math.max(0, bisect(t, view.t0) - 1), seen = 0, from = 0, to = 0, level = 0; // of what is not handed on yet
    const put = (x0, x1, high) => {
      if (high !== level || x0 !== to) {
        if (to > from) each(from, to, level);
        from = x0;
        level = high;
      }
      to = x1;
    };
    while (j < n && t[j] < view.t1) {
      const pixel = Math.floor(Math.max(GUTTER, GUTTER + (t[j] - view.t0) * scale)), next = view.t0 + (pixel + 1 - GUTTER) / scale;
      let high = 0;
      while (j < n && t[j] < next) {
        seen++;
        if (j % BLOCK === 0 && j + BLOCK <= n && t[j + BLOCK - 1] < next) {
          if (most[j / BLOCK] > high) high = most[j / BLOCK];
          j += BLOCK;
        } else {
          if (bytes[j] > high) high = bytes[j];
          j++;
        }
      }
      put(pixel, pixel + 1, high);
      const until = Math.floor(Math.min(view.width, GUTTER + ((j < n ? t[j] : end) - view.t0) * scale));
      if (until > pixel + 1) put(pixel + 1, until, bytes[j - 1]);
    }
    if (to > from) each(from, to, level);
    return seen;
  }
}

const SEVERITIES = ["error", "warning", "info"];

class ProcessLanes {
  constructor(data, text) {
    this.data = data;
    this.lanes = data.lanes;
    this.rank = data.rank;
    const lanes = data.lanes.length;
    this.calls = new Layer(data.calls, lanes);
    this.seq = undelta(data.calls.seq);
    this.holds = new Layer(data.holds, lanes);
    const { use, end } = data.holds;
    this.wasted = this.holds.only((i) => !use[i] && end[i] !== 0 && end[i] !== 4); // they are seen from however far away
    this.uses = new Layer(data.uses, lanes);
    this.device = new Layer(data.device, lanes);
    this.levels = new Levels(data.levels);
    this.peak = this.levels.peak;
    this.allocated = new Levels(data.allocated);
    this.end = Math.max(this.calls.end, this.holds.end, this.device.end);
    this.title = `${data.role ? data.role + " " : ""}rank ${data.rank}`;
    this.marks = new Marks(data.marks, this.calls, text);
    this.marksByLane = new Map();
    for (const mark of data.marks) {
      const lane = this.calls.lane[mark[0]];
      if (!this.marksByLane.has(lane)) this.marksByLane.set(lane, []);
      this.marksByLane.get(lane).push(mark);
    }
    this.laneMarks = new Map([...this.marksByLane].map(([lane, marks]) => [lane, new Marks(marks, this.calls, text)]));
  }

  // The call that has the number `seq`, -1 when it is not among those shown.
  call(seq) {
    if (!this.bySeq) {
      this.bySeq = new Map();
      this.seq.forEach((value, i) => this.bySeq.set(value, i));
    }
    return this.bySeq.get(seq) ?? -1;
  }

  laneName(lane) {
    const info = this.lanes[lane];
    if (info.stream) return `device: ${info.stream}`;
    if (info.group < 0) return `${info.root}: passes`;
    return info.name || "(root)";
  }
}

// When something was found, and how bad it is; sorted by time, as the calls are.
class Marks {
  constructor(marks, calls, text) {
    this.t = Float64Array.from(marks, (mark) => calls.t0[mark[0]]);
    this.severity = Uint8Array.from(marks, (mark) => {
      const known = SEVERITIES.indexOf(text(mark[1]));
      return known < 0 ? SEVERITIES.length - 1 : known;
    });
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
