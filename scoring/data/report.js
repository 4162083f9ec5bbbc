"use strict";

// Text of rollouts reaches the page through textContent alone, and Plotly, which reads markup, through `plain`.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 4 });
const PAGE = 25;
const LISTED = 12;
const LEVELS = 12;
const FLAT = { l: 8, r: 12, t: 8, b: 8 };
const IDS = new Set(["uid", "group_id", "rollout_id", "step", "micro_batch", "rank"]);
const LABELS = {
  micro_batch: "micro-batch", group_id: "group", rollout_id: "rollout", raw_tokens: "raw tokens", tokens: "forwarded",
  trained_tokens: "trained tokens", raw_pairs: "raw pairs", share: "of the largest", packing_ratio: "packing ratio",
  trained_samples: "trained samples", idle: "idle attention",
};

const show = (value) => {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  return value !== 0 && Math.abs(value) < 1e-3 ? String(Number(value.toPrecision(4))) : number.format(value);
};
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const sum = (values) => values.reduce((total, value) => total + value, 0);
const most = (values) => values.reduce((a, b) => Math.max(a, b)); // Math.max(...values) takes so many alone
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// Charts

function layout(more) {
  const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true };
  const { xaxis, yaxis, ...rest } = more;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
    font: { color: css("--text"), family: getComputedStyle(document.body).fontFamily, size: 13 },
    margin: { l: 8, r: 12, t: 36, b: 8 }, legend: { orientation: "h", y: 1, yanchor: "bottom", x: 0 },
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--text") } },
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, ...rest,
    ...(rest.yaxis2 ? { yaxis2: { ...axis, ...rest.yaxis2 } } : {}),
  };
}

function draw(id, traces, more, label) {
  const config = { responsive: true, displaylogo: false, displayModeBar: false };
  const chart = byId(id);
  chart.setAttribute("role", "img");
  chart.setAttribute("aria-label", label);
  return Plotly.react(chart, traces, layout(more), config);
}

function nothing(id, text) {
  const chart = byId(id);
  chart.className = "";
  chart.replaceChildren(element("p", text, { class: "about" }));
}

function drawSteps() {
  const steps = data.steps;
  if (!steps.step.length) return nothing("steps-chart", "No optimizer step was finished.");
  const raw = sum(steps.raw_tokens), forwarded = sum(steps.tokens);
  const trained = steps.trained_samples.map((count, i) => (steps.samples[i] ? count / steps.samples[i] : null));
  const ratio = steps.packing_ratio.map((value) => `packing ratio ${value.toFixed(2)}`);
  const lines = { type: "scatter", mode: "lines+markers", yaxis: "y2" };
  const caption = `${show(raw)} raw tokens, ${show(forwarded)} forwarded: ${(raw / forwarded).toFixed(2)} times fewer, ` +
    `in ${show(steps.step.length)} optimizer steps.`;
  byId("steps-caption").textContent = caption;
  return draw("steps-chart", [
    { type: "bar", name: "raw tokens", x: steps.step, y: steps.raw_tokens, marker: { color: css("--raw") } },
    { type: "bar", name: "forwarded", x: steps.step, y: steps.tokens, marker: { color: css("--accent") }, hovertext: ratio },
    { ...lines, name: "mean reward", x: steps.step, y: steps.reward, line: { color: css("--trained") } },
    { ...lines, name: "share trained", x: steps.step, y: trained, line: { color: css("--bad"), dash: "dot" } },
  ], {
    barmode: "group", bargap: 0.25, hovermode: "x unified",
    xaxis: { title: { text: "optimizer step" }, anchor: "y2", ...(steps.step.length < 25 ? { dtick: 1 } : {}) },
    yaxis: { title: { text: "tokens" }, domain: [0.42, 1] },
    yaxis2: { title: { text: "per sample" }, domain: [0, 0.34], rangemode: "tozero" },
  }, caption);
}

