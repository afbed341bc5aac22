"use strict";
// The page around the timeline: findings, details, tables; everything of the run is put in as text.
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const text = (number) => DATA.texts[number] ?? "";
const processes = DATA.processes.map((process) => new ProcessLanes(process, text));
let timeline = null, curve = null, match = -1;

// -- top
function head() {
  const run = DATA.run;
  $("label").textContent = run.label;
  const parts = [
    `${run.ranks} of ${run.world_size} rank${run.world_size === 1 ? "" : "s"}`, `${run.steps.toLocaleString("en")} step${run.steps === 1 ? "" : "s"}`,
    `${run.events.toLocaleString("en")} events`, `torch ${run.torch}`, run.folder,
  ];
  $("about").textContent = parts.join(" · ");
}

function findings() {
  const host = $("findings");
  const serious = DATA.findings.filter((finding) => finding.severity !== "info");
  if (!serious.length) {
    const rules = [...DATA.run.rules, ...DATA.run.partly];
    host.append(element("p", { class: rules.length ? "good" : "warn" },
      rules.length ? (DATA.findings.length ? "Nothing wrong found; for information:" : "Nothing found.") : "Nothing was looked for: no rule ran while recording."));
    if (rules.length && !DATA.findings.length) {
      host.append(element("p", { class: "muted" }, `Based on ${rules.length} rules that saw all events: ${rules.join(", ")}`));
    }
  }
  DATA.findings.forEach((finding, number) => host.append(findingCard(finding, number)));
}

function findingCard(finding, number) {
  const first = finding.first;
  const times = [finding.times === 1 ? "once" : `${finding.times.toLocaleString("en")} times`,
    `${finding.unit_count} unit${finding.unit_count === 1 ? "" : "s"}`, finding.ranks_text,
    `step${finding.step_count === 1 ? "" : "s"} ${finding.steps_text}`];
  if (finding.bytes) times.push(`${showBytes(finding.bytes)} each`);
  if (finding.step_bytes > finding.bytes) times.push(`${showBytes(finding.step_bytes)} in one step of one rank`);
  const place = DATA.processes.findIndex((process) => process.place === finding.place);
  const button = element("button", { type: "button", class: "go", id: `finding-${number}` }, "Show in the timeline");
  if (place < 0 || !finding.shown) {
    button.disabled = true;
    button.title = "this event is not among those on the time axis";
  }
  button.addEventListener("click", () => {
    if (timeline.focus(place, first.seq, first.evidence)) {
      chooseRank(place);
      $("timeline-section").scrollIntoView({ block: "start" });
      timeline.host.focus({ preventScroll: true });
    }
  });
  const card = element("div", { class: `card finding ${["error", "warning", "info"].includes(finding.severity) ? finding.severity : ""}` },
    element("div", { class: "head" },
      element("span", { class: "sev" }, finding.severity), element("b", {}, finding.rule), element("span", { class: "name" }, finding.pattern || "(root)"),
      element("span", { class: "grow" }), button),
    element("p", { class: "muted" }, times.join(" · ")),
    element("p", { class: "message" }, first.message));
  if (first.hint) card.append(element("p", { class: "message hintline" }, `What to change: ${first.hint}`));
  card.append(element("p", { class: "muted" }, `first: rank ${first.rank}, step ${first.step}, event ${first.seq} (evidence: ${first.evidence.join(", ") || "–"})`));
  return card;
}

// -- the timeline
function startTimeline() {
  const host = $("timeline");
  if (!processes.length) {
    host.remove();
    $("timeline-section").append(element("p", { class: "warn" },
      "There is no step whose events are all in the files, so there is nothing to draw (see `detail` and `schedule`)."));
    document.querySelectorAll("#timeline-section .bar, #legend, .hint, #memory .bar").forEach((item) => item.remove());
    return;
  }
  timeline = new Timeline(host, processes, DATA.names, {
    onSelect: details, onHover: hover, onView: () => { if (curve) curve.follow(timeline); },
  });
  legend();
  toolbar();
  if (DATA.run.left_out) $("timeline-section").append(element("p", { class: "muted" }, DATA.run.left_out));
  const ranks = $("rank");
  processes.forEach((process, p) => ranks.append(element("option", { value: String(p) }, process.title)));
  ranks.addEventListener("change", () => chooseRank(Number(ranks.value)));
}

