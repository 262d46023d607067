// Elements and texts. Whatever comes from a run is written as a text node or an attribute, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const div = (name, ...children) => h("div", { class: name }, ...children);
const span = (name, ...children) => h("span", { class: name }, ...children);
const small = (...children) => span("small", ...children);
const button = (name, onclick, attributes, ...children) =>
  h("button", { type: "button", class: name, onclick, ...attributes }, ...children);

// 124.4M, 65.5K, 512
function si(n) {
  if (n === null || n === undefined || !isFinite(n)) return "–";
  if (n !== 0 && Math.abs(n) < 1) return trim(n.toPrecision(3));
  const units = ["", "K", "M", "B", "T"];
  let unit = 0;
  while (Math.abs(n) >= 999.95 && unit < units.length - 1) { n /= 1000; unit++; }
  return trim(n.toFixed(Math.abs(n) < 9.995 ? 2 : 1)) + units[unit];
}

const trim = text => text.includes("e") ? text : text.replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");

function plain(n) {
  if (n === null || n === undefined || !isFinite(n)) return "–";
  const size = Math.abs(n);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return n.toExponential(2);
  if (size >= 10000) return Math.round(n).toLocaleString("en");
  return trim(n.toPrecision(5));
}

// For tables: 6e-4, 0.05, 1024
function brief(n) {
  const size = Math.abs(n);
  if (size !== 0 && (size < 0.01 || size >= 1e7)) return n.toExponential(2).replace(/\.?0*e\+?/, "e");
  return Number.isInteger(n) ? String(n) : trim(n.toPrecision(4));
}

const whole = n => n === null || n === undefined ? "–" : Math.round(n).toLocaleString("en");
const percent = n => n === null || n === undefined ? "–" : (100 * n).toFixed(1) + "%";
const gib = n => n === null || n === undefined ? "–" : n.toFixed(n < 10 ? 2 : 1) + " GiB";

function loss(n) {
  if (n === null || n === undefined) return "–";
  return n === 0 || (Math.abs(n) >= 1e-3 && Math.abs(n) < 1e5) ? n.toFixed(4) : n.toExponential(3);
}

// as dtrain writes them elsewhere: 403 ms, 4.2s, 42s, 1m 23s, 2h 05m, 3d 04h
function duration(seconds) {
  if (seconds === null || seconds === undefined || !isFinite(seconds) || seconds < 0) return "–";
  if (seconds === 0) return "0s";
  if (seconds < 1) return trim((1000 * seconds).toPrecision(3)) + " ms";
  if (seconds < 10) return trim(seconds.toFixed(2)) + "s";
  const t = Math.round(seconds), two = n => String(n).padStart(2, "0");
  if (t < 60) return t + "s";
  if (t < 3600) return `${Math.floor(t / 60)}m ${two(t % 60)}s`;
  if (t < 86400) return `${Math.floor(t / 3600)}h ${two(Math.floor(t / 60) % 60)}m`;
  return `${Math.floor(t / 86400)}d ${two(Math.floor(t / 3600) % 24)}h`;
}

function moment(seconds) {
  const date = new Date(seconds * 1000), two = n => String(n).padStart(2, "0");
  if (isNaN(date)) return "–";
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} `
    + `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

const words = name => name === "matrix_products" ? "matmuls" : name.replaceAll("_", " ");

// Round places between two ends, about `count` of them, and the distance between two.
function ticks(low, high, count) {
  if (!(high > low)) return { values: [low], step: Math.abs(low) || 1 };
  const raw = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(f => f * power).find(f => f >= raw * 0.999);
  return { values: multiples(low, high, step), step };
}

function multiples(low, high, step) {
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) values.push(i * step);
  return values;
}

const TIMES = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800,
];

function timeTicks(low, high, count) {
  const step = TIMES.find(t => (high - low) / t <= count);
  return step && high - low > 3 ? { values: multiples(low, high, step), step } : ticks(low, high, count);
}

// 0, 30s, 1m 30s, 2h: without the parts that are 0
function timeLabel(seconds, step) {
  if (seconds === 0) return "0";
  if (step < 1) return trim(seconds.toFixed(3)) + "s";
  let rest = Math.round(seconds), text = "";
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "m"], [1, "s"]]) {
    if (rest >= size) text += ` ${Math.floor(rest / size)}${unit}`;
    rest %= size;
  }
  return text.trim();
}

function tickLabel(value, step) {
  if (value === 0) return "0";
  if (step >= 1000 || (Math.abs(value) >= 10000 && step >= 10)) return si(value);
  if (step < 1e-3) return trimExponent(value.toExponential(1));
  return value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
}

const trimExponent = text => text.replace(".0e", "e").replace("e+", "e");
