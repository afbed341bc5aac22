"use strict";
// What lies below the timeline: charts, peaks, tables, what it is all based on.
function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
  if (timeline) timeline.readColours();
  drawCharts();
}

function startCurve() {
  if (timeline) curve = new Curve($("curve"), processes, (from, to) => timeline.show(from, to));
}

function drawCharts() {
  if (curve) { curve.show(); curve.range(timeline.t0, timeline.t1); }
  const steps = DATA.steps;
  if (steps.first.length > 1) {
    stepChart($("step-bytes"), "Peak of gathered bytes, and past their backward (dashed)", steps,
      [{ name: "unsharded_peak", label: "" }, { name: "past_backward_peak", label: "past backward", dash: [4, 4] }], showBytes, true);
    stepChart($("step-times"), "Time of a step", steps, [{ name: "duration_ns", label: "" }], showTime, false);
  } else $("steps").hidden = true;
}

function memory() {
  for (const model of DATA.memory) {
    const host = $("peaks");
    const where = model.peak ? ` (rank ${model.rank}, step ${model.step}${model.seq ? `, event ${model.seq}` : ""})` : "";
    host.append(element("h3", {}, `Most at one time in ${model.root}: ${showBytes(model.peak)}${where}`));
    host.append(element("p", { class: model.past_backward_peak ? "warn" : "muted" },
      `at the end ${showBytes(model.now)}; past their backward at most ${showBytes(model.past_backward_peak)}`
      + (model.past_backward ? `, ${showBytes(model.past_backward)} still at the end of the last step` : "")));
    if (!model.units.length) continue;
    const most = model.units[0][1] || 1;
    const list = element("table", {}, element("tbody", {}, ...model.units.map(([name, bytes]) => {
      const share = element("span", { class: "share" });
      share.style.width = `${Math.max(2, 260 * bytes / most)}px`;
      const cell = element("td", {}, share, showBytes(bytes));
      cell.style.textAlign = "left";
      return element("tr", {}, element("td", { class: "name" }, name || "(root)"), cell);
    })));
    host.append(list);
    if (model.more_units) host.append(element("p", { class: "muted" }, `and ${model.more_units} more`));
  }
}

const TEXTS = new Set(["name", "text"]), MANY_ROWS = 200; // of more rows, the first ones until somebody asks

function table(data) {
  const body = element("tbody");
  const rows = data.rows.map((cells, i) => ({ cells, marked: data.marked[i] }));
  let shown = MANY_ROWS;
  const more = element("button", { type: "button" });
  more.addEventListener("click", () => { shown = Infinity; fill(); });
  const fill = () => {
    more.hidden = rows.length <= shown;
    more.textContent = `Show all ${rows.length.toLocaleString("en")} rows`;
    body.replaceChildren(...rows.slice(0, shown).map(({ cells, marked }) => element("tr", { class: marked ? "marked" : "" },
    ...cells.map((cell, i) => element("td", { class: data.columns[i].type === "name" ? "name" : TEXTS.has(data.columns[i].type) ? "text" : "num" }, SHOW[data.columns[i].type](cell))))));
  };
  let sorted = -1, down = true;
  const titles = data.columns.map((column, i) => {
    const cell = element("th", { scope: "col", title: "sort", class: TEXTS.has(column.type) ? "text" : "" }, column.title);
    cell.addEventListener("click", () => {
      down = sorted === i ? !down : !TEXTS.has(column.type);
      sorted = i;
      rows.sort((a, b) => (down ? -1 : 1) * (a.cells[i] < b.cells[i] ? -1 : a.cells[i] > b.cells[i] ? 1 : 0));
      fill();
    });
    return cell;
  });
  fill();
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, ...titles)), body), more);
}

function tables() {
  for (const data of DATA.tables) {
    $("units").append(element("h2", {}, data.title));
    if (!data.rows.length) { $("units").append(element("p", { class: "muted" }, "no step whose events are all in the files")); continue; }
    $("units").append(element("p", { class: "muted" }, data.note), table(data));
  }
}

function basis() {
  const host = $("basis");
  for (const [title, lines] of [["Not visible in this run", DATA.coverage], ["About these files", DATA.notes], ["Could not be used", DATA.problems]]) {
    if (lines.length) host.append(element("h2", {}, title), element("ul", {}, ...lines.map((line) => element("li", {}, line))));
  }
  host.append(element("p", { class: "muted hint" }, `Made by fsdptrace ${DATA.version}. Charts: uPlot 1.6.32, MIT; its licence is in this file.`));
}

function rest() {
  if (window.fsdptrace.ready) return;
  window.fsdptrace.ready = true;
  memory();
  tables();
  basis();
  startCurve();
  if (curve && $("rank").value) curve.rank = Number($("rank").value);
  theme(document.documentElement.dataset.theme);
  $("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  const resized = new ResizeObserver(() => { clearTimeout(resized.timer); resized.timer = setTimeout(drawCharts, 150); });
  resized.observe($("steps"));
}
requestAnimationFrame(() => setTimeout(rest));
setTimeout(rest, 250); // in a tab that nobody looks at there are no frames
