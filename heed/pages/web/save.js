// Saves the shown map: a PNG as displayed, an SVG of the shown part, a CSV of all its numbers.

function download(blob, name) {
  const url = URL.createObjectURL(blob);
  element("a", "", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

const CELLS = 512;  // boxes per side of an SVG: more cells are merged, showing the largest

// Boundaries of the boxes along an axis of n cells, of which `count` from `from` on are shown: the cells themselves, or
// the largest allowed number of merged boxes.
function boxesOf(n, from, count) {
  const first = Math.floor(from + 1e-9), end = Math.min(n, Math.ceil(from + count - 1e-9));
  return end - first <= CELLS ? Int32Array.from({ length: end - first + 1 }, (_, i) => first + i) : edges(CELLS, from, count, n);
}

// The shown part of a map as an SVG element: cells as paths, one for each color, which stay sharp at any size.
function mapSvg(heat, title) {
  const { what, left, top, plotWidth, plotHeight, zoom } = heat, { layer, map } = what;
  const head = 34, height = head + heat.height + 40;
  const root = shape("svg", { width: heat.width, height, viewBox: `0 ${-head} ${heat.width} ${height}`, "font-family": "system-ui, sans-serif", "font-size": 11 });
  const muted = cssColor("--muted"), ink = cssColor("--ink");
  root.append(shape("title", {}, title), shape("rect", { y: -head, width: "100%", height: "100%", fill: cssColor("--card") }),
    shape("text", { x: 8, y: -12, fill: ink, "font-weight": 600, "font-size": 14 }, title));
  const paint = heat.painter(), paths = new Map();
  const columns = boxesOf(map.cols, heat.x, map.cols / zoom), lines = boxesOf(map.rows, heat.y, map.rows / zoom);
  for (let y = 0; y + 1 < lines.length; ++y) {
    for (let x = 0; x + 1 < columns.length;) {
      const box = (at) => paint(lines[y], lines[y + 1], columns[at], columns[at + 1]);
      const color = box(x), from = columns[x];
      do ++x; while (x + 1 < columns.length && box(x) === color);  // adjacent boxes of one color are one shape
      const width = columns[x] - from;
      paths.set(color, `${paths.get(color) ?? ""}M${from} ${lines[y]}h${width}v${lines[y + 1] - lines[y]}h${-width}z`);
    }
  }
  const plot = shape("svg", { x: left, y: top, width: plotWidth, height: plotHeight, preserveAspectRatio: "none", "shape-rendering": "crispEdges",
    viewBox: `${heat.x} ${heat.y} ${map.cols / zoom} ${map.rows / zoom}`, class: "cells" });
  for (const [color, d] of paths) plot.append(shape("path", { d, fill: hex(color) }));
  root.append(plot, shape("rect", { x: left, y: top, width: plotWidth, height: plotHeight, fill: "none", stroke: cssColor("--line") }));
  const context = heat.base.getContext("2d");  // measures text, so that tokens are cut as on the page
  context.font = heat.font;
  const label = (text, attributes) => root.append(shape("text", { fill: muted, "dominant-baseline": "central", ...attributes }, text));
  for (const [at, text] of axisTicks(layer, heat.y, map.rows, layer.queries, heat.cellHeight, rowLabel)) {
    const y = top + (at - heat.y) * heat.cellHeight;
    if (y >= top && y <= top + plotHeight) label(heat.fit(context, text, left - 10), { x: left - 6, y, "text-anchor": "end", class: "row" });
  }
  for (const [at, text] of axisTicks(layer, heat.x, map.cols, layer.keys, heat.cellWidth, colLabel)) {
    const x = left + (at - heat.x) * heat.cellWidth;
    if (x >= left && x <= left + plotWidth) label(heat.fit(context, text, top - 10), { transform: `translate(${x} ${top - 6}) rotate(-90)`, class: "column" });
  }
  const low = $("legend-low").textContent, high = $("legend-high").textContent, y = heat.height + 16, steps = 64, wide = 2.5;
  for (let i = 0; i < steps; ++i) {
    root.append(shape("rect", { x: left + wide * i, y, width: wide, height: 8, fill: hex(ramp.packed[Math.round(255 * i / (steps - 1))]), class: "legend" }));
  }
  label(low, { x: left - 6, y: y + 4, "text-anchor": "end" });
  label(high, { x: left + wide * steps + 6, y: y + 4 });
  return root;
}

// Converts a color of ImageData to the format of SVG.
const hex = (packed) => `#${[packed, packed >> 8, packed >> 16].map((x) => (x & 255).toString(16).padStart(2, "0")).join("")}`;

// A whole map as a table, one line for each row: labels begin with a position, so that no program interprets a token as
// a formula. A masked pair is empty; numbers have enough digits to distinguish every float32.
function mapCsv({ layer, map, values }) {
  const range = ([first, end]) => (end - first === 1 ? `${first}` : `${first}-${end - 1}`);
  const cell = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll("\"", "\"\"")}"` : text);
  const name = (place, words) => cell(words === null || words === undefined ? range(place) : `${range(place)} ${plain(words)}`);
  const row = (q) => name(layer.rowRange(q), pooled ? layer.rowWords?.[q] : keyToken(layer, q + layer.start));
  const column = (k) => name(layer.colRange(k), pooled ? layer.colWords?.[k] : keyToken(layer, k));
  const lines = [["query\\key", ...Array.from({ length: map.cols }, (_, k) => column(k))].join(",")];
  for (let q = 0; q < map.rows; ++q) {
    const cells = [row(q)];
    for (let k = 0; k < map.cols; ++k) {
      cells.push(isVisible(map, { q, k }) ? `${Number(values[q * map.cols + k].toPrecision(9))}` : "");
    }
    lines.push(cells.join(","));
  }
  return `${lines.join("\r\n")}\r\n`;
}

function wireSaving(heat, title, fileName) {
  const save = {
    png: () => heat.toBlob(title(), (blob) => download(blob, `${fileName()}.png`)),
    svg: () => download(new Blob([new XMLSerializer().serializeToString(mapSvg(heat, title()))], { type: "image/svg+xml" }), `${fileName()}.svg`),
    csv: () => download(new Blob([mapCsv(heat.what)], { type: "text/csv" }), `${fileName()}.csv`),
  };
  for (const [kind, act] of Object.entries(save)) $(`save-${kind}`).addEventListener("click", act);
}