function legend() {
  const items = [["--forward", "gathered in forward"], ["--backward", "in backward"], ["--recompute", "in recomputation"], ["--none", "elsewhere"],
    ["--forward-dark", "computing (inner bar)"], ["--error", "never used (red edge)"]];
  if (processes.some((process) => process.device.length)) items.push(["--warning", "compute stands still (device)"]);
  for (const [colour, label] of items) {
    const swatch = element("i");
    swatch.style.background = `var(${colour})`;
    $("legend").append(element("span", {}, swatch, label));
  }
  $("legend").append(element("span", {}, "pale: issued, not waited for yet · marks below a bar: calls · ▾ on a lane: something was found"));
}

function toolbar() {
  const steps = [];
  processes.forEach((process, p) => process.data.steps.forEach(([model, step, from, to]) => steps.push({ p, model, step, from, to })));
  const choices = new Map();
  for (const item of steps) {
    const key = `${item.model}:${item.step}`, known = choices.get(key);
    if (known) { known.from = Math.min(known.from, item.from); known.to = Math.max(known.to, item.to); }
    else choices.set(key, { ...item });
  }
  const several = new Set(steps.map((item) => item.model)).size > 1;
  const select = $("step");
  select.append(element("option", { value: "" }, "go to step …"));
  [...choices].sort(([, a], [, b]) => a.from - b.from).forEach(([key, item]) =>
    select.append(element("option", { value: key }, `step ${item.step}${several ? ` of model ${item.model}` : ""}`)));
  select.addEventListener("change", () => {
    const item = choices.get(select.value);
    if (item) timeline.show(item.from, item.to, 0.02);
  });
  $("zoom-in").addEventListener("click", () => timeline.zoom(0.6));
  $("zoom-out").addEventListener("click", () => timeline.zoom(1 / 0.6));
  $("fit").addEventListener("click", () => timeline.fit());
  $("only").addEventListener("change", () => { timeline.only = $("only").checked; timeline.layout(); });
  $("search").addEventListener("input", () => {
    timeline.search($("search").value);
    match = -1;
    nextMatch(1);
  });
  $("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter") { event.preventDefault(); nextMatch(event.shiftKey ? -1 : 1); }
    if (event.key === "Escape") { $("search").value = ""; timeline.search(""); match = -1; nextMatch(1); }
  });
}

function nextMatch(step) {
  const found = timeline.found || [];
  if (!timeline.query) { $("matches").textContent = ""; return; }
  if (!found.length) { $("matches").textContent = "no unit of that name"; return; }
  match = (match + step + found.length) % found.length;
  const { p, lane } = found[match];
  timeline.reveal(p, lane);
  $("matches").textContent = `${match + 1} of ${found.length}: ${processes[p].laneName(lane)}, ${processes[p].title} (Enter: next)`;
}

