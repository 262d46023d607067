// One run in detail: why it ended, its attempts, where a step goes, its ranks, its nodes, environment and commands.

const PARTS = [
  "#4477aa", "#66a3c7", "#2f8f7f", "#8fb04a", "#c9a227", "#d9793d",
  "#c4526b", "#8a5aa8", "#5d6bb5", "#7a8290", "#a8866a", "#4d9c5d",
];

function part(title, id, note, ...children) {
  return h("section", { class: "part", id }, div("partbar", h("h2", {}, title), note && small(note)), children);
}

function bullets(texts, name = "evidence") { return h("ul", { class: name }, texts.map(text => h("li", {}, text))); }

function sized(element, property, share) { element.style[property] = 100 * share + "%"; return element; }

// The measured values of a run as tiles: "2.82 (perplexity 16.9)" and "42 of 200" have a second line.
function facts(run) {
  const tiles = run.facts.filter(([label]) => !["checkpoint", "slow rank", "saves"].includes(label));
  const tile = (label, value, ...more) => div("fact", span("label", label), span("value", value), ...more);
  return div("facts", tile("status", statusText(run)), tiles.map(([label, text, planned]) => {
    const [, value, inside, after] = /^(.*?)(?: \((.*)\)| (of .*))?$/s.exec(text), more = inside || after;
    return tile(label, value, more && small(more), planned && small("planned ", planned));
  }));
}

function whyBox(run) {
  if (!run.why) return null;
  const bad = ["failed", "died"].includes(run.status.replace("?", ""));
  const title = bad ? "Why it failed" : `Why it is ${run.status}`;
  return h("section", { class: "why" + (bad ? " bad" : ""), role: "note" },
    h("h3", {}, title, run.why.cause && span("cause", run.why.cause)),
    h("p", {}, run.why.text), run.why.evidence.length > 0 && bullets(run.why.evidence));
}

// ---- attempts on a time line

function timeLine(run) {
  const known = run.attempts.filter(attempt => attempt.started !== null);
  if (!known.length) return null;
  known.forEach((attempt, i) => {
    const next = known[i + 1], last = !next;
    const unknown = run.live ? data.created : attempt.started + trainedSince(run, attempt.from);
    attempt.end = Math.max(attempt.started, attempt.ended ?? (last ? unknown : next.started));
    attempt.kind = attempt.ended === null ? (last && run.live ? "running" : "lost")
      : { 0: "done", 75: "preempted" }[attempt.code] || "failed";
    attempt.says = attempt.why || { running: "still running", lost: "killed" }[attempt.kind] || attempt.kind;
  });
  const first = known[0].started, whole_s = Math.max(1, ...known.map(attempt => attempt.end - first));
  const label = `${known.length} ${known.length === 1 ? "start" : "starts"} within ${duration(whole_s)}`;
  const bar = h("div", { class: "bar", role: "img", "aria-label": label }, known.map((attempt, i) => {
    const title = `attempt ${i + 1}: ${duration(attempt.end - attempt.started)}, ${attempt.says}`;
    const piece = h("span", { class: "piece " + attempt.kind, title }, known.length <= 12 ? i + 1 : "");
    sized(piece, "left", (attempt.started - first) / whole_s);
    return sized(piece, "width", (attempt.end - attempt.started) / whole_s);
  }));
  const { values, step } = timeTicks(0, whole_s, 6);
  const axis = h("div", { class: "baraxis", "aria-hidden": "true" }, values.filter(value => value <= whole_s * 0.96)
    .map(value => sized(h("span", {}, timeLabel(value, step)), "left", value / whole_s)));
  const hidden = Math.max(0, known.length - 20);
  const note = hidden > 0 && h("p", { class: "hint" }, `${hidden} earlier attempts are in the bar only.`);
  return part("Attempts", "timeline", label, div("panel pad", bar, axis, attemptTable(run, known, hidden), note));
}

