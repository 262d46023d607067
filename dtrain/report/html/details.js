// One run in detail: why it ended, its attempts, where a step goes, its ranks, its nodes, environment and commands.

const PARTS = ["#4477aa", "#66a3c7", "#2f8f7f", "#8fb04a", "#c9a227", "#d9793d", "#c4526b", "#8a5aa8", "#5d6bb5", "#7a8290", "#a8866a", "#4d9c5d"];

function facts(run) {
  const tiles = run.facts.filter(([label]) => !["checkpoint", "slow rank", "saves"].includes(label));
  return h("div", { class: "facts" },
    h("div", { class: "fact" }, h("span", { class: "label" }, "status"), h("span", { class: "value" }, statusText(run))),
    tiles.map(([label, value, planned]) => {
      const [, number, rest] = /^(.*?)(?: \((.*)\)| (of .*))?$/s.exec(value).filter((v, i) => i < 2 || v !== undefined);
      return h("div", { class: "fact" }, h("span", { class: "label" }, label), h("span", { class: "value" }, number),
        rest && h("span", { class: "small" }, rest), planned && h("span", { class: "small" }, "planned ", planned));
    }));
}

function whyBox(run) {
  if (!run.why) return null;
  const bad = ["failed", "died"].includes(run.status.replace("?", ""));
  return h("section", { class: "why" + (bad ? " bad" : ""), role: "note" },
    h("h3", {}, bad ? "Why it failed" : `Why it is ${run.status}`, run.why.cause && h("span", { class: "cause" }, run.why.cause)),
    h("p", {}, run.why.text),
    run.why.evidence.length > 0 && h("ul", { class: "evidence" }, run.why.evidence.map(text => h("li", {}, text))));
}

// ---- attempts on a time line

function timeLine(run) {
  const known = run.attempts.filter(a => a.started !== null);
  if (!known.length) return null;
  const now = run.live ? Math.max(data.created, known[known.length - 1].started) : null;
  const ends = known.map((a, i) => a.ended ?? (i + 1 < known.length ? known[i + 1].started : now ?? a.started + Math.max(1, run.results.wall_s || 1)));
  const first = known[0].started, last = Math.max(...ends, first + 1), span = last - first;
  const kind = (a, i) => a.ended === null ? (i === known.length - 1 && run.live ? "running" : "lost") : a.code === 0 ? "done" : a.code === 75 ? "preempted" : "failed";
  const bar = h("div", { class: "bar", role: "img", "aria-label": `${known.length} attempts within ${duration(span)}` }, known.map((a, i) => {
    const piece = h("span", { class: "piece " + kind(a, i), title: `attempt ${i + 1}: ${duration(ends[i] - a.started)}, ${a.why || kind(a, i)}` }, known.length <= 12 ? String(i + 1) : "");
    piece.style.left = 100 * (a.started - first) / span + "%";
    piece.style.width = `max(2px, ${100 * (ends[i] - a.started) / span}%)`;
    return piece;
  }));
  const { values, step } = timeTicks(0, span, 6);
  const axis = h("div", { class: "baraxis", "aria-hidden": "true" }, values.filter(v => v <= span * 0.96).map(v => { const t = h("span", {}, timeLabel(v, step)); t.style.left = 100 * v / span + "%"; return t; }));
  const newest = known.slice(-20), hidden = known.length - newest.length;
  const table = h("div", { class: "scroll" }, h("table", { class: "plain attempts" },
    h("thead", {}, h("tr", {}, ["", "started", "for", "steps", "nodes", "ended"].map((t, i) => h("th", { scope: "col", class: i === 2 || i === 3 ? "number" : null }, t)))),
    h("tbody", {}, newest.map((a, j) => {
      const i = j + hidden;
      return h("tr", {}, h("td", { class: "number" }, i + 1), h("td", {}, moment(a.started)), h("td", { class: "number" }, a.ended === null && !run.live ? "–" : duration(ends[i] - a.started)),
        h("td", { class: "number" }, `${whole(a.from)} → ${a.to === null ? "?" : whole(a.to)}`), h("td", {}, a.nodes || "–"),
        h("td", {}, h("span", { class: "state " + kind(a, i) }, a.why || (kind(a, i) === "running" ? "still running" : "killed"))));
    }))));
  return part("Attempts", "timeline", `${known.length} ${known.length === 1 ? "start" : "starts"} within ${duration(span)}`, h("div", { class: "panel pad" }, bar, axis, table,
    hidden > 0 && h("p", { class: "hint" }, `${hidden} earlier attempts are in the bar only.`)));
}

// ---- where a step goes

