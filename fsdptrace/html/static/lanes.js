"use strict";
// The data of the time axis: columns as typed arrays, sorted by begin, and one index per lane for fast drawing.
function undelta(column, type = Float64Array) {
  const out = new type(column.length);
  let sum = 0;
  for (let i = 0; i < column.length; i++) out[i] = sum += column[i];
  return out;
}

// A layer: spans of one kind. `byLane[lane]` lists their numbers by begin; `reach[lane]` the latest end so far, which
// grows along the list, so that the first span that can be seen is found by bisection although calls lie in each other.
class Layer {
  constructor(columns, lanes) {
    this.t0 = undelta(columns.t0);
    this.t1 = new Float64Array(this.t0.length);
    for (let i = 0; i < this.t0.length; i++) this.t1[i] = this.t0[i] + columns.dur[i];
    this.lane = Int32Array.from(columns.lane);
    this.pass = Uint8Array.from(columns.pass);
    this.columns = columns;
    const sizes = new Int32Array(lanes + 1);
    for (const lane of this.lane) sizes[lane]++;
    this.byLane = Array.from({ length: lanes }, (_, lane) => new Int32Array(sizes[lane]));
    const at = new Int32Array(lanes);
    for (let i = 0; i < this.lane.length; i++) this.byLane[this.lane[i]][at[this.lane[i]]++] = i;
    this.reach = this.byLane.map((list) => {
      const out = new Float64Array(list.length);
      let most = -Infinity;
      for (let j = 0; j < list.length; j++) out[j] = most = Math.max(most, this.t1[list[j]]);
      return out;
    });
  }

  get length() { return this.t0.length; }

  // The first place in the lane's list whose span, or an earlier one, ends after `time`; not before `from`.
  first(lane, time, from = 0) {
    const reach = this.reach[lane];
    let low = from, high = reach.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (reach[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // The innermost span of the lane at `time`, or one that begins or ends within `slack` of it; -1 for none.
  at(lane, time, slack) {
    const list = this.byLane[lane];
    let best = -1, least = Infinity;
    for (let j = this.first(lane, time - slack); j < list.length && this.t0[list[j]] <= time + slack; j++) {
      const i = list[j];
      if (this.t1[i] < time - slack) continue;
      const inside = this.t0[i] <= time && time <= this.t1[i];
      const size = this.t1[i] - this.t0[i] + (inside ? 0 : slack * 2);
      if (size <= least) { least = size; best = i; }
    }
    return best;
  }
}

class ProcessLanes {
  constructor(data) {
    this.data = data;
    this.lanes = data.lanes;
    this.rank = data.rank;
    const lanes = data.lanes.length;
    this.calls = new Layer(data.calls, lanes);
    this.seq = undelta(data.calls.seq);
    this.holds = new Layer(data.holds, lanes);
    this.uses = new Layer(data.uses, lanes);
    this.levels = { t: undelta(data.levels.t), bytes: undelta(data.levels.bytes) };
    this.peak = this.levels.bytes.reduce((most, value) => Math.max(most, value), 0);
    this.title = `${data.role ? data.role + " " : ""}rank ${data.rank}`;
    this.marksByLane = new Map();
    for (const mark of data.marks) {
      const lane = this.calls.lane[mark[0]];
      if (!this.marksByLane.has(lane)) this.marksByLane.set(lane, []);
      this.marksByLane.get(lane).push(mark);
    }
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
    if (info.group < 0) return `${info.root}: passes`;
    return info.name || "(root)";
  }
}
