// The page: reads the data, keeps the state (which runs, smoothing, axis, zoom), and puts the sections together.

let data, table, parallel, systemGroup, detailsBox;
const state = { selected: new Set(), focus: 0, smooth: 0, log: false, axis: "step" };
const curves = new Group();
const repaint = []; // pictures that are no charts, when the colours change
const theme = { colors: {}, font: "system-ui, sans-serif" };
const MANY = 10; // more runs than colours: the colour is then the rank by loss

const PALETTES = {
  light: ["#2f6bd6", "#d9622b", "#16906a", "#b0449c", "#9a7200", "#5b50d6", "#0e8fa6", "#c53b47", "#6d7682", "#6f8a14"],
  dark: ["#6fa8ff", "#ff9a5c", "#45cfa0", "#e487d0", "#e0b63f", "#a49bff", "#4fcbe0", "#ff7f86", "#a5aebb", "#b3cf58"],
};
const RAMPS = {
  light: ["#16349e", "#1d7fa8", "#4fae8a", "#b9bf7a", "#d8cdb4"],
  dark: ["#8fb4ff", "#4fb8d8", "#46a98c", "#8a8f4a", "#7a6f5a"],
};
const COLORS = ["panel", "grid", "axis", "muted", "bad", "select", "cool", "hot"]; // of the style, for canvases

const CHARTS = {
  loss: ["Loss", loss], val_loss: ["Validation loss", loss], val_accuracy: ["Validation accuracy", percent],
  lr: ["Learning rate", plain], grad_norm: ["Gradient norm", plain], tokens_per_s: ["Tokens/s", si],
  mem_gib: ["Peak memory of a rank", gib], mfu: ["MFU", percent], step_s: ["Step time", duration],
  data_s: ["Wait for data", duration],
};
const PLANNED = { tokens_per_s: "tokens_per_s", mem_gib: "memory_gib", mfu: "mfu", step_s: "step_s" };

// ---- theme

const isDark = () => document.documentElement.dataset.theme === "dark";
const palette = () => PALETTES[isDark() ? "dark" : "light"];

function applyTheme(name) {
  document.documentElement.dataset.theme = name;
  const style = getComputedStyle(document.documentElement), get = key => style.getPropertyValue("--" + key).trim();
  for (const key of COLORS) theme.colors[key] = get(key);
  theme.font = getComputedStyle(document.body).fontFamily;
  if (data) recolor();
}

function recolor() {
  const ramp = RAMPS[isDark() ? "dark" : "light"], [key] = goal();
  const order = [...data.runs].sort((a, b) => (a.results[key] ?? Infinity) - (b.results[key] ?? Infinity));
  order.forEach((run, i) => { run.rank = i; });
  for (const run of data.runs) {
    if (data.runs.length <= MANY) { run.color = palette()[run.index % palette().length]; continue; }
    const t = run.rank / (data.runs.length - 1) * (ramp.length - 1), i = Math.min(ramp.length - 2, Math.floor(t));
    run.color = mix(ramp[i], ramp[i + 1], t - i);
  }
}

function toggleTheme() {
  const next = isDark() ? "light" : "dark";
  applyTheme(next);
  try { localStorage.setItem("dtrain-theme", next); } catch { /* a file may have no storage */ }
  refresh();
}

// ---- data

async function read() {
  const bytes = fromBase64(document.getElementById("data").textContent);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const found = await new Response(stream).json();
  found.runs.forEach((run, index) => { run.index = index; });
  return found;
}

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text); // in browsers since 2025, and ten times as fast
  const letters = atob(text), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

// From differences back to places; once for each curve.
function unpack(curve) {
  if (!(curve.x instanceof Float64Array)) {
    const x = Float64Array.from(curve.x);
    for (let i = 1; i < x.length; i++) x[i] += x[i - 1];
    curve.x = x;
  }
  return curve;
}

