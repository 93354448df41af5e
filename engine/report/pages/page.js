// The page's buttons and charts, after timeline.js. Nothing here asks anything of any network.
function show(from, to) {
  view = [from, to];
  draw();
  if (LINE.follower) Plotly.relayout(LINE.follower, { "xaxis.range": view });
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
  return [...found, [LINE.all, 0, LINE.end]];
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

function drawCharts() {
  for (const [name, figure] of Object.entries(DATA.charts)) {
    Plotly.react(name, name === "phases" ? figure.data : suited(figure.data), themed(structuredClone(figure.layout)), CONFIG);
  }
}

drawCharts();
makeControls();
DARK.addEventListener("change", () => { drawCharts(); show(...view); });
document.body.dataset.drawn = "yes";