// Seconds of the steps since one of them: how long an attempt lasted, at least, that was killed.
function trainedSince(run, step) {
  const [steps, seconds] = run.axes.seconds || [[0], [0]], i = below(steps, (step || 0) + 1);
  return Math.max(0, seconds.at(-1) - (step && seconds[i - 1] || 0));
}

function attemptTable(run, known, hidden) {
  const heads = [["", "number"], ["started"], ["for", "number"], ["steps", "number"], ["nodes"], ["ended"]];
  const number = (...children) => h("td", { class: "number" }, ...children);
  const rows = known.slice(hidden).map((attempt, i) => h("tr", {},
    number(i + hidden + 1),
    h("td", {}, moment(attempt.started)),
    number(attempt.kind === "lost" ? "–" : duration(attempt.end - attempt.started)),
    number(`${whole(attempt.from)} → ${attempt.to === null ? "?" : whole(attempt.to)}`),
    h("td", {}, attempt.nodes || "–"),
    h("td", {}, span("state " + attempt.kind, attempt.says))));
  return div("scroll", h("table", { class: "plain attempts" },
    h("thead", {}, h("tr", {}, heads.map(([text, name]) => h("th", { scope: "col", class: name }, text)))),
    h("tbody", {}, rows)));
}

// ---- where a step goes

function stacked(title, parts, format, total) {
  const sum = parts.reduce((before, [, value]) => before + value, 0), scale = Math.max(total || 0, sum);
  const known = parts.map(([name, value], i) => ({ name: words(name), value, color: PARTS[i % PARTS.length] }));
  const label = `${title}: ` + known.map(({ name, value }) => `${name} ${format(value)}`).join(", ");
  const bar = h("div", { class: "stack", role: "img", "aria-label": label }, known.map(({ name, value, color }) => {
    const piece = h("span", { title: `${name}: ${format(value)}, ${percent(value / sum)}` });
    piece.style.background = color;
    return sized(piece, "width", value / scale);
  }));
  const sorted = [...known].sort((a, b) => b.value - a.value);
  const legend = h("ul", { class: "legend" }, sorted.map(({ name, value, color }) =>
    h("li", {}, swatch(color), name, " ", h("b", {}, format(value)), small(" ", percent(value / sum)))));
  const head = div("stackhead", h("span", {}, title), h("b", {}, format(sum)), total && small(" of ", format(total)));
  return div("stacked", head, bar, legend);
}

function stepSection(run) {
  const bars = run.step_parts.map(one => stacked(one.title, one.parts, duration));
  const memory = run.memory_parts;
  if (memory) bars.push(stacked("memory of a GPU, planned", memory.parts, gib, memory.limit));
  return bars.length ? part("Where a step goes", "step", "", div("panel pad", bars)) : null;
}

// ---- which messages the profiled steps sent, and who waited for whom

function commSection(run) {
  const sent = run.communication;
  if (!sent) return null;
  const cell = (tag, text, i) => h(tag, { class: i ? "number" : "" }, text);
  const table = h("table", { class: "plain" },
    h("thead", {}, h("tr", {}, sent.heads.map((text, i) => cell("th", text, i)))),
    h("tbody", {}, sent.messages.map(row => h("tr", {}, row.map((text, i) => cell("td", text, i))))));
  return part("Communication", "communication", "profiled steps", div("panel pad", div("scroll", table),
    h("p", { class: "hint" }, sent.hint), sent.waits.length > 0 && bullets(sent.waits),
    sent.note && h("p", { class: "hint" }, sent.note)));
}

// ---- ranks as a strip: a row for each rank, a column for each record, the colour is the time of its own work

function rankSection(run) {
  const ranks = run.ranks, children = [];
  if (!ranks || ranks.count < 2) return null;
  if (ranks.own.length > 1) children.push(strip(ranks));
  if (ranks.medians.own_s?.length) children.push(rankBars(ranks.medians));
  const events = run.events.map(({ step, text }) => (step === null ? "" : `step ${whole(step)}: `) + text);
  if (events.length) children.push(bullets(events));
  if (!children.length) return null;
  const note = ranks.ranks_per_row > 1 ? `; a row is the slowest of ${ranks.ranks_per_row}` : "";
  return part("Step time of each rank", "ranks", `${ranks.count} ranks${note}`, div("panel pad", children));
}