function drawBalance() {
  const rows = data.rows;
  if (!rows.step.length) return nothing("balance-chart", "No row was packed.");
  const batches = new Map();
  rows.step.forEach((step, i) => {
    const key = `${step}.${rows.micro_batch[i]}`;
    if (!batches.has(key)) batches.set(key, batches.size);
  });
  const ranks = 1 + most(rows.rank);
  const grid = () => Array.from({ length: ranks }, () => Array(batches.size).fill(null));
  const z = grid(), text = grid();
  rows.step.forEach((step, i) => {
    const [y, x] = [rows.rank[i], batches.get(`${step}.${rows.micro_batch[i]}`)];
    z[y][x] = rows.share[i];
    text[y][x] = `step ${step}, micro-batch ${rows.micro_batch[i]}, rank ${rows.rank[i]}<br>` +
      `${show(rows.samples[i])} samples, ${show(rows.tokens[i])} tokens forwarded of ${show(rows.raw_tokens[i])}<br>` +
      `attention: ${(100 * rows.share[i]).toFixed(0)} % of the micro-batch's largest row`;
  });
  const busy = sum(rows.pairs) / sum(rows.pairs.map((pairs, i) => pairs / rows.share[i]));
  const caption = `A column a micro-batch; ranks are busy ${(100 * busy).toFixed(1)} % of the time that attention takes.`;
  byId("balance-caption").textContent = caption;
  return draw("balance-chart", [{
    type: "heatmap", z, text, x: [...batches.keys()], hoverinfo: "text", xgap: batches.size < 60 ? 2 : 0, ygap: 2,
    zmin: 0, zmax: 1, colorscale: [[0, css("--trained")], [0.5, css("--raw")], [1, css("--accent")]],
    colorbar: { thickness: 12, tickformat: ".0%", outlinewidth: 0 },
  }], {
    xaxis: { title: { text: "step . micro-batch" }, type: "category", showgrid: false },
    yaxis: { title: { text: "rank" }, dtick: 1, autorange: "reversed", showgrid: false, tickformat: "d" }, margin: FLAT,
  }, caption);
}

function drawHistogram(id, histogram, title, color) {
  const { centers, counts, width, missing } = histogram;
  if (!counts.length) {
    byId(id.replace("chart", "caption")).textContent = `No sample has a value (${title}).`;
    return Plotly.purge(byId(id));
  }
  const total = sum(counts);
  const caption = `${show(total)} samples` + (missing ? `, ${show(missing)} without a value` : "");
  byId(id.replace("chart", "caption")).textContent = caption;
  const few = width === null;
  return draw(id, [{
    type: "bar", x: few ? centers.map(show) : centers, y: counts, ...(few ? {} : { width }), marker: { color: css(color) },
  }], {
    bargap: few ? 0.3 : 0.02, xaxis: { title: { text: plain(title) }, type: few ? "category" : "linear" },
    yaxis: { title: { text: "samples" } }, margin: FLAT,
  }, `${title}: ${caption}`);
}

function drawReasons() {
  const reasons = [["trained", data.trained], ...data.reasons].reverse();
  const caption = `${show(data.trained)} samples train` +
    (data.reasons.length ? `; not: ${data.reasons.map(([reason, count]) => `${reason} ${show(count)}`).join(", ")}.` : ", all.");
  byId("reasons-caption").textContent = caption;
  return draw("reasons-chart", [{
    type: "bar", orientation: "h", x: reasons.map((reason) => reason[1]), y: reasons.map((reason) => plain(reason[0])),
    marker: { color: reasons.map((_, i) => css(i === reasons.length - 1 ? "--accent" : "--bad")) },
    text: reasons.map((reason) => show(reason[1])), textposition: "outside", cliponaxis: false, hoverinfo: "x",
  }], {
    xaxis: { title: { text: "samples" }, range: [0, 1.2 * Math.max(...reasons.map((reason) => reason[1]), 1)] },
    yaxis: { type: "category" }, margin: FLAT,
  }, caption);
}

