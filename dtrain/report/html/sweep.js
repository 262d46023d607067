// Several runs: the table that sorts, and the parallel coordinates of the settings that differ.

const RESULT_COLUMNS = [
  ["steps", "steps", whole, 0], ["train_loss", "train loss", loss, -1], ["val_loss", "val loss", loss, -1],
  ["val_accuracy", "accuracy", percent, 1], ["tokens_per_s", "tokens/s", si, 1], ["mfu", "MFU", percent, 1],
  ["peak_mem_gib", "memory", gib, -1], ["wall_s", "time", duration, -1], ["world_size", "ranks", whole, 0],
];

// Settings worth a column or an axis: not names of folders or of classes.
function axisSettings() {
  const skip = /(^|\.)(_target_|_partial_|run_dir|name|resume|resume_allow|force|trust)$/;
  return Object.entries(data.settings.differ).filter(([key, values]) => !skip.test(key) && values.some(v => v !== null));
}

const settingText = value => value === null || value === undefined ? "–" : typeof value === "number" ? brief(value) : String(value);
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

class Table {
  constructor() {
    const settings = axisSettings().slice(0, 8);
    const used = RESULT_COLUMNS.filter(([key]) => data.runs.some(run => run.results[key] !== null));
    this.columns = [
      { title: "run", value: run => run.name, text: run => run.name, cls: "name" },
      { title: "status", value: run => run.status, text: run => run.status, cls: "status" },
      ...settings.map(([key, values]) => ({ title: shortSetting(key), full: key, value: run => values[run.index], text: run => settingText(values[run.index]),
        cls: values.every(v => v === null || typeof v === "number") ? "number setting" : "setting" })),
      ...used.map(([key, title, format, best]) => ({ title, value: run => run.results[key], text: run => format(run.results[key]), cls: "number", best, key })),
    ];
    for (const column of this.columns) if (column.best) {
      const values = data.runs.map(column.value).filter(v => v !== null);
      column.top = values.length > 1 && new Set(values).size > 1 ? (column.best > 0 ? Math.max(...values) : Math.min(...values)) : undefined;
    }
    this.body = h("tbody");
    this.heads = this.columns.map((column, i) => h("th", { scope: "col", class: column.cls, title: column.full },
      h("button", { type: "button", onclick: () => this.sort(i) }, column.title, h("span", { class: "arrow", "aria-hidden": "true" }))));
    this.element = h("div", { class: "scroll panel" }, h("table", { class: "runs" }, h("thead", {}, h("tr", {}, h("th", { class: "mark" }, h("span", { class: "hidden" }, "shown")), this.heads)), this.body));
    const start = this.columns.findIndex(c => c.key === goal()[0]);
    this.by = -1;
    this.sort(Math.max(0, start));
  }

  sort(i) {
    this.down = this.by === i ? !this.down : this.columns[i].best > 0;
    this.by = i;
    this.heads.forEach((head, j) => {
      if (i === j) head.setAttribute("aria-sort", this.down ? "descending" : "ascending"); else head.removeAttribute("aria-sort");
      head.querySelector(".arrow").textContent = i === j ? (this.down ? " ↓" : " ↑") : "";
    });
    const { value } = this.columns[i], sign = this.down ? -1 : 1;
    const order = [...data.runs].sort((a, b) => {
      const p = value(a), q = value(b);
      if (p === null || p === undefined) return q === null || q === undefined ? 0 : 1;
      if (q === null || q === undefined) return -1;
      return sign * (typeof p === "number" && typeof q === "number" ? p - q : String(p).localeCompare(String(q), "en", { numeric: true }));
    });
    this.body.replaceChildren(...order.map(run => this.row(run)));
  }

  row(run) {
    const box = h("input", { type: "checkbox", "aria-label": `show ${run.name}`, onchange: event => select(run.index, event.target.checked) });
    box.checked = state.selected.has(run.index);
    box.style.accentColor = run.color;
    const row = h("tr", { onpointerenter: () => emphasise(run.index), onpointerleave: () => emphasise(null) },
      h("td", { class: "mark" }, box),
      this.columns.map((column, i) => h(i ? "td" : "th", { class: column.cls + (column.top !== undefined && column.value(run) === column.top ? " best" : ""), scope: i ? null : "row" },
        i === 0 ? h("button", { type: "button", class: "link", title: run.path, onclick: () => focusRun(run.index, true) }, run.name)
          : column.cls === "status" ? statusText(run) : column.text(run))));
    row.dataset.run = run.index;
    return row;
  }