// The curve over the axis that is chosen: steps, tokens or seconds of training.
function onAxis(run, name) {
  const curve = unpack(run.curves[name]), known = run.axes[state.axis];
  if (state.axis === "step") return curve;
  if (!known) return { x: [], y: [] };
  const map = at => {
    const [xs, ys] = known, i = Math.min(Math.max(1, below(xs, at)), xs.length - 1);
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (at - xs[i - 1]) / ((xs[i] - xs[i - 1]) || 1);
  };
  const cache = curve.on ??= {};
  return cache[state.axis] ??= { ...curve, x: Float64Array.from(curve.x, map), ends: curve.ends?.map(map) };
}

const shownRuns = () => data.runs.filter(run => state.selected.has(run.index));

function xFormat(x) {
  if (state.axis === "seconds") return duration(x);
  return state.axis === "tokens" ? `${si(x)} ${data.runs[0].unit}` : `step ${whole(x)}`;
}

function curveCharts() {
  const names = [...new Set(data.runs.flatMap(run => Object.keys(run.curves)))];
  return names.map((name, i) => {
    let [title, format] = CHARTS[name] || [words(name), plain];
    if (name === "tokens_per_s" && data.runs.every(run => run.unit !== "tokens")) title = `${data.runs[0].unit}/s`;
    const planned = PLANNED[name];
    return new Chart({
      title, format, xFormat, large: i === 0, onpick: key => focusRun(key, false),
      xTicks: (...range) => (state.axis === "seconds" ? timeTicks : ticks)(...range),
      xLabel: (...tick) => (state.axis === "seconds" ? timeLabel : tickLabel)(...tick),
      lines: () => shownRuns().filter(run => run.curves[name])
        .map(run => ({ key: run.index, name: run.name, color: run.color, data: onAxis(run, name) })),
      references: () => planned ? references(name, planned, format) : [],
      marks: () => name === "loss" && state.axis === "step" && shownRuns().length === 1 ? shownRuns()[0].skipped : [],
      log: () => state.log && name !== "data_s",
      smooth: () => name === "lr" || name === "mem_gib" ? 0 : state.smooth,
    }, curves);
  });
}

// What was planned, as dashed lines: in the colour of the run, if there are several.
function references(name, planned, format) {
  const runs = shownRuns().filter(run => run.plan[planned] !== undefined && run.curves[name]);
  const values = [...new Set(runs.map(run => run.plan[planned]))];
  if (!values.length || (runs.length > 4 && values.length > 1)) return [];
  const found = values.length === 1 ? [{ value: values[0], name: `planned ${format(values[0])}` }]
    : runs.map(run => ({ value: run.plan[planned], name: `planned ${format(run.plan[planned])}`, color: run.color }));
  const limit = name === "mem_gib" && runs.length === 1 ? runs[0].plan.memory_limit : undefined;
  return limit === undefined ? found : [...found, { value: limit, name: `GPU ${format(limit)}`, inside: true }];
}

// ---- state

function refresh() {
  curves.redraw();
  systemGroup?.redraw();
  table?.refresh();
  parallel?.refresh();
  refreshRuns();
  for (const draw of repaint) draw();
}

function select(index, on) {
  if (on) state.selected.add(index); else state.selected.delete(index);
  selectOnly([...state.selected]);
}

function selectOnly(indices) {
  state.selected = new Set(indices);
  configSection.show?.();
  refresh();
}

function emphasise(index) {
  if (curves.emphasis === index) return;
  curves.emphasis = index;
  parallel?.emphasise(index);
  for (const row of document.querySelectorAll("li[data-run], tr[data-run]"))
    row.classList.toggle("strong", Number(row.dataset.run) === index);
  curves.setCursor(null);
}

function focusRun(index, scroll) {
  state.focus = index;
  showDetails();
  refresh();
  if (scroll) document.getElementById("details")?.scrollIntoView({ block: "start" });
}

// Attributes of what stands for a run: pointing at it shows the run in every picture.
function pointedAt(run) {
  return { onpointerenter: () => emphasise(run.index), onpointerleave: () => emphasise(null) };
}

// ---- sections

