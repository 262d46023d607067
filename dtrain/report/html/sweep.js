// Several runs: the table that sorts, and the parallel coordinates of the settings that differ.

// key, heading, format, and whether a small (-1) or large (1) value is the best
const RESULT_COLUMNS = [
  ["steps", "steps", whole, 0], ["train_loss", "train loss", loss, -1], ["val_loss", "val loss", loss, -1],
  ["val_accuracy", "accuracy", percent, 1], ["tokens_per_s", "tokens/s", si, 1], ["mfu", "MFU", percent, 1],
  ["peak_mem_gib", "memory", gib, -1], ["wall_s", "time", duration, -1], ["world_size", "ranks", whole, 0],
];
const MOST_COLUMNS = 8, MOST_AXES = 9; // of settings
const missing = value => value === null || value === undefined;

// Settings worth a column or an axis: not names of folders or of classes.
function axisSettings() {
  const skip = /(^|\.)(_target_|_partial_|run_dir|name|resume|resume_allow|force|trust)$/;
  const entries = Object.entries(data.settings.differ);
  return entries.filter(([key, values]) => !skip.test(key) && values.some(v => v !== null));
}

function settingText(value) {
  return missing(value) ? "–" : typeof value === "number" ? brief(value) : String(value);
}

// optim.lr as lr, unless another setting that differs ends with lr too
function shortSetting(key) {
  const leaf = key.split(".").at(-1), alike = axisSettings().filter(([other]) => other.split(".").at(-1) === leaf);
  return alike.length > 1 ? key.replace(/^choices\./, "") : leaf;
}

// The result by which runs are ranked: the validation loss, if most runs have one.
function goal() {
  const has = key => data.runs.filter(run => run.results[key] !== null).length;
  return 2 * has("val_loss") > has("train_loss") ? ["val_loss", "val loss"] : ["train_loss", "train loss"];
}

function statusText(run) { return span("state " + run.status.replace(/[^a-z]/g, ""), run.status); }

class Table {
  constructor() {
    const settings = axisSettings().slice(0, MOST_COLUMNS).map(([key, values]) => ({
      title: shortSetting(key), full: key,
      cls: values.every(v => v === null || typeof v === "number") ? "number setting" : "setting",
      value: run => values[run.index], show: run => settingText(values[run.index]),
    }));
    const results = RESULT_COLUMNS.filter(([key]) => data.runs.some(run => run.results[key] !== null));
    this.columns = [
      { title: "run", cls: "name", value: run => run.name, show: run => this.nameOf(run) },
      { title: "status", cls: "status", value: run => run.status, show: statusText },
      ...settings,
      ...results.map(([key, title, format, best]) => ({
        title, key, best, cls: "number", value: run => run.results[key], show: run => format(run.results[key]),
      })),
    ];
    for (const column of this.columns) column.top = this.bestOf(column);
    this.body = h("tbody");
    this.heads = this.columns.map((column, i) => h("th", { scope: "col", class: column.cls, title: column.full },
      button(null, () => this.sort(i), {}, column.title, h("span", { class: "arrow", "aria-hidden": "true" }))));
    const mark = h("th", { class: "mark" }, span("hidden", "shown"));
    this.element = div("scroll panel",
      h("table", { class: "runs" }, h("thead", {}, h("tr", {}, mark, this.heads)), this.body));
    this.by = -1;
    this.sort(Math.max(0, this.columns.findIndex(column => column.key === goal()[0])));
  }

  bestOf({ best, value }) {
    const values = best ? data.runs.map(value).filter(v => v !== null) : [];
    if (new Set(values).size < 2) return undefined;
    return best > 0 ? Math.max(...values) : Math.min(...values);
  }

  nameOf(run) { return button("link", () => focusRun(run.index, true), { title: run.path }, run.name); }

  sort(i) {
    this.down = this.by === i ? !this.down : this.columns[i].best > 0;
    this.by = i;
    this.heads.forEach((head, j) => {
      head.removeAttribute("aria-sort");
      head.querySelector(".arrow").textContent = i === j ? (this.down ? " ↓" : " ↑") : "";
    });
    this.heads[i].setAttribute("aria-sort", this.down ? "descending" : "ascending");
    const { value } = this.columns[i], sign = this.down ? -1 : 1;
    const compare = (p, q) => typeof p === "number" && typeof q === "number" ? p - q
      : String(p).localeCompare(String(q), "en", { numeric: true });
    const known = data.runs.filter(run => !missing(value(run))), others = data.runs.filter(run => missing(value(run)));
    known.sort((a, b) => sign * compare(value(a), value(b)));
    this.body.replaceChildren(...[...known, ...others].map(run => this.row(run)));
    this.refresh();
  }

