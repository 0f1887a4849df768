"use strict";

const config = {
  responsive: true,
  displaylogo: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d", "pan2d", "zoom2d", "resetScale2d"],
};

const figures = JSON.parse(document.getElementById("figures").textContent);
const narrow = window.matchMedia("(max-width: 620px)");

function assign(target, path, value) {
  const names = path.split(".");
  const last = names.pop();
  names.reduce((object, name) => object[name], target)[last] = value;
}

function draw(figure) {
  const { traces, layout } = structuredClone(figure);
  if (narrow.matches) {
    for (const trace of traces) Object.assign(trace, figure.narrow_trace);
    for (const [path, value] of Object.entries(figure.narrow_layout)) assign(layout, path, value);
  }
  Plotly.react(figure.name, traces, layout, config);
}

figures.forEach(draw);
narrow.addEventListener("change", () => figures.forEach(draw));

function keyOf(row, column) {
  const cell = row.cells[column];
  return "key" in cell.dataset ? Number(cell.dataset.key) : cell.querySelector("span").textContent.trim();
}

function isMissing(key) {
  return key === "" || key === "—";
}

function compareKeys(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

function sortBy(table, column, direction) {
  const body = table.tBodies[0];
  const keyed = Array.from(body.rows, (row) => ({ row, key: keyOf(row, column) }));
  keyed.sort((one, other) => {
    if (isMissing(one.key) || isMissing(other.key)) return isMissing(one.key) - isMissing(other.key);
    return direction * compareKeys(one.key, other.key);
  });
  body.append(...keyed.map((entry) => entry.row));
}

for (const heading of document.querySelectorAll("table.sortable th")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...heading.childNodes);
  heading.append(button);
  button.addEventListener("click", () => {
    const descending = heading.getAttribute("aria-sort") === "ascending";
    for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    sortBy(heading.closest("table"), heading.cellIndex, descending ? -1 : 1);
  });
}
