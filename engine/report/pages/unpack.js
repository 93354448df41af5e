// Unpacks the page's data and program, which are stored compressed, and starts the program.
"use strict";
let DATA;

async function unpacked(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (char) => char.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

// The content security policy names each program by its hash.
function start(text) {
  const script = document.createElement("script");
  script.textContent = text;
  document.body.append(script);
}

async function begin() {
  if (!("DecompressionStream" in window)) {
    document.body.classList.add("old-browser");
    document.body.dataset.drawn = "yes";
    return;
  }
  const [data, plotly, program] = await Promise.all(["data", "plotly", "program"].map(unpacked));
  DATA = JSON.parse(data);
  start(plotly);
  start(program);
}

// The text is painted first: to unpack takes longer.
requestAnimationFrame(() => setTimeout(begin));