function stacked(title, parts, format, total) {
  const sum = parts.reduce((a, [, v]) => a + v, 0), scale = Math.max(total || 0, sum);
  const color = (name, i) => PARTS[i % PARTS.length];
  const bar = h("div", { class: "stack", role: "img", "aria-label": `${title}: ${parts.map(([n, v]) => `${words(n)} ${format(v)}`).join(", ")}` }, parts.map(([name, value], i) => {
    const piece = h("span", { title: `${words(name)}: ${format(value)}, ${percent(value / sum)}` });
    piece.style.width = 100 * value / scale + "%"; piece.style.background = color(name, i);
    return piece;
  }));
  const sorted = parts.map(([name, value], i) => [name, value, i]).sort((a, b) => b[1] - a[1]);
  return h("div", { class: "stacked" }, h("div", { class: "stackhead" }, h("span", {}, title), h("b", {}, format(sum)), total && h("span", { class: "small" }, " of ", format(total))), bar,
    h("ul", { class: "legend" }, sorted.map(([name, value, i]) => h("li", {}, swatch(color(name, i)), words(name), " ", h("b", {}, format(value)), h("span", { class: "small" }, " ", percent(value / sum))))));
}

function stepSection(run) {
  const bars = run.step_parts.map(one => stacked(one.title, one.parts, duration));
  const memory = run.memory_parts && stacked("memory of a GPU, planned", run.memory_parts.parts, gib, run.memory_parts.limit);
  if (!bars.length && !memory) return null;
  return part("Where a step goes", "step", "", h("div", { class: "panel pad" }, bars, memory));
}

// ---- ranks as a strip: a row for each rank, a column for each record, the colour is the time of its own work

function rankSection(run) {
  const ranks = run.ranks;
  if (!ranks || ranks.count < 2) return null;
  const children = [];
  if (ranks.own.length > 1) children.push(strip(ranks));
  const own = ranks.medians.own_s || [];
  if (own.length) {
    const most = Math.max(...own.map((v, i) => v + ranks.medians.wait_s[i]), 1e-9);
    children.push(h("div", { class: "rankbars" }, own.map((value, i) => {
      const wait = ranks.medians.wait_s[i], load = ranks.medians.data_s[i];
      const piece = (cls, v) => { const p = h("i", { class: cls }); p.style.width = 100 * v / most + "%"; return p; };
      return h("div", { class: "rankrow", title: `rank ${i}: own work ${duration(value)}, of it data ${duration(load)}, waiting for others ${duration(wait)}` },
        h("span", { class: "small" }, i), h("span", { class: "track" }, piece("data", load), piece("own", value - load), piece("wait", wait)), h("span", { class: "small number" }, duration(value)));
    })), h("ul", { class: "legend" }, h("li", {}, h("i", { class: "swatch data" }), "data"), h("li", {}, h("i", { class: "swatch own" }), "own work"), h("li", {}, h("i", { class: "swatch wait" }), "waiting for other ranks")));
  }
  if (run.events.length) children.push(h("ul", { class: "evidence" }, run.events.map(e => h("li", {}, e.step === null ? "" : `step ${whole(e.step)}: `, e.text))));
  if (!children.length) return null;
  const note = `${ranks.count} ranks` + (ranks.ranks_per_row > 1 ? `; a row is the slowest of ${ranks.ranks_per_row}` : "");
  return part("Step time of each rank", "ranks", note, h("div", { class: "panel pad" }, children));
}

function strip(ranks) {
  const rows = ranks.own[0].length, tall = Math.max(4, Math.min(18, Math.floor(260 / rows)));
  const canvas = h("canvas", { class: "strip", role: "img", "aria-label": "Own work of each rank over the steps, relative to the median rank" });
  const tip = h("p", { class: "hint" }, "Red is slower than the median rank. ", h("span", { class: "ramp", "aria-hidden": "true" }), " 1× … 1.5×");
  const middle = column => { const known = column.filter(v => v !== null).sort((a, b) => a - b); return known.length ? known[known.length >> 1] : null; };
  const medians = ranks.own.map(middle);
  const draw = () => {
    const w = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
    if (!w) return;
    canvas.width = w * ratio; canvas.height = rows * tall * ratio;
    canvas.style.height = rows * tall + "px";
    const c = canvas.getContext("2d");
    c.scale(ratio, ratio);
    const each = w / ranks.own.length;
    ranks.own.forEach((column, i) => column.forEach((value, j) => {
      const t = value === null || !medians[i] ? null : Math.min(1, Math.max(0, (value / medians[i] - 1) / 0.5));
      c.fillStyle = t === null ? theme.colors.grid : mix(theme.colors.cool, theme.colors.hot, t);
      c.fillRect(i * each, j * tall, Math.ceil(each), tall - (tall > 6 ? 1 : 0));
    }));
  };
  canvas.chart = { resized: draw, invalidate: draw };
  sizes.observe(canvas);
  repaint.push(draw);
  const text = tip.firstChild;
  canvas.addEventListener("pointermove", event => {
    const box = canvas.getBoundingClientRect(), i = Math.floor((event.clientX - box.left) / box.width * ranks.own.length), j = Math.floor((event.clientY - box.top) / tall);
    const value = ranks.own[i]?.[j], first = j * ranks.ranks_per_row;
    if (value === undefined) return;
    text.textContent = `rank ${first}${ranks.ranks_per_row > 1 ? "–" + Math.min(ranks.count - 1, first + ranks.ranks_per_row - 1) : ""}, step ${whole(ranks.steps[i])}: ${duration(value)} of own work, ${value && medians[i] ? (value / medians[i]).toFixed(2) : "–"} × the median. `;
  });
  return h("div", {}, canvas, tip);
}