  row(run) {
    const onchange = event => select(run.index, event.target.checked);
    const box = h("input", { type: "checkbox", "aria-label": `show ${run.name}`, onchange });
    const cells = this.columns.map((column, i) => {
      const best = column.top !== undefined && column.value(run) === column.top ? " best" : "";
      return h(i ? "td" : "th", { class: column.cls + best, scope: i ? null : "row" }, column.show(run));
    });
    return h("tr", { "data-run": run.index, ...pointedAt(run) }, h("td", { class: "mark" }, box), cells);
  }

  refresh() {
    for (const row of this.body.rows) {
      const run = data.runs[row.dataset.run], box = row.querySelector("input");
      box.checked = state.selected.has(run.index);
      box.style.accentColor = run.color;
      row.classList.toggle("off", !box.checked);
      row.classList.toggle("focus", run.index === state.focus);
    }
  }
}

// One vertical axis for each setting that differs and one for the result; one line for each run.
const TALL = 270, TOP = 46, BOTTOM = TALL - 14, LEFT = 24, RIGHT = 64, LEAST = 122; // pixels; LEAST: for one axis

class Parallel {
  constructor() {
    const [key, title] = goal();
    const settings = axisSettings().map(([name, values]) => ({ title: shortSetting(name), full: name, values }));
    const result = { title, full: title, values: data.runs.map(run => run.results[key]), format: loss, result: true };
    const scaled = [...settings.slice(0, MOST_AXES), result].map(axis => this.scale(axis));
    this.axes = scaled.filter(axis => axis.size > 1 || axis.result);
    this.brushes = new Map();
    const names = this.axes.map(axis => axis.title).join(", ");
    this.svg = s("svg", { class: "parallel", role: "img", "aria-label": `Parallel coordinates of ${names}` });
    this.svg.chart = this;
    const hint = h("p", { class: "hint" }, "Drag along an axis to show only some runs; click it to show all again.");
    this.box = div("scroll", this.svg);
    this.element = div("panel", this.box, hint);
    sizes.observe(this.svg);
  }

  // Adds to an axis: place(value) from 0 to 1, and ticks as [place, text].
  scale(axis) {
    const known = axis.values.filter(v => !missing(v)), text = axis.format || settingText;
    axis.size = new Set(known.map(String)).size;
    if (!known.length || !known.every(v => typeof v === "number")) {
      const own = [...new Set(known.map(String))].sort((p, q) => p.localeCompare(q, "en", { numeric: true }));
      axis.place = v => missing(v) ? null : own.length > 1 ? own.indexOf(String(v)) / (own.length - 1) : 0.5;
      axis.ticks = spread(own.map(v => [axis.place(v), v.length > 16 ? v.slice(0, 15) + "…" : v]));
      return axis;
    }
    const low = Math.min(...known), high = Math.max(...known), log = low > 0 && high / low >= 20;
    const f = log ? Math.log10 : v => v, a = f(low), b = f(high);
    axis.place = v => missing(v) ? null : b > a ? (f(v) - a) / (b - a) : 0.5;
    const own = [...new Set(known)].sort((p, q) => p - q);
    const inner = (log ? roundOnes(low, high) : ticks(low, high, 4).values)
      .filter(v => axis.place(v) > 0.08 && axis.place(v) < 0.92);
    const shown = own.length <= 6 ? own : [low, ...inner, high];
    axis.ticks = spread(shown.map(v => [axis.place(v), text(v)]));
    return axis;
  }

  resized() { this.draw(); }
  refresh() { this.draw(); }
  y(place) { return BOTTOM - place * (BOTTOM - TOP); }

