// The page's buttons and charts, after timeline.js. Nothing here asks anything of any network.
function show(from, to) {
  view = [from, to];
  draw();
}

function windows() {
  const step = LINE.commits.length ? LINE.end / LINE.commits.length : LINE.end;
  const found = LINE.recoveries.map((each, place) => {
    const end = each.resume_ms > each.begin_ms ? each.resume_ms : Math.min(each.begin_ms + 4 * step, LINE.end);
    const around = Math.max(end - each.begin_ms, step) * 0.4;
    return [`${each.phases.length ? "Recovery" : "Fault"} ${place + 1}`, Math.max(0, each.begin_ms - around), end + around];
  });
  const middle = Math.floor(LINE.commits.length / 2);
  const three = [LINE.commits[middle - 2] ?? 0, LINE.commits[middle + 1] ?? LINE.end];
  if (LINE.commits.length) found.push(["Some steps", ...three]);
  return [...found, ["Whole run", 0, LINE.end]];
}

function makeControls() {
  const place = document.getElementById("windows");
  windows().forEach(([name, from, to], index) => {
    const button = document.createElement("button");
    button.textContent = name;
    button.onclick = () => {
      document.querySelectorAll(".chosen").forEach((each) => each.classList.remove("chosen"));
      button.classList.add("chosen");
      show(from, to);
    };
    place.append(button);
    if (index === 0) button.click();
  });
  const move = (shift, scale) => () => {
    const [middle, half] = [(view[0] + view[1]) / 2 + shift * (view[1] - view[0]), ((view[1] - view[0]) / 2) * scale];
    show(middle - half, middle + half);
  };
  document.getElementById("earlier").onclick = move(-0.5, 1);
  document.getElementById("later").onclick = move(0.5, 1);
  document.getElementById("closer").onclick = move(0, 0.5);
  document.getElementById("wider").onclick = move(0, 2);
  const timeline = document.getElementById("timeline");
  timeline.on("plotly_doubleclick", () => show(0, LINE.end));
  timeline.on("plotly_relayout", (change) => {
    if ("xaxis.range[0]" in change) show(change["xaxis.range[0]"], change["xaxis.range[1]"]);
  });
}

// Plotly interprets some HTML in a text; only our own hovertemplates have any.
function inert(value, name) {
  if (typeof value === "string") return name === "hovertemplate" ? value : escaped(value);
  if (Array.isArray(value)) return value.map((each) => inert(each, name));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, inert(each, key)]));
}

function drawCharts() {
  for (const [name, figure] of Object.entries(inert(DATA.charts))) {
    const layout = themed(figure.layout);
    if (["phases", "time"].includes(name) && innerWidth < 700) layout.showlegend = false; // it would lie over the chart
    Plotly.react(name, name === "phases" ? figure.data : suited(figure.data), layout, CONFIG);
  }
}

// Tells the definition of a word under the mouse, or at the focus of a keyboard or finger.
function wordOf(text, definition) {
  const word = document.createElement("abbr");
  word.textContent = text;
  word.tabIndex = 0;
  word.dataset.told = definition;
  return word;
}

function tellWords() {
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.setAttribute("role", "tooltip");
  document.body.append(tip);
  let word = null;
  const place = () => {
    if (!word) return;
    const [box, size] = [word.getBoundingClientRect(), tip.getBoundingClientRect()];
    tip.style.left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - size.width - 8)) + "px";
    tip.style.top = (box.bottom + size.height + 6 < innerHeight ? box.bottom + 6 : box.top - size.height - 6) + "px";
  };
  const tell = (target) => {
    word = target?.closest?.("abbr[data-told]") ?? null;
    word?.setAttribute("aria-describedby", "tip");
    tip.textContent = word?.dataset.told ?? "";
    place();
  };
  for (const name of ["mouseover", "focusin"]) document.addEventListener(name, (event) => tell(event.target));
  for (const name of ["mouseout", "focusout"]) document.addEventListener(name, () => tell(null));
  document.addEventListener("scroll", place);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") tell(null); });
}

// On paper nothing can be unfolded, and a chart has the width of the sheet that page.css chooses.
addEventListener("beforeprint", () => {
  document.querySelectorAll("details").forEach((each) => { each.open = true; });
  setWidths((chart) => Math.min(chart.clientWidth, chart.closest(".grid") ? 525 : 1110));
});
addEventListener("afterprint", () => setWidths(() => null));

function setWidths(widthOf) {
  document.querySelectorAll(".js-plotly-plot").forEach((chart) => Plotly.relayout(chart, { width: widthOf(chart) }));
}

drawCharts();
makeControls();
tellWords();
DARK.addEventListener("change", () => { drawCharts(); show(...view); });
document.body.dataset.drawn = "yes";