function mix(a, b, t) {
  const parse = text => [1, 3, 5].map(i => parseInt(text.slice(i, i + 2), 16));
  const p = parse(a), q = parse(b);
  return `rgb(${p.map((v, i) => Math.round(v + (q[i] - v) * t)).join(",")})`;
}

// ---- system metrics

function systemSection(run) {
  if (!run.system) return null;
  const group = new Group();
  const note = `${run.system.nodes} ${run.system.nodes === 1 ? "node" : "nodes"}` + (run.system.gpus ? `, ${run.system.gpus} GPUs` : "");
  const charts = run.system.charts.map(one => new Chart({
    title: one.title, format: v => `${trim(v.toPrecision(3))} ${one.unit}`, xFormat: duration, xTicks: timeTicks, xLabel: timeLabel,
    lines: () => one.lines.map((line, i) => ({ key: i, name: line.name, color: palette()[i % palette().length], data: unpack(line) })),
    references: () => one.limit === null ? [] : [{ value: one.limit, name: `limit ${trim(one.limit.toPrecision(4))} ${one.unit}`, inside: true }],
  }, group));
  systemGroup = group;
  const troubles = run.system.troubles.length > 0 && h("ul", { class: "evidence panel pad" }, run.system.troubles.map(t => h("li", {}, `${duration(Math.max(0, t.from))}${t.to > t.from ? " … " + duration(t.to) : ""}  ${t.text}`)));
  return part("System", "system", note, troubles, h("div", { class: "grid" }, charts.map(c => c.element)));
}

// ---- configuration

function configSection() {
  const { same, differ } = data.settings;
  const several = data.runs.length > 1;
  if (!Object.keys(same).length && !Object.keys(differ).length) return null;
  const filter = h("input", { type: "search", placeholder: "filter settings", "aria-label": "filter settings", oninput: () => show() });
  const unset = h("input", { type: "checkbox", onchange: () => show() });
  const lists = h("div", { class: "settings" });
  const table = h("div", { class: "scroll" });
  const show = () => {
    const text = filter.value.trim().toLowerCase();
    const wanted = ([key, value]) => (key + " " + (Array.isArray(value) ? value.map(settingText).join(" ") : settingText(value))).toLowerCase().includes(text);
    const groups = new Map();
    for (const [key, value] of Object.entries(same).filter(wanted)) {
      if (value === null && !unset.checked && !text) continue;
      const dot = key.indexOf("."), group = dot < 0 ? "" : key.slice(0, dot);
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push([dot < 0 ? key : key.slice(dot + 1), value]);
    }
    lists.replaceChildren(...[...groups].map(([group, entries]) => h("div", { class: "settinggroup" }, h("h4", {}, group || "general"),
      h("dl", {}, entries.map(([key, value]) => [h("dt", {}, key), h("dd", {}, value === null ? "null" : String(value))])))));
    const runs = data.runs.filter(run => state.selected.has(run.index)).slice(0, 60);
    const rows = Object.entries(differ).filter(wanted);
    table.replaceChildren(h("table", { class: "plain diff" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), runs.map(run => h("th", { scope: "col" }, swatch(run.color), run.name)))),
      h("tbody", {}, rows.map(([key, values]) => h("tr", {}, h("th", { scope: "row" }, key), runs.map(run => h("td", {}, settingText(values[run.index]))))))));
  };
  show();
  configSection.show = show;
  return h("section", { class: "part", id: "configuration" }, h("div", { class: "partbar" }, h("h2", {}, "Configuration"), h("div", { class: "controls" }, filter, h("label", {}, unset, " show unset"))),
    several && Object.keys(differ).length > 0 && h("div", { class: "panel pad" }, h("h3", { class: "tight" }, "What differs"), table),
    h("div", { class: "panel pad" }, several && h("h3", { class: "tight" }, "What all runs share"), lists));
}

// ---- environment and commands

function environmentSection(run) {
  return part("Environment", "environment", "", h("dl", { class: "panel pad environment" }, run.environment.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
}

function commandSection(run) {
  if (!run.commands.length) return null;
  return part("Commands", "commands", "", h("div", { class: "panel pad commands" }, run.commands.map(([what, command]) => {
    const code = h("code", { tabindex: 0 }, command);
    const button = h("button", { type: "button", class: "quiet", "aria-label": `copy the command to ${what}` }, "copy");
    button.addEventListener("click", async () => {
      try { await navigator.clipboard.writeText(command); button.textContent = "copied"; } catch { getSelection().selectAllChildren(code); button.textContent = "press Ctrl+C"; }
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
    return h("div", { class: "command" }, h("span", { class: "small" }, what), code, button);
  })));
}

function part(title, id, note, ...children) {
  return h("section", { class: "part", id }, h("div", { class: "partbar" }, h("h2", {}, title), note && h("span", { class: "small" }, note)), children);
}