// The prefix tree

let level = "row";

function tree() { return data.trees[Number(byId("tree-choice").value)]; }

function treeName(one) {
  const groups = one.groups.length === 1 ? `group ${one.groups[0]}` : `${one.groups.length} groups`;
  return `step ${one.step}, micro-batch ${one.micro_batch}, rank ${one.rank}: ${groups}`;
}

function boxLabel(one, i) { return `${show(one.tokens[i])} x ${show(one.samples[i])}`; }

function drawTree() {
  const one = tree();
  const colour = byId("tree-colour").value;
  const roots = one.parent.map((parent, i) => [parent, one.samples[i]]).filter((root) => root[0] < 0);
  const samples = sum(roots.map((root) => root[1]));
  const values = one[colour].map((value) => (colour === "tokens" ? Math.log10(value) : value));
  const known = values.filter((value) => value !== null);
  const ends = known.length ? [-most(known.map((value) => -value)), most(known)] : [0, 0];
  const diverging = colour === "advantage";
  const limit = Math.max(Math.abs(ends[0]), Math.abs(ends[1])) || 1;
  const [low, high] = diverging ? [-limit, limit] : ends[0] < ends[1] ? ends : [ends[0] - 0.5, ends[0] + 0.5];
  const none = diverging ? 0 : low;
  const scale = diverging
    ? [[0, css("--bad")], [0.5, css("--box-low")], [1, css("--box-high")]]
    : [[0, css("--box-low")], [1, css("--box-high")]];
  const powers = [1, 10, 100, 1000, 10000, 100000].filter((value) => value >= 10 ** low && value <= 10 ** high);
  const ticks = colour === "tokens" ? { tickvals: powers.map(Math.log10), ticktext: powers.map(show) } : {};
  const hover = one.tokens.map((tokens, i) =>
    `${show(tokens)} tokens, from ${show(one.depth[i])} on<br>${show(one.samples[i])} samples share them`);
  const levels = [];
  one.parent.forEach((parent, i) => { levels[i] = parent < 0 ? 2 : levels[parent] + 1; });
  const hidden = levels.some((at) => at > LEVELS);
  const forwarded = sum(one.tokens), raw = sum(one.tokens.map((tokens, i) => tokens * one.samples[i]));
  const caption = `${treeName(one)}; ${show(samples)} samples, ${show(raw)} raw tokens, ${show(forwarded)} forwarded in ` +
    `${show(one.tokens.length)} boxes (tokens x samples).${hidden ? ` ${LEVELS} levels are shown at once.` : ""}`;
  byId("tree-caption").textContent = caption;
  return draw("tree-chart", [{
    type: "icicle", branchvalues: "total", level, sort: false, maxdepth: LEVELS, tiling: { orientation: "v", pad: 1 },
    ids: ["row", ...one.tokens.map((_, i) => `s${i}`)],
    labels: ["row", ...one.tokens.map((_, i) => boxLabel(one, i))],
    parents: ["", ...one.parent.map((parent) => (parent < 0 ? "row" : `s${parent}`))],
    values: [samples, ...one.samples], hovertext: [`${show(samples)} samples`, ...hover], hoverinfo: "text",
    marker: {
      colors: [none, ...values.map((value) => value ?? none)], cmin: low, cmax: high, colorscale: scale,
      showscale: true, colorbar: { thickness: 12, outlinewidth: 0, ...ticks }, line: { width: 0.5, color: css("--card") },
    },
    pathbar: { visible: true, thickness: 22 }, textinfo: "label",
  }], { margin: { l: 0, r: 0, t: 28, b: 0 }, uniformtext: { minsize: 9, mode: "hide" } }, caption);
}