  refresh() {
    for (const row of this.body.rows) {
      const index = Number(row.dataset.run), box = row.querySelector("input");
      box.checked = state.selected.has(index);
      box.style.accentColor = data.runs[index].color;
      row.classList.toggle("off", !box.checked);
      row.classList.toggle("focus", index === state.focus);
    }
  }
}

function statusText(run) { return h("span", { class: "state " + run.status.replace(/[^a-z]/g, "") }, run.status); }

// One vertical axis for each setting that differs and one for the result; one line for each run.
class Parallel {
  constructor() {
    const [key, title] = goal();
    const settings = axisSettings().map(([name, values]) => ({ title: shortSetting(name), full: name, values }));
    const result = { title, values: data.runs.map(run => run.results[key]), format: loss, result: true };
    this.axes = [...settings.slice(0, 9), result].map(axis => this.scale(axis)).filter(axis => axis.size > 1 || axis.result);
    this.brushes = new Map();
    this.svg = s("svg", { class: "parallel", role: "img", "aria-label": `Parallel coordinates of ${this.axes.map(a => a.title).join(", ")}` });
    this.svg.chart = this;
    this.hint = h("p", { class: "hint" }, "Drag along an axis to show only some runs; click it to show all again.");
    this.element = h("div", { class: "panel" }, h("div", { class: "scroll" }, this.svg), this.hint);
    sizes.observe(this.svg);
  }

  scale(axis) {
    const known = axis.values.filter(v => v !== null && v !== undefined);
    axis.size = new Set(known.map(String)).size;
    axis.numeric = known.length > 0 && known.every(v => typeof v === "number");
    if (axis.numeric) {
      const low = Math.min(...known), high = Math.max(...known);
      axis.log = low > 0 && high / low >= 20;
      const f = axis.log ? Math.log10 : v => v, a = f(low), b = f(high);
      axis.place = v => v === null || v === undefined ? null : b > a ? (f(v) - a) / (b - a) : 0.5;
      const own = [...new Set(known)].sort((p, q) => p - q);
      const text = axis.format || settingText;
      axis.ticks = own.length <= 6 ? spread(own.map(v => [axis.place(v), text(v)]))
        : axis.log ? spread([[low, text(low)], ...roundOnes(low, high).map(v => [axis.place(v), text(v)]).filter(([p]) => p > 0.06 && p < 0.94), [1, text(high)]].map(([p, t], i) => i ? [p, t] : [0, t])) : [low, ...ticks(low, high, 4).values.filter(v => axis.place(v) > 0.08 && axis.place(v) < 0.92), high].map(v => [axis.place(v), text(v)]);
    } else {
      const own = [...new Set(known.map(String))].sort((p, q) => p.localeCompare(q, "en", { numeric: true }));
      axis.place = v => v === null || v === undefined ? null : own.length > 1 ? own.indexOf(String(v)) / (own.length - 1) : 0.5;
      axis.ticks = spread(own.map(v => [axis.place(v), v.length > 16 ? v.slice(0, 15) + "…" : v]));
    }
    return axis;
  }

  resized() { this.draw(); }

