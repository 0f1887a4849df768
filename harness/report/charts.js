"use strict";

const config = {
  responsive: true,
  displaylogo: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d", "pan2d", "zoom2d", "resetScale2d"],
};

const darkOf = JSON.parse(document.getElementById("dark").textContent);
const hovers = window.matchMedia("(hover: hover)");
const narrow = window.matchMedia("(max-width: 620px)");
const dark = window.matchMedia("screen and (prefers-color-scheme: dark)");
const figures = new Map();
const drawn = new Set();

async function unpacked(id) {
  const text = atob(document.getElementById(id).textContent);
  const bytes = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index += 1) bytes[index] = text.charCodeAt(index);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function inTheDark(part) {
  if (typeof part === "string") return darkOf[part] ?? part;
  if (Array.isArray(part)) return part.map(inTheDark);
  return part;
}

// A copy for Plotly, which changes what it is given, in the colours of the page.
function copied(part) {
  if (part === null || typeof part !== "object") return part;
  if (Array.isArray(part)) return part.map(copied);
  const entries = Object.entries(part);
  return Object.fromEntries(
    entries.map(([name, value]) => [name, dark.matches && /color$/.test(name) ? copied(inTheDark(value)) : copied(value)]),
  );
}

function assign(target, path, value) {
  const names = path.split(".");
  const last = names.pop();
  names.reduce((object, name) => object[name], target)[last] = value;
}

function draw(chart) {
  const figure = figures.get(chart.id);
  const { traces, layout } = copied({ traces: figure.traces, layout: figure.layout });
  if (narrow.matches) {
    for (const trace of traces) Object.assign(trace, figure.narrow_trace);
    for (const [path, value] of Object.entries(figure.narrow_layout)) assign(layout, path, copied(value));
  }
  // Its buttons come with a pointer; under a finger they would stay, over the marks.
  Plotly.react(chart, traces, layout, { ...config, displayModeBar: hovers.matches && !narrow.matches ? "hover" : false });
  drawn.add(chart);
  watcher.unobserve(chart);
}

const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
    }
  },
  { rootMargin: "600px" },
);

// Charts are drawn as they come near: a long page would take seconds.
async function begin() {
  for (const figure of JSON.parse(await unpacked("figures"))) figures.set(figure.name, figure);
  const library = document.createElement("script");
  library.textContent = await unpacked("plotly");
  document.head.append(library);
  for (const chart of document.querySelectorAll(".chart")) watcher.observe(chart);
}

// What is hidden has no width to be drawn in: it waits until it is shown again.
function redraw() {
  for (const chart of [...drawn]) {
    if (chart.offsetParent !== null) {
      draw(chart);
    } else {
      drawn.delete(chart);
      watcher.observe(chart);
    }
  }
}

function drawAll() {
  for (const fold of document.querySelectorAll(".fold")) fold.open = true;
  for (const chart of document.querySelectorAll(".chart")) {
    if (!drawn.has(chart) && chart.offsetParent !== null) draw(chart);
  }
}

narrow.addEventListener("change", redraw);
dark.addEventListener("change", redraw);
window.addEventListener("beforeprint", drawAll);
const ready = new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve))).then(begin);
ready.catch((problem) => {
  document.documentElement.classList.remove("scripted");
  console.error(problem);
});