function describe(i) {
  const one = tree();
  const panel = byId("segment");
  if (i === null) {
    return panel.replaceChildren(element("p", "No segment is chosen."));
  }
  const outcome = ["reward", "advantage"].filter((name) => one[name][i] !== null)
    .map((name) => `mean ${name} ${show(one[name][i])}`).join(", ");
  const words = `${show(one.tokens[i])} tokens from ${show(one.depth[i])} on, shared by ${show(one.samples[i])} samples ` +
    `(the first: uid ${one.uid[i]})${outcome ? `; ${outcome}` : ""}. ${data.is_text ? "Text" : "Token ids"}:`;
  return panel.replaceChildren(element("p", words), element("pre", one.text[i]));
}

function choose(i) {
  level = i === null ? "row" : `s${i}`;
  describe(i);
  return drawTree();
}

function listSegments() {
  const one = tree();
  const largest = one.tokens.map((_, i) => i)
    .sort((a, b) => one.tokens[b] * one.samples[b] - one.tokens[a] * one.samples[a]).slice(0, LISTED);
  const columns = {
    tokens: largest.map((i) => one.tokens[i]), samples: largest.map((i) => one.samples[i]),
    "from token": largest.map((i) => one.depth[i]), "saved tokens": largest.map((i) => one.tokens[i] * (one.samples[i] - 1)),
    [data.is_text ? "text" : "token ids"]: largest.map((i) => one.text[i]),
  };
  const host = byId("segments");
  host.replaceChildren(table(columns, { title: "Largest segments", search: false, labels: {}, action: {
    name: "Show", run: (at) => choose(largest[at]),
  } }));
}

function setUpTrees() {
  if (!data.trees.length) return byId("trees-body").replaceChildren(element("p", "No tokens were kept.", { class: "about" }));
  data.trees.forEach((one, i) => byId("tree-choice").append(element("option", treeName(one), { value: i })));
  const start = () => { listSegments(); return choose(null); };
  byId("tree-choice").addEventListener("change", start);
  byId("tree-colour").addEventListener("change", drawTree);
  byId("tree-root").addEventListener("click", () => choose(null));
  start();
  byId("tree-chart").on("plotly_icicleclick", (event) => {
    const id = event.points[0].id;
    level = event.nextLevel || "row";
    describe(id && id !== "row" ? Number(id.slice(1)) : null);
  });
}

// Tables