  draw() {
    const box = this.element.querySelector(".scroll");
    const least = 122 * this.axes.length, w = Math.max(least, box.clientWidth), t = 270, top = 46, bottom = t - 14;
    if (!w) return;
    this.svg.setAttribute("viewBox", `0 0 ${w} ${t}`);
    this.svg.style.width = w + "px"; this.svg.style.height = t + "px";
    const left = 24, right = w - 64, n = this.axes.length;
    this.axes.forEach((axis, i) => { axis.px = n > 1 ? left + (right - left) * i / (n - 1) : (left + right) / 2; });
    this.y = p => bottom - p * (bottom - top);
    const order = [...data.runs].sort((a, b) => (b.rank ?? 0) - (a.rank ?? 0));
    const lines = order.map(run => {
      let path = "", before = null;
      for (const axis of this.axes) {
        const p = axis.place(axis.values[run.index]);
        if (p === null) { before = null; continue; }
        const y = this.y(p);
        path += before ? `C${(before[0] + axis.px) / 2} ${before[1]} ${(before[0] + axis.px) / 2} ${y} ${axis.px} ${y}` : `M${axis.px} ${y}`;
        before = [axis.px, y];
      }
      const shown = s("path", { d: path, class: "pline" + (state.selected.has(run.index) ? "" : " off"), stroke: run.color, "data-run": run.index });
      const touch = s("path", { d: path, class: "phit", onpointerenter: () => emphasise(run.index), onpointerleave: () => emphasise(null), onclick: () => focusRun(run.index, true) }, s("title", {}, run.name));
      return [shown, touch];
    });
    const axes = this.axes.map((axis, i) => s("g", { class: axis.result ? "paxis result" : "paxis" },
      s("text", { x: axis.px, y: 25, class: "ptitle", "text-anchor": i === 0 ? "start" : i === n - 1 ? "end" : "middle", dx: i === 0 ? -left + 14 : i === n - 1 ? 50 : 0 }, clip(axis.title, 20), s("title", {}, axis.full || axis.title)),
      s("line", { x1: axis.px, x2: axis.px, y1: top, y2: bottom }),
      axis.ticks.map(([p, text]) => s("text", { x: axis.px + 7, y: this.y(p) + 3.5, class: "ptick" }, text)),
      this.brushBox(axis, top, bottom)));
    this.svg.replaceChildren(...lines.map(l => l[0]), ...lines.map(l => l[1]), ...axes);
  }

  brushBox(axis, top, bottom) {
    const range = this.brushes.get(axis);
    const mark = s("rect", { x: axis.px - 7, width: 14, y: range ? this.y(range[1]) : 0, height: range ? this.y(range[0]) - this.y(range[1]) : 0, class: "pbrush" });
    const at = event => { const box = this.svg.getBoundingClientRect(); return Math.min(1, Math.max(0, (bottom - (event.clientY - box.top) * (270 / box.height)) / (bottom - top))); };
    let start = null;
    const hit = s("rect", { x: axis.px - 9, width: 18, y: top - 8, height: bottom - top + 16, class: "pzone" });
    hit.addEventListener("pointerdown", event => { start = at(event); hit.setPointerCapture(event.pointerId); event.preventDefault(); });
    hit.addEventListener("pointermove", event => {
      if (start === null) return;
      const [a, b] = [start, at(event)].sort((p, q) => p - q);
      mark.setAttribute("y", this.y(b)); mark.setAttribute("height", this.y(a) - this.y(b));
    });
    hit.addEventListener("pointerup", event => {
      const [a, b] = [start, at(event)].sort((p, q) => p - q);
      start = null;
      if (b - a > 0.02) this.brushes.set(axis, [a - 1e-9, b + 1e-9]); else this.brushes.delete(axis);
      const inside = run => [...this.brushes].every(([one, [low, high]]) => { const p = one.place(one.values[run.index]); return p !== null && p >= low && p <= high; });
      selectOnly(data.runs.filter(inside).map(run => run.index));
    });
    return [mark, hit];
  }

  refresh() { this.draw(); }

  emphasise(index) {
    this.svg.classList.toggle("quiet", index !== null);
    for (const path of this.svg.querySelectorAll(".pline")) path.classList.toggle("strong", Number(path.dataset.run) === index);
  }
}

const clip = (text, most) => text.length > most ? "…" + text.slice(1 - most) : text;

// 1, 2 and 5 of each decade
function roundOnes(low, high) {
  const found = [];
  for (let d = Math.floor(Math.log10(low)); d <= Math.log10(high); d++) for (const f of [1, 2, 5]) found.push(f * 10 ** d);
  return found.filter(v => v > low && v < high);
}

// Leave out ticks that would stand on each other.
function spread(found) {
  const kept = [], last = found[found.length - 1];
  for (const tick of found) {
    if (kept.length && tick[0] - kept[kept.length - 1][0] < 0.055) { if (tick !== last || kept.length < 2) continue; kept.pop(); }
    kept.push(tick);
  }
  return kept;
}
