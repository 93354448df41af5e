// The timeline draws what is in view: single actions where few enough are, else one bar per worker and step.
const LINE = DATA.timeline;
const MOST_BARS = 2500;
const FAULT = "#D55E00";
const CONFIG = { displaylogo: false, displayModeBar: false, responsive: true, doubleClick: false };
const TYPES = { i4: Int32Array, f4: Float32Array, f8: Float64Array, u1: Uint8Array };

function unpack(columns) {
  const unpacked = {};
  for (const [name, [type, text]] of Object.entries(columns)) {
    const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
    unpacked[name] = new TYPES[type](bytes.buffer);
  }
  return unpacked;
}

const ACTIONS = unpack(LINE.actions);
const BARS = unpack(LINE.bars);
const ROW_OF = new Map(LINE.workers.map((each, row) => [each.worker, row]));
const LONGEST = ACTIONS.length.reduce((most, each) => Math.max(most, each), 0);
const PRESENT = LINE.kinds.map((_, kind) => ACTIONS.kind.includes(kind));
let view = [0, LINE.end];

// Dark blue is lost on a dark page; waiting is the colour nearest to the page, and a transfer the next one.
const DARK = matchMedia("(prefers-color-scheme: dark)");
const IN_THE_DARK = { "#0072B2": "#4C9FE0", "#E6E9ED": "#2A3039", "#9AA5B1": "#66707D" };
const suited = (value) => JSON.parse(JSON.stringify(value).replace(/#[0-9A-F]{6}/g,
  (light) => (DARK.matches && IN_THE_DARK[light]) || light));
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const escaped = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const shortened = (text, most) => (text.length > most ? text.slice(0, most - 1) + "\u2026" : text);

function themed(layout) {
  const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true };
  return {
    margin: { l: 8, r: 12, t: 28, b: 8 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("ink"), family: getComputedStyle(document.body).fontFamily, size: 13 },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("soft"), font: { color: colour("ink") }, align: "left" },
    ...layout,
    xaxis: { ...axis, ...layout.xaxis },
    yaxis: { ...axis, ...layout.yaxis },
  };
}

// Actions are in the order of their beginning, so those in view stand together.
function actionsIn([from, to]) {
  const found = [];
  for (let i = firstFrom(from - LONGEST); i < ACTIONS.start.length && ACTIONS.start[i] < to; i++) {
    if (ACTIONS.start[i] + ACTIONS.length[i] > from) {
      found.push(i);
      if (found.length > MOST_BARS) return null;
    }
  }
  return found;
}

