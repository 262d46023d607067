// A chart: curves on a canvas, and a second canvas above it for the cursor. Charts of one group share zoom and cursor.

const MARGIN = { left: 52, right: 12, top: 8, bottom: 22 };

class Group {
  constructor() {
    this.charts = [];
    this.zoom = null; // [first, last] place
    this.at = null; // place of the cursor
    this.key = null; // of the line at the cursor
    this.emphasis = null; // key of a line that is pointed at elsewhere
    this.onzoom = () => {};
  }
  setZoom(range) { this.zoom = range; this.redraw(); this.onzoom(range); }
  setCursor(at, key = null, from = null) {
    this.at = at; this.key = key;
    for (const chart of this.charts) if (chart.seen) chart.drawOver(chart === from);
  }
  redraw() { for (const chart of this.charts) chart.invalidate(); }
}

const watcher = new IntersectionObserver(entries => {
  for (const { target, isIntersecting } of entries) {
    target.chart.seen = isIntersecting;
    if (isIntersecting) target.chart.refresh();
  }
}, { rootMargin: "200px" });

const sizes = new ResizeObserver(entries => { for (const { target } of entries) target.chart.resized(); });

// spec: title, lines() → [{key, name, color, data: {x, y, lo, hi, ends}}], references() → [{value, name, color}],
// format(y), xFormat(x), xTicks, marks() → x of trouble, log() → bool, smooth() → 0 … 1
class Chart {
  constructor(spec, group) {
    this.spec = spec; this.group = group; this.dirty = true; this.seen = false; this.width = 0;
    this.base = h("canvas", { "aria-hidden": "true" });
    this.over = h("canvas", { "aria-hidden": "true" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.plot = h("div", { class: "plot", tabindex: 0, role: "img" }, this.base, this.over, this.tip);
    this.note = h("span", { class: "note" });
    this.element = h("figure", { class: "panel chart" + (spec.large ? " large" : "") },
      h("figcaption", {}, h("h3", {}, spec.title), this.note), this.plot);
    this.plot.chart = this;
    group.charts.push(this);
    this.listen();
    watcher.observe(this.plot);
    sizes.observe(this.plot);
  }

  invalidate() { this.dirty = true; if (this.seen) this.refresh(); }

  resized() {
    const { clientWidth, clientHeight } = this.plot;
    if (clientWidth === this.width && clientHeight === this.height) return;
    this.width = clientWidth; this.height = clientHeight;
    this.invalidate();
  }

  refresh() {
    if (!this.dirty || this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => { this.pending = false; if (this.dirty) this.draw(); });
  }

  // ---- scales

  prepare() {
    const { spec, group } = this, log = this.log = Boolean(spec.log?.());
    const smooth = spec.smooth?.() || 0;
    this.lines = spec.lines().filter(line => line.data.x.length);
    let first = Infinity, last = -Infinity;
    for (const { data } of this.lines) {
      first = Math.min(first, data.ends ? data.ends[0] : data.x[0]);
      last = Math.max(last, data.ends ? data.ends[1] : data.x[data.x.length - 1]);
    }
    this.full = this.lines.length ? [first, last] : [0, 1];
    [this.x0, this.x1] = group.zoom || this.full;
    if (!(this.x1 > this.x0)) { this.x0 -= 0.5; this.x1 += 0.5; }
    let low = Infinity, high = -Infinity;
    const take = y => { if (isFinite(y) && (!log || y > 0)) { if (y < low) low = y; if (y > high) high = y; } };
    for (const line of this.lines) {
      const { x, y, lo, hi } = line.data;
      line.smooth = smooth > 0 && y.length > 4 ? smoothed(y, smooth) : null;
      line.from = Math.max(0, below(x, this.x0) - 1);
      line.to = Math.min(x.length, below(x, this.x1) + 2);
      for (let i = line.from; i < line.to; i++) {
        if (x[i] < this.x0 || x[i] > this.x1) continue;
        take(lo ? lo[i] : y[i]);
        take(hi ? hi[i] : y[i]);
      }
    }
    this.references = spec.references?.() || [];
    for (const { value } of this.references) take(value);
    if (low > high) { low = log ? 0.1 : 0; high = 1; }
    if (log) { low = Math.log10(low); high = Math.log10(high); }
    const pad = high > low ? (high - low) * 0.05 : Math.abs(low) * 0.05 || 1;
    const zero = !log && low >= 0 && low - pad < 0;
    this.y0 = zero ? 0 : low - pad;
    this.y1 = high + pad;
    this.left = MARGIN.left; this.top = MARGIN.top;
    this.w = Math.max(10, this.width - MARGIN.left - MARGIN.right);
    this.h = Math.max(10, this.height - MARGIN.top - MARGIN.bottom);
  }

  px(x) { return this.left + (x - this.x0) / (this.x1 - this.x0) * this.w; }
  py(y) {
    const v = this.log ? Math.log10(Math.max(y, 1e-300)) : y;
    return this.top + (this.y1 - v) / (this.y1 - this.y0) * this.h;
  }
  x(px) { return this.x0 + (px - this.left) / this.w * (this.x1 - this.x0); }

  yTicks() {
    const count = Math.max(2, Math.floor(this.h / 38));
    if (!this.log) {
      const { values, step } = ticks(this.y0, this.y1, count);
      return values.map(v => [v, tickLabel(v, step)]);
    }
    let found = [];
    for (const factors of [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 5], [1, 3], [1]]) {
      found = [];
      for (let d = Math.floor(this.y0); d <= Math.ceil(this.y1); d++)
        for (const f of factors) found.push(f * 10 ** d);
      found = found.filter(v => Math.log10(v) >= this.y0 && Math.log10(v) <= this.y1);
      if (found.length <= count + 2) break;
    }
    const every = Math.ceil(found.length / (count + 2)) || 1;
    if (found.length < 2) found = ticks(10 ** this.y0, 10 ** this.y1, count).values.filter(v => v > 0);
    const label = v => v < 1e-3 || v >= 1e5 ? trimExponent(v.toExponential(0)) : trim(v.toPrecision(3));
    return found.filter((_, i) => i % every === 0).map(v => [v, label(v)]);
  }

  // ---- drawing

  surface(canvas) {
    const ratio = window.devicePixelRatio || 1, w = Math.round(this.width * ratio), t = Math.round(this.height * ratio);
    if (canvas.width !== w || canvas.height !== t) { canvas.width = w; canvas.height = t; }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    return context;
  }

  draw() {
    if (!this.width) return;
    this.dirty = false;
    this.prepare();
    const c = this.surface(this.base), color = theme.colors;
    c.font = "11px " + theme.font;
    c.lineWidth = 1;
    c.textBaseline = "middle";
    c.textAlign = "right";
    for (const [value, label] of this.yTicks()) {
      const y = Math.round(this.py(value)) + 0.5;
      if (y < this.top - 1 || y > this.top + this.h + 1) continue;
      c.strokeStyle = color.grid;
      line(c, this.left, y, this.left + this.w, y);
      c.fillStyle = color.muted;
      c.fillText(label, this.left - 7, y);
    }
    c.textBaseline = "top";
    const count = Math.max(2, Math.floor(this.w / 75));
    const { values, step } = (this.spec.xTicks || ticks)(this.x0, this.x1, count);
    let free = -Infinity;
    for (const value of values) {
      const x = this.px(value), label = (this.spec.xLabel || tickLabel)(value, step), wide = c.measureText(label).width;
      const start = Math.min(Math.max(x - wide / 2, 0), this.width - wide);
      if (start < free) continue;
      free = start + wide + 10;
      c.strokeStyle = color.axis;
      line(c, Math.round(x) + 0.5, this.top + this.h, Math.round(x) + 0.5, this.top + this.h + 4);
      c.textAlign = "left";
      c.fillStyle = color.muted;
      c.fillText(label, start, this.top + this.h + 7);
    }
    c.strokeStyle = color.axis;
    line(c, this.left, Math.round(this.top + this.h) + 0.5, this.left + this.w, Math.round(this.top + this.h) + 0.5);
    c.save();
    c.beginPath();
    c.rect(this.left, this.top - 2, this.w, this.h + 4);
    c.clip();
    const many = this.lines.length > 8;
    for (const one of this.lines) this.drawBand(c, one, many ? Math.max(0.015, 0.6 / this.lines.length) : 0.2);
    for (const one of this.lines) this.drawLine(c, one, many);
    this.drawReferences(c);
    for (const x of this.spec.marks?.() || []) {
      const at = this.px(x), foot = this.top + this.h;
      c.fillStyle = color.bad;
      c.beginPath();
      c.moveTo(at - 4, foot); c.lineTo(at + 4, foot); c.lineTo(at, foot - 7);
      c.fill();
    }
    c.restore();
    this.describe();
    this.drawOver(false);
  }

  drawBand(c, { data, color, from, to, smooth }, alpha) {
    if (!data.lo || (smooth && alpha < 0.1)) return;
    c.globalAlpha = smooth ? alpha / 2 : alpha;
    c.fillStyle = color;
    c.beginPath();
    for (let i = from; i < to; i++) c.lineTo(this.px(data.x[i]), this.py(data.hi[i]));
    for (let i = to - 1; i >= from; i--) c.lineTo(this.px(data.x[i]), this.py(data.lo[i]));
    c.fill();
    c.globalAlpha = 1;
  }

  drawLine(c, one, many, width = many ? 1 : 1.5) {
    c.strokeStyle = c.fillStyle = one.color;
    c.lineJoin = "round";
    if (one.smooth && !many) { c.globalAlpha = 0.28; this.path(c, one, one.data.y, 1); c.globalAlpha = 1; }
    this.path(c, one, one.smooth || one.data.y, width + (one.smooth && !many ? 0.4 : 0));
    if (one.data.x.length <= 30 && !many)
      for (let i = one.from; i < one.to; i++) dot(c, this.px(one.data.x[i]), this.py(one.data.y[i]), 2.2);
  }

  path(c, { data, from, to }, y, width) {
    c.lineWidth = width;
    c.beginPath();
    for (let i = from; i < to; i++) c.lineTo(this.px(data.x[i]), this.py(y[i]));
    c.stroke();
  }

  drawReferences(c) {
    c.font = "10.5px " + theme.font;
    c.textBaseline = "bottom";
    c.textAlign = "right";
    for (const { value, name, color, inside } of this.references) {
      const y = this.py(value);
      c.strokeStyle = c.fillStyle = color || theme.colors.muted;
      c.lineWidth = 1;
      c.setLineDash([5, 4]);
      line(c, this.left, y, this.left + this.w, y);
      c.setLineDash([]);
      if (!inside) continue; // the others are named in the heading, where they hide no curve
      const high = y < this.top + 15;
      c.fillText(name, this.left + this.w - 4, high ? y + 15 : y - 2);
    }
  }

  describe() {
    const n = this.lines.length, one = this.lines[0], end = one && (one.data.last ?? one.data.y[one.data.y.length - 1]);
    const text = n === 0 ? "no values" : n === 1 ? `last value ${this.spec.format(end)}` : `${n} curves`;
    this.plot.setAttribute("aria-label", `${this.spec.title}: ${text}. Drag to zoom, double-click to reset; `
      + "with the keyboard: arrow keys move the cursor, + and - zoom, Escape resets.");
    const names = this.references.filter(r => !r.inside).map(r => r.name).filter(Boolean);
    const value = h("b", {}, n === 1 ? this.spec.format(end) : "");
    this.note.replaceChildren(names.length ? "┄ " + names.join(", ") : "", value);
  }

  // ---- cursor

  nearest(line, at) {
    const { x } = line.data, i = below(x, at);
    if (i <= 0) return 0;
    if (i >= x.length) return x.length - 1;
    return at - x[i - 1] < x[i] - at ? i - 1 : i;
  }

  drawOver(withTip) {
    if (!this.lines || !this.width) return;
    const c = this.surface(this.over), { at, key } = this.group;
    if (this.drag && Math.abs(this.drag.now - this.drag.start) > 3) {
      const [a, b] = [this.drag.start, this.drag.now].sort((p, q) => p - q);
      c.fillStyle = theme.colors.select;
      c.fillRect(a, this.top, b - a, this.h);
    }
    const emphasised = this.lines.find(l => l.key === (key ?? this.group.emphasis));
    if (emphasised && this.lines.length > 1) {
      c.save();
      c.beginPath(); c.rect(this.left, this.top - 2, this.w, this.h + 4); c.clip();
      c.globalAlpha = 0.6; c.fillStyle = theme.colors.panel; c.fillRect(this.left, this.top - 2, this.w, this.h + 1);
      c.globalAlpha = 1;
      this.drawBand(c, emphasised, 0.2);
      this.drawLine(c, emphasised, false, 2);
      c.restore();
    }
    if (at === null || at < this.x0 || at > this.x1) { this.tip.hidden = true; return; }
    const x = Math.round(this.px(at)) + 0.5;
    c.strokeStyle = theme.colors.axis;
    c.lineWidth = 1;
    line(c, x, this.top, x, this.top + this.h);
    const shown = this.lines.length > 12 && emphasised ? [emphasised] : this.lines.length > 12 ? [] : this.lines;
    for (const one of shown) {
      const i = this.nearest(one, at), value = (one.smooth || one.data.y)[i];
      if (value === undefined) continue;
      c.fillStyle = theme.colors.panel;
      dot(c, this.px(one.data.x[i]), this.py(value), 4);
      c.fillStyle = one.color;
      dot(c, this.px(one.data.x[i]), this.py(value), 2.8);
    }
    if (withTip) this.showTip(at); else this.tip.hidden = true;
  }

  showTip(at) {
    const rows = this.lines.map(one => {
      const i = this.nearest(one, at), { y, lo, hi } = one.data;
      const value = one.smooth ? one.smooth[i] : y[i], format = this.spec.format;
      const wide = lo && hi[i] > lo[i] && !one.smooth && this.lines.length === 1;
      const range = wide ? ` (${format(lo[i])} … ${format(hi[i])})` : "";
      return { one, i, value, text: format(value) + range, place: this.py(value) };
    }).filter(row => row.value !== undefined);
    if (!rows.length) { this.tip.hidden = true; return; }
    const near = this.pointerY ?? this.top;
    const kept = [...rows].sort((a, b) => Math.abs(a.place - near) - Math.abs(b.place - near)).slice(0, 8);
    kept.sort((a, b) => a.place - b.place);
    const head = this.spec.xFormat(kept.length === 1 ? kept[0].one.data.x[kept[0].i] : at);
    const several = this.lines.length > 1;
    const count = rows.length > kept.length ? ` · ${kept.length} of ${rows.length}` : "";
    this.tip.replaceChildren(div("tip-head", head, count), ...kept.map(({ one, text }) =>
      div("tip-row" + (one.key === this.group.key ? " strong" : ""),
        several && swatch(one.color), several && span("tip-name", one.name), h("b", {}, text))));
    this.tip.hidden = false;
    const x = this.px(at), wide = this.tip.offsetWidth, tall = this.tip.offsetHeight;
    const left = x + 14 + wide < this.width ? x + 14 : x - 14 - wide;
    this.tip.style.left = Math.max(0, Math.min(left, this.width - wide)) + "px";
    this.tip.style.top = Math.max(0, Math.min(near - tall / 2, this.height - tall)) + "px";
  }

  // ---- mouse, finger, keyboard

  listen() {
    const place = event => {
      const box = this.plot.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const inside = x => Math.min(Math.max(x, this.left), this.left + this.w);
    this.plot.addEventListener("pointerdown", event => {
      if (event.button || !this.lines) return;
      const [x] = place(event);
      this.drag = { start: inside(x), now: inside(x) };
      this.plot.setPointerCapture(event.pointerId);
    });
    this.plot.addEventListener("pointermove", event => {
      if (!this.lines) return;
      const [x, y] = place(event);
      this.pointerY = y;
      if (this.drag) this.drag.now = inside(x);
      this.group.setCursor(this.x(inside(x)), this.lines.length > 1 ? this.lineAt(inside(x), y) : null, this);
    });
    this.plot.addEventListener("pointerup", () => {
      const drag = this.drag;
      this.drag = null;
      if (drag && Math.abs(drag.now - drag.start) > 6) {
        const range = [this.x(drag.start), this.x(drag.now)].sort((a, b) => a - b);
        this.group.setZoom(range);
      } else if (drag && this.lines.length > 1 && this.spec.onpick) {
        const key = this.lineAt(drag.now, this.pointerY);
        if (key !== null) this.spec.onpick(key);
      }
    });
    const leave = () => { this.drag = null; this.group.setCursor(null); };
    this.plot.addEventListener("pointercancel", leave);
    this.plot.addEventListener("pointerleave", () => { if (!this.drag) leave(); });
    this.plot.addEventListener("blur", leave);
    this.plot.addEventListener("dblclick", () => this.group.setZoom(null));
    this.plot.addEventListener("keydown", event => this.key(event));
  }

  lineAt(px, py) {
    let best = null, distance = 14;
    const at = this.x(px);
    for (const one of this.lines) {
      const i = this.nearest(one, at), d = Math.abs(this.py((one.smooth || one.data.y)[i]) - py);
      if (d < distance) { distance = d; best = one.key; }
    }
    return best;
  }

  key(event) {
    if (!this.lines || event.ctrlKey || event.metaKey || event.altKey) return;
    const wide = this.x1 - this.x0, at = this.group.at ?? (this.x0 + this.x1) / 2;
    const move = { ArrowLeft: -0.02, ArrowRight: 0.02, PageUp: -0.2, PageDown: 0.2 }[event.key];
    this.pointerY = undefined;
    if (move) this.group.setCursor(Math.min(this.x1, Math.max(this.x0, at + move * wide)), null, this);
    else if (event.key === "+" || event.key === "=") this.group.setZoom([at - wide / 4, at + wide / 4]);
    else if (event.key === "-") {
      const range = [Math.max(this.full[0], at - wide), Math.min(this.full[1], at + wide)];
      this.group.setZoom(range[0] <= this.full[0] && range[1] >= this.full[1] ? null : range);
    } else if (event.key === "Escape" || event.key === "0") this.group.setZoom(null);
    else return;
    event.preventDefault();
  }
}

function line(c, x0, y0, x1, y1) { c.beginPath(); c.moveTo(x0, y0); c.lineTo(x1, y1); c.stroke(); }
function dot(c, x, y, radius) { c.beginPath(); c.arc(x, y, radius, 0, 7); c.fill(); }

function swatch(color) { const box = h("i", { class: "swatch" }); box.style.background = color; return box; }

// The number of places below `at`.
function below(x, at) {
  let low = 0, high = x.length;
  while (low < high) { const middle = (low + high) >> 1; if (x[middle] < at) low = middle + 1; else high = middle; }
  return low;
}

// An exponential mean that starts without a bias to 0. The weight is that of a curve of 300 points: a curve of 30
// points is smoothed over the same part of the run, not over ten times as much.
function smoothed(y, of300) {
  const weight = of300 ** (300 / y.length);
  const out = new Float64Array(y.length);
  let mean = 0, sum = 0;
  for (let i = 0; i < y.length; i++) {
    mean = weight * mean + (1 - weight) * y[i];
    sum = weight * sum + (1 - weight);
    out[i] = mean / sum;
  }
  return out;
}
