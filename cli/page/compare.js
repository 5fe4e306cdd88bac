// The page of `heed compare`: sorts the table and draws its numbers as bars.

const MEASURES = [
  { key: "seconds", title: "Time per call", axis: "shorter is faster", cell: 3 },
  { key: "relative_error", title: "Distance from exact attention", axis: "rms error, logarithmic scale", cell: 7, log: true },
  { key: "workspace_bytes", title: "Workspace", axis: "memory beyond the tensors", cell: 4 },
  { key: "state_bytes", title: "State", axis: "what the next token needs of these: keys and values, or a recurrence's state", cell: 5 },
];
const KEYS = ["mechanism", null, "dtype", "seconds", "workspace_bytes", "state_bytes", "max_error", "relative_error"];

const table = $("table"), body = table.tBodies[0];
const rows = data.rows.map((row, i) => ({ ...row, tr: body.rows[i], bars: [], index: i }));
const cellText = (row, i) => row.tr.cells[i].textContent;

// A number or a text to sort by; what is undefined comes last.
function sortKey(row, column) {
  const value = KEYS[column] === null ? cellText(row, column) : row[KEYS[column]];
  return value === null ? Infinity : value;
}

function sortBy(column, descending) {
  rows.sort((a, b) => {
    const x = sortKey(a, column), y = sortKey(b, column);
    const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return (descending ? -order : order) || a.index - b.index;
  });
  body.append(...rows.map((row) => row.tr));
  [...table.tHead.rows[0].cells].forEach((th, i) => {
    if (i === column) th.setAttribute("aria-sort", descending ? "descending" : "ascending");
    else th.removeAttribute("aria-sort");
  });
  drawCharts();
}

function wireHeader() {
  [...table.tHead.rows[0].cells].forEach((th, i) => {
    const button = element("button", th.textContent, { type: "button" });
    button.addEventListener("click", () => sortBy(i, th.getAttribute("aria-sort") === "ascending"));
    th.replaceChildren(button);
    th.scope = "col";
  });
}

function mark(row, marked) {
  for (const node of [row.tr, ...row.bars]) node.classList.toggle("marked", marked);
}

// Widths of bars, 0 to 1. On the logarithmic scale a bar ends a factor of 10 below the smallest.
function widths(measure) {
  const values = rows.map((row) => row[measure.key]).filter((x) => x > 0);
  const most = Math.max(...values), least = Math.min(...values) / 10;
  return (x) => {
    if (!(x > 0)) return 0;
    return measure.log ? Math.log(x / least) / Math.log(most / least) : x / most;
  };
}

// Which row a bar is: its mechanism only where there are several.
const several = new Set(rows.map((row) => row.mechanism)).size > 1;
function nameOf(row) {
  const options = `${cellText(row, 1)} ${row.dtype}`;
  const name = element("span", several ? `${row.mechanism} ` : options, { class: "name", title: `${row.mechanism} ${options}` });
  if (several) name.append(element("small", options));
  return name;
}

function drawCharts() {
  for (const row of rows) row.bars = [];
  $("charts").replaceChildren(...MEASURES.map((measure) => {
    const width = widths(measure), section = element("section");
    section.append(element("h2", measure.title), element("p", measure.axis, { class: "axis" }));
    const list = element("ol");
    for (const row of rows) {
      const item = element("li");
      const track = element("span", "", { class: "track" }), bar = element("div", "", { class: "bar" });
      bar.style.width = `${100 * width(row[measure.key])}%`;
      track.append(bar);
      item.append(nameOf(row), track, element("span", cellText(row, measure.cell), { class: "value" }));
      row.bars.push(item);
      list.append(item);
    }
    section.append(list);
    return section;
  }));
  for (const row of rows) {
    for (const node of [row.tr, ...row.bars]) {
      node.onpointerenter = () => mark(row, true);
      node.onpointerleave = () => mark(row, false);
    }
  }
}

$("theme").hidden = false;
followTheme(() => {});
wireHeader();
drawCharts();
document.documentElement.dataset.ready = "true";