  draw() {
    const wide = Math.max(LEAST * this.axes.length, this.box.clientWidth), n = this.axes.length;
    this.svg.setAttribute("viewBox", `0 0 ${wide} ${TALL}`);
    this.svg.style.width = wide + "px";
    this.svg.style.height = TALL + "px";
    this.axes.forEach((axis, i) => { axis.px = LEFT + (wide - LEFT - RIGHT) * (n > 1 ? i / (n - 1) : 0.5); });
    const order = [...data.runs].sort((a, b) => b.rank - a.rank); // the best is drawn last, on top
    const lines = order.map(run => {
      const d = this.path(run), off = state.selected.has(run.index) ? "" : " off";
      const onclick = () => focusRun(run.index, true);
      return [s("path", { d, class: "pline" + off, stroke: run.color, "data-run": run.index }),
        s("path", { d, class: "phit", onclick, ...pointedAt(run) }, s("title", {}, run.name))];
    });
    const axes = this.axes.map((axis, i) => this.axis(axis, i));
    this.svg.replaceChildren(...lines.map(pair => pair[0]), ...lines.map(pair => pair[1]), ...axes);
  }

  path(run) {
    let path = "", before = null;
    for (const axis of this.axes) {
      const place = axis.place(axis.values[run.index]);
      if (place === null) { before = null; continue; }
      const x = axis.px, y = this.y(place), middle = before && (before[0] + x) / 2;
      path += before ? `C${middle} ${before[1]} ${middle} ${y} ${x} ${y}` : `M${x} ${y}`;
      before = [x, y];
    }
    return path;
  }

  axis(axis, i) {
    const x = axis.px;
    const [anchor, dx] = i === 0 ? ["start", 14 - LEFT] : axis.result ? ["end", RIGHT - 14] : ["middle", 0];
    const title = [clip(axis.title, 20), s("title", {}, axis.full)];
    return s("g", { class: axis.result ? "paxis result" : "paxis" },
      s("text", { x, y: 25, dx, class: "ptitle", "text-anchor": anchor }, title),
      s("line", { x1: x, x2: x, y1: TOP, y2: BOTTOM }),
      axis.ticks.map(([place, text]) => s("text", { x: x + 7, y: this.y(place) + 3.5, class: "ptick" }, text)),
      this.brush(axis));
  }

  brush(axis) {
    const mark = s("rect", { x: axis.px - 7, width: 14, class: "pbrush" });
    const show = (low, high) => {
      mark.setAttribute("y", this.y(high));
      mark.setAttribute("height", this.y(low) - this.y(high));
    };
    show(...(this.brushes.get(axis) || [0, 0]));
    const place = event => {
      const y = event.clientY - this.svg.getBoundingClientRect().top;
      return Math.min(1, Math.max(0, (BOTTOM - y) / (BOTTOM - TOP)));
    };
    let start = null;
    const range = event => [start, place(event)].sort((p, q) => p - q);
    const zone = s("rect", { x: axis.px - 9, width: 18, y: TOP - 8, height: BOTTOM - TOP + 16, class: "pzone" });
    zone.addEventListener("pointerdown", event => {
      start = place(event);
      zone.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    zone.addEventListener("pointermove", event => { if (start !== null) show(...range(event)); });
    zone.addEventListener("pointerup", event => {
      if (start === null) return;
      const [low, high] = range(event);
      start = null;
      if (high - low > 0.02) this.brushes.set(axis, [low, high]); else this.brushes.delete(axis);
      selectOnly(data.runs.filter(run => this.isInside(run)).map(run => run.index));
    });
    return [mark, zone];
  }

  isInside(run) {
    return [...this.brushes].every(([axis, [low, high]]) => {
      const place = axis.place(axis.values[run.index]);
      return place !== null && place >= low - 1e-9 && place <= high + 1e-9;
    });
  }

  emphasise(index) {
    this.svg.classList.toggle("quiet", index !== null);
    for (const path of this.svg.querySelectorAll(".pline"))
      path.classList.toggle("strong", Number(path.dataset.run) === index);
  }
}

const clip = (text, most) => text.length > most ? "…" + text.slice(1 - most) : text;

// 1, 2 and 5 of each decade
function roundOnes(low, high) {
  const found = [];
  for (let d = Math.floor(Math.log10(low)); d <= Math.log10(high); d++) found.push(10 ** d, 2 * 10 ** d, 5 * 10 ** d);
  return found.filter(v => v > low && v < high);
}

// Leave out ticks that would stand on each other, but neither the first nor the last.
function spread(found) {
  const kept = [], last = found[found.length - 1];
  for (const tick of found) {
    const near = kept.length > 0 && tick[0] - kept[kept.length - 1][0] < 0.055;
    if (near && (tick !== last || kept.length < 2)) continue;
    if (near) kept.pop();
    kept.push(tick);
  }
  return kept;
}