function table(columns, { title, search = true, labels = LABELS, action = null }) {
  const names = Object.keys(columns);
  const size = names.length ? columns[names[0]].length : 0;
  const numeric = new Set(names.filter((name) => columns[name].every((value) => value === null || typeof value === "number")));
  const host = element("div");
  const status = element("span", "", { role: "status" });
  let order = [...Array(size).keys()], sorted = null, rising = true, page = 0, wanted = "";

  const body = element("tbody"), head = element("tr"), made = element("table");
  made.append(element("thead"), body);
  made.setAttribute("aria-label", title);
  made.querySelector("thead").append(head);
  names.forEach((name) => {
    const cell = element("th", undefined, { scope: "col", "aria-sort": "none", class: numeric.has(name) ? "number" : "" });
    const button = element("button", labels[name] || name, { type: "button" });
    button.append(element("span", "", { class: "arrow", "aria-hidden": "true" }));
    button.addEventListener("click", () => { rising = sorted === name ? !rising : true; sorted = name; page = 0; update(); });
    cell.append(button);
    head.append(cell);
  });
  if (action) head.append(element("th", undefined, { scope: "col" }));

  if (search) {
    const input = element("input", undefined, { type: "search", placeholder: "any cell" });
    const label = element("label", `Search ${title.toLowerCase()}`);
    const controls = element("div", undefined, { class: "controls" });
    input.addEventListener("input", () => { wanted = input.value.trim().toLowerCase(); page = 0; update(); });
    label.append(input);
    controls.append(label);
    host.append(controls);
  }
  const scroll = element("div", undefined, { class: "scroll", tabindex: 0, role: "region", "aria-label": title });
  scroll.append(made);
  const turn = (text, by) => {
    const button = element("button", text, { type: "button" });
    button.addEventListener("click", () => { page += by; update(); });
    return button;
  };
  const back = turn("Previous", -1), forward = turn("Next", 1), pages = element("div", undefined, { class: "pages" });
  pages.append(back, forward, status);
  host.append(scroll, pages);

  const cellText = (name, i) => (IDS.has(name) ? String(columns[name][i] ?? "") : show(columns[name][i]));

  function compare(a, b) {
    const [x, y] = [columns[sorted][a], columns[sorted][b]];
    if (x === null || y === null) return (x === null) - (y === null) || a - b;
    const difference = numeric.has(sorted) ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
    return (rising ? difference : -difference) || a - b;
  }

  function found() {
    const all = [...Array(size).keys()];
    return wanted ? all.filter((i) => names.some((name) => cellText(name, i).toLowerCase().includes(wanted))) : all;
  }

  function update() {
    order = found();
    if (sorted !== null) order.sort(compare);
    const last = Math.max(Math.ceil(order.length / PAGE) - 1, 0);
    page = Math.min(Math.max(page, 0), last);
    const shown = order.slice(page * PAGE, (page + 1) * PAGE);
    body.replaceChildren(...shown.map((i) => {
      const row = element("tr");
      names.forEach((name) => {
        const text = cellText(name, i);
        const cell = element("td", text, { class: numeric.has(name) ? "number" : "" });
        if (text.length > 40) cell.title = text;
        row.append(cell);
      });
      if (action) {
        const button = element("button", action.name, { type: "button", "aria-label": `${action.name} segment ${i + 1}` });
        button.addEventListener("click", () => action.run(i));
        const cell = element("td");
        cell.append(button);
        row.append(cell);
      }
      return row;
    }));
    [...head.children].slice(0, names.length).forEach((cell, i) => {
      const own = names[i] === sorted;
      cell.setAttribute("aria-sort", own ? (rising ? "ascending" : "descending") : "none");
      cell.querySelector(".arrow").textContent = own ? (rising ? "\u2191" : "\u2193") : "";
    });
    back.disabled = page === 0;
    forward.disabled = page === last;
    pages.hidden = !search && last === 0;
    status.textContent = order.length
      ? `${show(page * PAGE + 1)} to ${show(page * PAGE + shown.length)} of ${show(order.length)}`
      : "nothing found";
  }
  update();
  return host;
}

// The page

function drawReward() { return drawHistogram("reward-chart", data.rewards[Number(byId("reward-choice").value)], rewardName(), "--accent"); }
function rewardName() { return data.rewards[Number(byId("reward-choice").value)].name; }

function drawAll() {
  drawSteps();
  drawBalance();
  if (data.trees.length) drawTree();
  drawReward();
  drawHistogram("advantage-chart", data.advantage, "advantage", "--trained");
  drawReasons();
}

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").setAttribute("aria-pressed", String(dark));
}

function start() {
  byId("title").textContent = data.title;
  data.summary.forEach(([name, value]) => {
    const entry = element("div");
    entry.append(element("dt", name), element("dd", value));
    byId("summary").append(entry);
  });
  data.notes.forEach((note) => byId("notes").append(element("li", note)));
  data.rewards.forEach((reward, i) => byId("reward-choice").append(element("option", reward.name, { value: i })));
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
  byId("theme").addEventListener("click", () => { setTheme(byId("theme").getAttribute("aria-pressed") !== "true"); drawAll(); });
  byId("reward-choice").addEventListener("change", drawReward);
  setUpTrees();
  drawAll();
  byId("samples-table").append(table(data.samples, { title: "Samples" }));
  byId("rows-table").append(table(data.rows, { title: "Rows" }));
  byId("steps-table").append(table(data.steps, { title: "Steps" }));
  if (Object.keys(data.differences).length) {
    byId("replay").hidden = false;
    byId("replay-table").append(table(data.differences, { title: "Replayed samples" }));
  }
  document.documentElement.dataset.ready = "true";
}

start();