function rankBars({ own_s, data_s, wait_s }) {
  const most = Math.max(...own_s.map((own, i) => own + wait_s[i]), 1e-9);
  const rows = own_s.map((own, i) => {
    const times = { data: data_s[i], own: Math.max(0, own - data_s[i]), wait: wait_s[i] };
    const pieces = Object.entries(times).map(([name, value]) => sized(h("i", { class: name }), "width", value / most));
    const [work, load, wait] = [own, data_s[i], wait_s[i]].map(duration);
    const title = `rank ${i}: own work ${work}, of it data ${load}, waiting ${wait}`;
    return h("div", { class: "rankrow", title }, small(i), span("track", pieces), span("small number", duration(own)));
  });
  const meanings = [["data", "data"], ["own", "own work"], ["wait", "waiting for other ranks"]];
  return [div("rankbars", rows), h("ul", { class: "legend" },
    meanings.map(([name, text]) => h("li", {}, h("i", { class: "swatch " + name }), text)))];
}

function strip(ranks) {
  const rows = ranks.own[0].length, tall = Math.max(4, Math.min(18, Math.floor(260 / rows)));
  const label = "Own work of each rank over the steps, relative to the median rank";
  const canvas = h("canvas", { class: "strip", role: "img", "aria-label": label });
  const says = h("span", {}, "Red is slower than the median rank.");
  const hint = h("p", { class: "hint" }, says, " ", h("span", { class: "ramp", "aria-hidden": "true" }), " 1× … 1.5×");
  const medians = ranks.own.map(column => {
    const known = column.filter(value => value !== null).sort((a, b) => a - b);
    return known[known.length >> 1] || null;
  });
  const draw = () => {
    const w = canvas.clientWidth, ratio = window.devicePixelRatio || 1, each = w / ranks.own.length;
    canvas.width = w * ratio;
    canvas.height = rows * tall * ratio;
    canvas.style.height = rows * tall + "px";
    const c = canvas.getContext("2d");
    c.scale(ratio, ratio);
    ranks.own.forEach((column, i) => column.forEach((value, j) => {
      const slower = value === null || !medians[i] ? null : Math.min(1, Math.max(0, (value / medians[i] - 1) / 0.5));
      c.fillStyle = slower === null ? theme.colors.grid : mix(theme.colors.cool, theme.colors.hot, slower);
      c.fillRect(i * each, j * tall, Math.ceil(each), tall - (tall > 6 ? 1 : 0));
    }));
  };
  canvas.chart = { resized: draw };
  sizes.observe(canvas);
  repaint.push(draw);
  canvas.addEventListener("pointermove", event => {
    const box = canvas.getBoundingClientRect(), j = Math.floor((event.clientY - box.top) / tall);
    const i = Math.floor((event.clientX - box.left) / box.width * ranks.own.length), value = ranks.own[i]?.[j];
    if (missing(value)) return;
    const first = j * ranks.ranks_per_row, last = Math.min(ranks.count, first + ranks.ranks_per_row) - 1;
    const times = medians[i] ? `, ${(value / medians[i]).toFixed(2)} × the median` : "";
    says.textContent = `rank ${first}${last > first ? "–" + last : ""}, step ${whole(ranks.steps[i])}: `
      + `${duration(value)} of own work${times}.`;
  });
  return h("div", {}, canvas, hint);
}

function mix(a, b, t) {
  const parse = text => [1, 3, 5].map(i => parseInt(text.slice(i, i + 2), 16));
  const p = parse(a), q = parse(b);
  return `rgb(${p.map((value, i) => Math.round(value + (q[i] - value) * t)).join(",")})`;
}

// ---- system metrics