function controls() {
  const value = h("output", {}, "0");
  const oninput = event => {
    state.smooth = Number(event.target.value);
    value.textContent = trim(state.smooth.toFixed(2));
    curves.redraw();
  };
  const range = { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, id: "smooth", "aria-label": "smoothing" };
  const smooth = h("label", { class: "slider" }, "smoothing ", h("input", { ...range, oninput }), value);
  const known = [["step", "steps"], ["tokens", data.runs[0].unit], ["seconds", "time"]]
    .filter(([key]) => key === "step" || data.runs.some(run => run.axes[key]));
  const choices = known.map(([key, label]) => button(null, () => {
    state.axis = key;
    for (const choice of choices) choice.setAttribute("aria-pressed", choice.dataset.axis === key);
    curves.setZoom(null);
  }, { "aria-pressed": String(key === "step"), "data-axis": key }, label));
  const axis = h("div", { class: "choice", role: "group", "aria-label": "horizontal axis" }, choices);
  const log = button("toggle", () => {
    state.log = !state.log;
    log.setAttribute("aria-pressed", state.log);
    curves.redraw();
  }, { id: "log", "aria-pressed": "false" }, "log y");
  const reset = button("toggle", () => curves.setZoom(null), { id: "reset", disabled: true }, "reset zoom");
  curves.onzoom = zoom => { reset.disabled = zoom === null; };
  return div("controls", smooth, choices.length > 1 && axis, log, reset);
}

// The list of runs beside the content: which are shown, in which colour.
function sideRuns() {
  const items = data.runs.map(run => {
    const box = h("input", { type: "checkbox", onchange: event => select(run.index, event.target.checked) });
    const title = `${run.name}\n${run.path}`, result = small(loss(run.results[goal()[0]]));
    const label = h("label", { title }, box, swatch(run.color), span("runname", run.name));
    return h("li", { "data-run": run.index, ...pointedAt(run) }, label, result);
  });
  const label = "filter runs";
  const filter = h("input", { type: "search", placeholder: label, "aria-label": label, oninput: () => {
    const text = filter.value.trim().toLowerCase();
    data.runs.forEach((run, i) => { items[i].hidden = !`${run.name} ${run.path}`.toLowerCase().includes(text); });
  } });
  const visible = () => data.runs.map(run => run.index).filter(i => !items[i].hidden);
  const best = () => [...data.runs].sort((a, b) => a.rank - b.rank).slice(0, 5).map(run => run.index);
  const picks = div("pick",
    button("quiet", () => selectOnly([...state.selected, ...visible()]), {}, "all"),
    button("quiet", () => selectOnly([...state.selected].filter(i => items[i].hidden)), {}, "none"),
    button("quiet", () => selectOnly(best()), {}, "best 5"));
  const ramp = h("span", { class: "ramp byloss", "aria-hidden": "true" });
  const details = h("details", {},
    h("summary", {}, `${data.runs.length} runs`, h("span", { class: "small", id: "shown" })),
    data.runs.length > 8 && filter, picks, h("ul", { class: "runlist" }, items),
    data.runs.length > MANY && h("p", { class: "hint" }, ramp, ` coloured by ${goal()[1]}, best first`));
  details.open = window.innerWidth >= 900;
  return details;
}

function refreshRuns() {
  for (const item of document.querySelectorAll(".runlist li")) {
    const run = data.runs[item.dataset.run], box = item.querySelector("input");
    box.checked = state.selected.has(run.index);
    item.querySelector(".swatch").style.background = run.color;
    item.classList.toggle("off", !box.checked);
  }
  const shown = document.getElementById("shown");
  if (shown) shown.textContent = ` ${state.selected.size} shown`;
}