function firstFrom(time) {
  let low = 0;
  let high = ACTIONS.start.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ACTIONS.start[middle] < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The single actions in view, or nothing: too many, or this page holds only the bars of these steps.
function singleActions() {
  const found = actionsIn(view);
  return found === null || (found.length === 0 && barsIn(view).length > 0) ? null : found;
}

// The bits of a mark, with their pattern; of several patterns the first is drawn.
const MARKS = [
  { bit: 2, pattern: "x", word: "replayed", told: "replayed after a failure", style: "crossed" },
  { bit: 1, pattern: "/", word: "redundant", told: "redundant: for another worker's slot", style: "striped" },
  { bit: 4, pattern: ".", word: "of a slot that was taken over", told: "for a slot that was taken over", style: "dotted" },
];
const patternOf = (mark) => MARKS.find(({ bit }) => mark & bit)?.pattern ?? "";
const said = (mark) => MARKS.filter(({ bit }) => mark & bit).map(({ word }) => ", " + word).join("");

const amount = (ms) => `${Number(ms.toFixed(3))} ms`;

function traceOf(kind, which) {
  const at = which.filter((i) => ACTIONS.kind[i] === kind);
  const some = at.length ? at : [null];
  return {
    type: "bar",
    orientation: "h",
    name: LINE.kinds[kind],
    base: some.map((i) => (i === null ? null : ACTIONS.start[i])),
    x: some.map((i) => (i === null ? null : ACTIONS.length[i])),
    y: some.map((i) => (i === null ? null : ROW_OF.get(ACTIONS.worker[i]))),
    width: 0.78,
    customdata: at.map((i) => [LINE.texts[ACTIONS.text[i]], ACTIONS.worker[i], ACTIONS.step[i], ACTIONS.epoch[i],
      amount(ACTIONS.length[i]), amount(ACTIONS.start[i]), said(ACTIONS.mark[i])]),
    marker: {
      color: suited(DATA.colours[kind]),
      line: { width: 0.5, color: colour("card") },
      pattern: { shape: at.map((i) => patternOf(ACTIONS.mark[i])), size: 6, solidity: 0.35,
        fgcolor: "#16191d", fillmode: "overlay" },
    },
    hovertemplate: "<b>%{customdata[0]}</b>%{customdata[6]}<br>worker %{customdata[1]}, step %{customdata[2]}, epoch %{customdata[3]}<br>" +
      "%{customdata[4]} from %{customdata[5]}<extra></extra>",
  };
}

// Plotly's own legend would lie over the chart on a narrow screen.
function drawLegend(single, kinds) {
  const marks = single === null ? [] : [...new Set(single.map((i) => ACTIONS.mark[i]))];
  const entries = single === null ? [["a step, the stronger the colour the busier", "#56B4E9", ""]]
    : kinds.map((kind) => [LINE.kinds[kind], suited(DATA.colours[kind]), "", LINE.definitions[kind]]);
  for (const { pattern, told, style } of MARKS) {
    if (marks.some((mark) => patternOf(mark) === pattern)) entries.push([told, "", style]);
  }
  document.getElementById("legend").replaceChildren(...entries.map(([name, background, style, definition]) => {
    const [entry, swatch] = [document.createElement("span"), document.createElement("i")];
    swatch.style.backgroundColor = background;
    swatch.className = style;
    entry.append(swatch, definition ? wordOf(name, definition) : name);
    return entry;
  }));
}

function barsIn([from, to]) {
  const found = [];
  for (let i = 0; i < BARS.start.length; i++) {
    if (BARS.start[i] < to && BARS.start[i] + BARS.length[i] > from) found.push(i);
  }
  return found;
}

// One bar per worker and step; where even these are too many, one for several steps of a worker.
function coarseTrace() {
  const found = barsIn(view);
  const together = Math.ceil(found.length / MOST_BARS);
  const bars = [];
  for (const i of found) {
    const last = bars[bars.length - 1];
    if (last && last.worker === BARS.worker[i] && last.count < together) {
      last.busy += BARS.busy[i] * BARS.length[i];
      last.count += 1;
      last.to = BARS.step[i];
      last.end = BARS.start[i] + BARS.length[i];
    } else {
      bars.push({ worker: BARS.worker[i], from: BARS.step[i], to: BARS.step[i], count: 1, start: BARS.start[i],
        end: BARS.start[i] + BARS.length[i], busy: BARS.busy[i] * BARS.length[i] });
    }
  }
  const busy = bars.map((bar) => Math.min(1, bar.busy / (bar.end - bar.start)));
  return {
    type: "bar",
    orientation: "h",
    name: "steps",
    base: bars.map((bar) => bar.start),
    x: bars.map((bar) => bar.end - bar.start),
    y: bars.map((bar) => ROW_OF.get(bar.worker)),
    width: 0.78,
    customdata: bars.map((bar, i) => [bar.from === bar.to ? `step ${bar.from}` : `steps ${bar.from} to ${bar.to}`,
      bar.worker, 100 * busy[i], bar.end - bar.start]),
    marker: { color: "#56B4E9", opacity: busy.map((each) => 0.25 + 0.75 * each), line: { width: 0 } },
    hovertemplate: "<b>%{customdata[0]}</b><br>worker %{customdata[1]}, busy %{customdata[2]:.0f} %" +
      "<br>%{customdata[3]:.2~f} ms<extra></extra>",
  };
}

// About so many: names of workers stand on the left.
const pixelsPerMs = () => (document.getElementById("timeline").clientWidth - 140) / (view[1] - view[0]);

const span = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);

