const LEAST_ROWS_TO_FILTER = 12;

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

for (const heading of document.querySelectorAll("table.sortable th:not(.again)")) {
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

// All words must be found in a row, wherever; commands are no part of it.
function wordsOf(row) {
  return Array.from(row.cells, (cell) => (cell.className === "again" ? "" : `${cell.title} ${cell.textContent}`))
    .join(" ")
    .toLowerCase();
}

function filterRows(table, text) {
  const wanted = text.toLowerCase().split(/\s+/);
  for (const row of table.tBodies[0].rows) {
    const words = wordsOf(row);
    row.classList.toggle("filtered", !wanted.every((word) => words.includes(word)));
  }
}

for (const table of document.querySelectorAll("table.sortable")) {
  const rows = table.tBodies[0].rows;
  if (rows.length < LEAST_ROWS_TO_FILTER) continue;
  const filter = document.createElement("input");
  const count = document.createElement("output");
  filter.type = "search";
  filter.placeholder = "filter rows, such as: amp trainstep";
  filter.ariaLabel = "filter rows";
  const bar = document.createElement("p");
  bar.className = "filter";
  bar.append(filter, count);
  table.parentElement.before(bar);
  filter.addEventListener("input", () => {
    filterRows(table, filter.value);
    const shown = table.tBodies[0].querySelectorAll("tr:not(.filtered)").length;
    count.textContent = filter.value.trim() ? `${shown} of ${rows.length} rows` : "";
  });
}

// Where the clipboard is closed to the page, the command is selected, ready to be copied by hand.
async function copy(command, button) {
  window.getSelection().selectAllChildren(command);
  try {
    await navigator.clipboard.writeText(command.textContent);
    button.textContent = "copied";
  } catch {
    button.textContent = "selected";
  }
  setTimeout(() => (button.textContent = "copy"), 2000);
}

for (const command of document.querySelectorAll(".command")) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "copy";
  button.addEventListener("click", () => copy(command, button));
  command.after(button);
}