function showDetails() {
  const run = data.runs[state.focus], several = data.runs.length > 1;
  systemGroup = null;
  repaint.length = 0;
  const options = data.runs.map(one => h("option", { value: one.index, selected: one === run }, one.name));
  const onchange = event => focusRun(Number(event.target.value), false);
  const pick = h("select", { "aria-label": "run in detail", onchange }, options);
  const head = () => [
    div("detailhead", h("h2", {}, "One run in detail"), pick),
    facts(run), whyBox(run),
  ];
  detailsBox.replaceChildren(...[
    ...(several ? head() : []),
    stepSection(run), commSection(run), rankSection(run), timeLine(run), systemSection(run),
    environmentSection(run), commandSection(run),
  ].filter(Boolean));
}

// Of population-based training: drawn by report/lineage.py.
function lineageSection() {
  const picture = document.getElementById("lineage-picture").content;
  if (!picture.firstElementChild) return null;
  return part("Lineage", "lineage", "who copied whose weights; a colour is the member that they began with",
    div("scroll panel", picture));
}

function build() {
  const several = data.runs.length > 1, run = data.runs[0], charts = curveCharts();
  detailsBox = h("div", { id: "details" });
  showDetails();
  if (several) table = new Table();
  if (several && axisSettings().length) parallel = new Parallel();
  const overview = several
    ? part("Results", "overview", "click a heading to sort, a name for its details", table.element)
    : h("section", { class: "part", id: "overview" }, whyBox(run), facts(run));
  const grid = div("grid", charts.length ? charts.map(chart => chart.element) : small("No metrics yet."));
  const sections = [
    data.problem && h("p", { class: "hint" }, "SLURM did not answer, so a state may be old: ", data.problem),
    overview,
    lineageSection(),
    parallel && parallel.axes.length > 1 && part("Settings and results", "parallel", "", parallel.element),
    h("section", { class: "part", id: "curves" }, div("partbar sticky", h("h2", {}, "Curves"), controls()), grid),
    detailsBox,
    configSection(),
    h("footer", {}, `written by dtrain ${data.version} on ${moment(data.created)} · dashed: planned · `
      + "shaded: smallest and largest value of the steps that share a point"),
  ];
  document.getElementById("content").replaceChildren(...sections.filter(Boolean));
  if (several) {
    const side = document.getElementById("runs");
    side.hidden = false;
    side.append(sideRuns());
    document.getElementById("frame").classList.add("several");
  }
  buildTop(several, run);
}

const LINKS = [
  ["overview", "Overview"], ["lineage", "Lineage"], ["curves", "Curves"], ["step", "Step"], ["ranks", "Ranks"], ["timeline", "Attempts"],
  ["system", "System"], ["configuration", "Configuration"], ["commands", "Commands"],
];

function buildTop(several, run) {
  const links = LINKS.filter(([id]) => document.getElementById(id));
  const label = "switch between light and dark";
  const parts = [
    span("brand", "dtrain"),
    h("h1", { title: run.path }, several ? document.title.replace(/ · dtrain report$/, "") : run.name),
    !several && statusText(run),
    h("nav", { "aria-label": "sections" }, links.map(([id, text]) => h("a", { href: "#" + id }, text))),
    button("quiet", toggleTheme, { id: "theme", "aria-label": label, title: label }, "◐"),
  ];
  document.getElementById("top").replaceChildren(...parts.filter(Boolean));
}

async function start() {
  let stored = null;
  try { stored = localStorage.getItem("dtrain-theme"); } catch { /* a file may have no storage */ }
  const system = matchMedia("(prefers-color-scheme: dark)"), wanted = () => system.matches ? "dark" : "light";
  applyTheme(["light", "dark"].includes(stored) ? stored : wanted());
  system.addEventListener("change", () => {
    if (stored) return;
    applyTheme(wanted());
    refresh();
  });
  data = await read();
  data.runs.forEach(run => state.selected.add(run.index));
  recolor();
  build();
  refresh();
  const ready = () => { performance.mark("interactive"); document.documentElement.dataset.ready = "yes"; };
  requestAnimationFrame(() => requestAnimationFrame(ready)); // after the first charts
}

start().catch(error => {
  const text = ["This page could not be read: ", error.message];
  document.getElementById("content").replaceChildren(h("p", { class: "loading" }, text));
  throw error;
});