function phaseTrace() {
  const bars = [];
  for (const recovery of LINE.recoveries) {
    let at = recovery.begin_ms;
    for (const [phase, taken] of recovery.phases) {
      if (taken > 0 && at < view[1] && at + taken > view[0]) bars.push([phase, at, taken]);
      at += taken;
    }
  }
  const fits = (text, taken) => taken * pixelsPerMs() > 8 * text.length + 4;
  const textOf = ([phase, , taken]) => [`${phase} ${span(taken)}`, phase].find((text) => fits(text, taken)) ?? "";
  return {
    type: "bar",
    orientation: "h",
    name: "phases",
    base: bars.map((bar) => bar[1]),
    x: bars.map((bar) => bar[2]),
    y: bars.map(() => -1),
    width: 0.62,
    text: bars.map(textOf),
    textposition: "inside",
    insidetextanchor: "middle",
    textangle: 0,
    constraintext: "none",
    insidetextfont: { color: bars.map((bar) => (bar[0] === "replay" ? "#ffffff" : "#16191d")), size: 12 },
    customdata: bars.map((bar) => bar[0]),
    marker: { color: bars.map((bar) => DATA.phase_colours[bar[0]]), line: { width: 1, color: colour("card") } },
    hovertemplate: "<b>%{customdata}</b>: %{x:.3f} ms<extra></extra>",
  };
}

function faultTrace() {
  const marks = LINE.recoveries.flatMap((each) => (each.who ? each.who.split(", ").map((who) => [each, Number(who)]) : []))
    .filter(([, who]) => ROW_OF.has(who));
  return {
    type: "scatter",
    mode: "markers",
    name: "lost",
    x: marks.map(([each]) => each.begin_ms),
    y: marks.map(([, who]) => ROW_OF.get(who)),
    cliponaxis: false,
    marker: { symbol: "x", size: 15, color: FAULT, line: { width: 1.5, color: colour("card") } },
    customdata: marks.map(([each]) => [escaped(each.what), escaped(each.last_action)]),
    hovertemplate: "<b>%{customdata[0]}</b><br>finished last: %{customdata[1]}<extra></extra>",
  };
}

// The time in which a worker did not answer, until the failure was seen: (row, begin, end, its failure in words).
function silences() {
  return LINE.recoveries.flatMap(({ begin_ms, phases, who, verdict }) => {
    const seen = begin_ms + (phases.find(([phase]) => phase === "detect")?.[1] ?? 0);
    const rows = (who ? who.split(", ") : []).map((each) => ROW_OF.get(Number(each))).filter((row) => row !== undefined);
    return rows.map((row) => [row, Math.max(begin_ms, view[0]), Math.min(seen, view[1]), verdict]);
  }).filter(([, from, to]) => (to - from) * pixelsPerMs() > 150);
}

function shapes() {
  const found = silences().map(([row, from, to]) => (
    { type: "rect", x0: from, x1: to, y0: row - 0.39, y1: row + 0.39, fillcolor: colour("silent"), line: { width: 0 }, layer: "below" }));
  for (const { begin_ms, resume_ms } of LINE.recoveries) {
    const line = { color: FAULT, width: 1.5, dash: "dash" };
    const across = { yref: "paper", y0: 0, y1: 1, x0: begin_ms };
    found.push({ ...across, type: "rect", x1: resume_ms ?? LINE.end, fillcolor: colour("band"), line: { width: 0 }, layer: "below" });
    found.push({ ...across, type: "line", x1: begin_ms, line });
  }
  LINE.workers.forEach((each, row) => {
    if (each.end !== null) {
      found.push({ type: "rect", x0: each.end, x1: LINE.end, y0: row - 0.39, y1: row + 0.39, fillcolor: colour("dead"), line: { width: 0 } });
    }
  });
  const commits = LINE.commits.filter((at) => at > view[0] && at < view[1]);
  for (const at of commits.length > 40 ? [] : commits) {
    found.push({ type: "line", yref: "paper", y0: 0, y1: 1, x0: at, x1: at, layer: "below", line: { color: colour("soft"), width: 1, dash: "dot" } });
  }
  return found;
}