function systemSection(run) {
  const system = run.system;
  if (!system) return null;
  systemGroup = new Group();
  const charts = system.charts.map(({ title, unit, limit, lines }) => new Chart({
    title, xFormat: duration, xTicks: timeTicks, xLabel: timeLabel,
    format: value => `${trim(value.toPrecision(3))} ${unit}`,
    lines: () => lines.map((line, i) => ({
      key: i, name: line.name, color: palette()[i % palette().length], data: unpack(line),
    })),
    references: () => limit === null ? []
      : [{ value: limit, name: `limit ${trim(limit.toPrecision(4))} ${unit}`, inside: true }],
  }, systemGroup));
  const troubles = system.troubles.map(({ from, to, text }) =>
    `${duration(Math.max(0, from))}${to > from ? " … " + duration(to) : ""}  ${text}`);
  const note = (system.nodes === 1 ? "1 node" : `${system.nodes} nodes`) + (system.gpus ? `, ${system.gpus} GPUs` : "");
  return part("System", "system", note, troubles.length > 0 && bullets(troubles, "evidence panel pad"),
    div("grid", charts.map(chart => chart.element)));
}

// ---- configuration

function configSection() {
  const { same, differ } = data.settings, several = data.runs.length > 1, differs = Object.keys(differ).length > 0;
  if (!Object.keys(same).length && !differs) return null;
  const label = "filter settings";
  const filter = h("input", { type: "search", placeholder: label, "aria-label": label, oninput: () => show() });
  const unset = h("input", { type: "checkbox", onchange: () => show() });
  const lists = div("settings"), table = div("scroll");
  const show = () => {
    const text = filter.value.trim().toLowerCase();
    const wanted = ([key, value]) => [key, ...[value].flat().map(settingText)].join(" ").toLowerCase().includes(text);
    const shown = Object.entries(same).filter(wanted).filter(([, value]) => value !== null || unset.checked || text);
    lists.replaceChildren(...settingLists(shown));
    table.replaceChildren(differenceTable(Object.entries(differ).filter(wanted)));
  };
  show();
  configSection.show = show;
  const heading = text => h("h3", { class: "tight" }, text);
  const controls = div("controls", filter, h("label", {}, unset, " show unset"));
  return h("section", { class: "part", id: "configuration" },
    div("partbar", h("h2", {}, "Configuration"), controls),
    several && differs && div("panel pad", heading("What differs"), table),
    div("panel pad", several && heading("What all runs share"), lists));
}

function settingLists(entries) {
  const groups = new Map();
  for (const [key, value] of entries) {
    const dot = key.indexOf("."), group = dot < 0 ? "general" : key.slice(0, dot);
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push([h("dt", {}, key.slice(dot + 1)), h("dd", {}, String(value))]);
  }
  return [...groups].map(([group, list]) => div("settinggroup", h("h4", {}, group), h("dl", {}, list)));
}

function differenceTable(entries) {
  const runs = shownRuns().slice(0, 60);
  const heads = runs.map(run => h("th", { scope: "col" }, swatch(run.color), run.name));
  const rows = entries.map(([key, values]) => h("tr", {}, h("th", { scope: "row" }, key),
    runs.map(run => h("td", {}, settingText(values[run.index])))));
  return h("table", { class: "plain diff" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), heads)), h("tbody", {}, rows));
}

// ---- environment and commands

function environmentSection(run) {
  const rows = run.environment.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
  return part("Environment", "environment", "", h("dl", { class: "panel pad environment" }, rows));
}

function commandSection(run) {
  const rows = run.commands.map(([what, command]) => {
    const code = h("code", { tabindex: 0 }, command);
    const copy = button("quiet", async () => {
      try {
        await navigator.clipboard.writeText(command);
        copy.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(code);
        copy.textContent = "press Ctrl+C";
      }
      setTimeout(() => { copy.textContent = "copy"; }, 1500);
    }, { "aria-label": `copy the command: ${what}` }, "copy");
    return div("command", small(what), code, copy);
  });
  return part("Commands", "commands", "", div("panel pad commands", rows));
}