function rowsOf({ layer, p, i }) {
  const process = processes[p], spans = process[layer], columns = spans.columns, lane = process.laneName(spans.lane[i]);
  const pass = DATA.names.passes[spans.pass[i]];
  const rows = [["rank", String(process.rank)], ["at", showTime(spans.t0[i])], ["for", showTime(spans.t1[i] - spans.t0[i])]];
  if (layer === "calls") {
    rows.push(["event", String(process.seq[i])], ["step", String(columns.step[i])], ["pass", pass]);
    if (columns.parent[i]) rows.push(["in", describeCall(process, process.call(process.seq[i] - columns.parent[i]))]);
    for (const line of text(columns.text[i]).split("\n")) {
      const cut = line.indexOf(": ");
      if (cut > 0) rows.push([line.slice(0, cut), line.slice(cut + 2)]);
    }
    for (const mark of process.marksByLane.get(spans.lane[i]) || []) {
      if (mark[0] === i) rows.push([`${text(mark[1])} ${text(mark[2])}`, text(mark[3])]);
    }
    return [`${DATA.names.kinds[columns.kind[i]]} of ${lane}`, rows];
  }
  if (layer === "device") {
    const unit = columns.unit[i] >= 0 ? process.laneName(columns.unit[i]) : "", what = process.lanes[spans.lane[i]].stream;
    rows.push(["step", String(columns.step[i])], ["pass", pass], ["call", describeCall(process, process.call(columns.seq[i]))]);
    if (columns.exposed[i] >= 0) rows.push(["exposed", `${showTime(columns.exposed[i])}: compute stood still for it`]);
    return [`${what === STALLS ? `compute stands still for ${unit}` : unit ? `${what} of ${unit}` : `computing (${pass})`}, on the device`, rows];
  }
  if (layer === "uses") return [`${lane} computes (${pass})`, rows];
  const ready = columns.ready[i], end = DATA.names.ends[columns.end[i]];
  rows.push(["bytes", showBytes(columns.bytes[i])], ["gathered in", `${pass} (event ${columns.seq[i] || "before recording"})`]);
  rows.push(["issue to use", ready >= 0 ? showTime(ready) : "never waited for"]);
  if (columns.issuer[i] >= 0) rows.push(["asked for by", process.laneName(columns.issuer[i])]);
  rows.push(["used", columns.use[i] ? `yes (event ${columns.use[i]})` : "no"]);
  rows.push(["freed", { open: "still open at the end", unknown: "not in the files" }[end] || `${end} (event ${columns.end_seq[i]})`]);
  return [`${lane} gathered`, rows];
}

function describeCall(process, i) {
  if (i < 0) return "an event that is not shown";
  return `${DATA.names.kinds[process.calls.columns.kind[i]]} of ${process.laneName(process.calls.lane[i])} (event ${process.seq[i]})`;
}

function details(item) {
  const host = $("details");
  host.hidden = !item;
  if (!item) return;
  const [title, rows] = rowsOf(item);
  host.replaceChildren(element("div", { class: "title" }, title));
  for (const [name, value] of rows) host.append(element("div", { class: "muted" }, name), element("div", { class: "value" }, value));
}

function hover(hit, event) {
  const tip = $("tip");
  tip.hidden = !(hit && (hit.layer || hit.row));
  if (tip.hidden) return;
  if (hit.layer) {
    const [title, rows] = rowsOf(hit);
    tip.textContent = `${title}\n${rows.slice(1).map(([name, value]) => `${name}: ${value}`).join("\n")}`;
  } else {
    const process = processes[hit.row.p];
    tip.textContent = hit.row.type === "rank" ? `${process.title} on ${process.data.host}, pid ${process.data.pid}` : process.laneName(hit.row.lane);
  }
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - box.width - 8)}px`;
  tip.style.top = `${event.clientY + 18 + box.height > window.innerHeight ? event.clientY - box.height - 10 : event.clientY + 18}px`;
}

// -- memory, steps, tables
function chooseRank(p) {
  $("rank").value = String(p);
  if (!curve) return;
  curve.show(p);
  curve.range(timeline.t0, timeline.t1);
}

// First what one looks at first; rest.js has the rest, once that is on the screen.
const begin = window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
document.documentElement.dataset.theme = begin;
head();
findings();
startTimeline();
if (timeline) timeline.draw();
performance.mark("fsdptrace-drawn");
// For whoever looks at the page from outside: tests and benchmarks.
window.fsdptrace = { data: DATA, processes, timeline, ready: false };