function annotations() {
  const found = [];
  const font = { color: colour("soft"), size: 12 };
  LINE.workers.forEach((each, row) => {
    if (each.end !== null && each.end < view[1]) {
      found.push({ x: Math.max(each.end, view[0]), y: row, xanchor: "left", xshift: 12, showarrow: false, text: escaped(each.state), font });
    }
  });
  for (const [row, from, to, verdict] of silences()) {
    const text = escaped(shortened(verdict, Math.floor((to - from) * pixelsPerMs() / 7) - 4));
    found.push({ x: from, y: row, xanchor: "left", xshift: 12, showarrow: false, text, font: { ...font, color: colour("ink") } });
  }
  const edges = [0, ...LINE.commits];
  const steps = edges.map((at, step) => [step, Math.max(at, view[0]), Math.min(edges[step + 1] ?? LINE.end, view[1])])
    .filter(([step, from, to]) => step < LINE.commits.length && to - from > (view[1] - view[0]) * 0.05);
  for (const [step, from, to] of steps) {
    found.push({ x: (from + to) / 2, y: 1, yref: "paper", yanchor: "bottom", showarrow: false, text: "step " + LINE.steps[step], font });
  }
  const seen = LINE.recoveries.filter((one) => one.begin_ms > view[0] && one.begin_ms < view[1]);
  const freeFrom = (place) => (place === 0 ? view[0] : seen[place - 1].resume_ms ?? Infinity);
  const hasRoom = ({ begin_ms }, place) => (begin_ms - freeFrom(place)) * pixelsPerMs() > 260;
  for (const each of seen.filter(hasRoom)) {
    found.push({ x: each.begin_ms, y: -1, xanchor: "right", xshift: -6, showarrow: false, text: escaped(shortened(each.what, 36)), font: { color: FAULT, size: 12.5 },
      bgcolor: colour("card"), borderpad: 3 });
  }
  return found;
}

// A name may be as wide as a quarter of the chart, and as high as its row.
function nameOf({ worker, slots, also, also_short }) {
  if (document.getElementById("timeline").clientWidth < 700) return [`worker ${worker}`, escaped(also_short)].filter(Boolean).join("<br>");
  const most = LINE.workers.length > 16 ? 0 : 2;
  const lines = also.length > most ? [...also.slice(0, most - 1), also_short] : also;
  return [`worker ${worker}: <b>${escaped(slots)}</b>`, ...lines.map(escaped)].join(most ? "<br>" : " ");
}

function draw() {
  const single = singleActions();
  const kinds = LINE.kinds.map((_, kind) => kind).filter((kind) => PRESENT[kind]);
  const traces = single === null ? [coarseTrace()] : kinds.map((kind) => traceOf(kind, single));
  drawLegend(single, kinds);
  if (LINE.recoveries.length) traces.push(phaseTrace(), faultTrace());
  const rows = LINE.workers.length;
  const names = LINE.workers.map(nameOf);
  const withPhases = LINE.recoveries.length > 0;
  Plotly.react("timeline", traces, themed({
    barmode: "overlay",
    dragmode: "zoom",
    height: 100 + Math.max(22, Math.min(46, 900 / rows)) * (rows + 1),
    hovermode: "closest",
    hoverdistance: 4,
    showlegend: false,
    margin: { l: 8, r: 12, t: 28, b: 50 },
    xaxis: { range: view, title: { text: "ms since training began" }, tickformat: ",~f", automargin: false, zeroline: false },
    yaxis: { range: [rows - 0.4, withPhases ? -1.5 : -0.6], fixedrange: true, showgrid: false, zeroline: false,
      tickvals: [...(withPhases ? [-1] : []), ...names.keys()], ticktext: [...(withPhases ? ["recovery"] : []), ...names] },
    shapes: shapes(),
    annotations: annotations(),
  }), CONFIG);
}
