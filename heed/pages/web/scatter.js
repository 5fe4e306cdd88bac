// Error against time, both logarithmic. Errors form two bands: rounding errors of exact attention, and other functions,
// ten decades larger, with nothing between. So each band has its own axis, one above the other.

// A symbol for each dtype, for readers who cannot distinguish the colors: paths of radius about 1.
const SIGNS = {
  f64: "M-.9-.9H.9V.9H-.9Z", f32: "M-1 0A1 1 0 1 1 1 0A1 1 0 1 1-1 0Z", bf16: "M0-1.25L1.25 0L0 1.25L-1.25 0Z",
  f16: "M0-1.2L1.15.9H-1.15Z",
};
const sign = (dtype, x, y, size) => shape("path", {
  d: SIGNS[dtype], class: `mark ${dtype}`, transform: `translate(${x} ${y}) scale(${size})`,
  "vector-effect": "non-scaling-stroke" });

const power = (n) => `10${[...String(n)].map((c) => (c === "-" ? "\u207b" : "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"[c])).join("")}`;
const seconds = (x) => (x >= 0.9995 ? `${digits(x)} s` : x >= 0.9995e-3 ? `${digits(1e3 * x)} ms` : `${digits(1e6 * x)} us`);
const errorText = (x) => (x >= 1e-2 && x < 1e4 ? digits(x) : `${(x / 10 ** Math.floor(Math.log10(x))).toFixed(1)} \u00d7 ${power(Math.floor(Math.log10(x)))}`);

// A logarithmic axis over values: [low, high] with margins, and its ticks.
function logAxis(values, from, to) {
  const low = Math.log10(Math.min(...values)), high = Math.log10(Math.max(...values));
  const room = Math.max(0.12, 0.06 * (high - low)), [a, b] = [low - room, high + room];
  const at = (x) => from + (Math.log10(x) - a) / (b - a) * (to - from);
  const every = Math.max(1, Math.ceil((b - a) / (Math.abs(to - from) / 44)));
  const ticks = [];
  for (let n = Math.floor(a); n <= Math.ceil(b); ++n) {
    for (const m of b - a < 1.6 ? [1, 2, 5] : b - a < 2.6 ? [1, 3] : [1]) {
      const x = m * 10 ** n, log = Math.log10(x);
      if (log >= a && log <= b && n % every === 0) ticks.push(x);
    }
  }
  return { at, ticks, has: (x) => Math.log10(x) >= a && Math.log10(x) <= b };
}

// Places each label beside its line, at the nearest free place: sets `shown`, a box, in [{ left, right, y, width, min,
// max }], the ends and height of a line and the limits of its label.
function placeLabels(labels, top, bottom, obstacles) {
  const taken = [...obstacles], height = 15;
  const free = (box) => box.top >= top && box.bottom <= bottom
    && taken.every((other) => box.right < other.left || box.left > other.right || box.bottom < other.top || box.top > other.bottom);
  for (const label of labels) {
    let best = null;
    for (let step = 0; step <= 40 && !best; ++step) {
      for (const [side, left] of [["right", label.right + 9], ["left", label.left - 9 - label.width]]) {
        for (const y of [label.y + 6 * step, label.y - 6 * step]) {
          const box = { left, right: left + label.width, top: y - height / 2, bottom: y + height / 2 };
          if (!best && left >= label.min && box.right <= label.max && free(box)) best = { ...box, y, side };
        }
      }
    }
    if (!best) continue;  // the tip shows it instead
    label.shown = best;
    taken.push(best);
  }
}

// The text of the tip for a row.
const costsOf = (row) => [["time", seconds(row.seconds)], ["rms error", errorText(row.relative_error)],
  ["max error", errorText(row.max_error)], ["workspace", bytes(row.workspace_bytes)], ["state", bytes(row.state_bytes)]];

class Scatter {
  // `groups`: [{ name, options, rows: [row of the data] }]; calls `mark` with a group or null, and the row under the
  // pointer. Rows with `frontier` are joined by a line, rows with `within: false` are pale; a line is drawn at the
  // error `most`.
  constructor(section, groups, dtypes, mark, { describe = costsOf, how = "", most = null } = {}) {
    Object.assign(this, { groups, dtypes, mark, describe, most, shown: new Set(dtypes) });
    const buttons = element("div", "", { class: "dtypes", role: "group", "aria-label": "Dtypes shown" });
    for (const dtype of dtypes) {
      const button = element("button", "", { type: "button", "aria-pressed": "true" });
      const icon = shape("svg", { viewBox: "-1.5 -1.5 3 3", "aria-hidden": "true" });
      icon.append(sign(dtype, 0, 0, 1));
      button.append(icon, dtype);
      button.addEventListener("click", () => this.toggle(dtype, button));
      buttons.append(button);
    }
    this.plot = element("div", "", { class: "plot", tabindex: "0", role: "group",
      "aria-label": "Error against time: left and right arrow go from point to point" });
    this.live = element("p", "", { class: "hidden", "aria-live": "polite" });
    this.tip = element("div", "", { class: "tip" });
    this.tip.hidden = true;
    section.append(element("h2", "Error against time"),
      element("p", `Left is faster, down is closer. A line joins the dtypes of one mechanism; point at a sign, or go with the arrow keys, for its numbers. ${how}`.trim(), { class: "how" }),
      buttons, this.plot, this.live);
    section.hidden = false;
    this.draw();  // the first call of an observer may come after the page reports that it is ready
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.choose(null));
    this.plot.addEventListener("keydown", (event) => this.press(event));
    this.plot.addEventListener("blur", () => this.choose(null));
  }

  toggle(dtype, button) {
    if (!this.shown.delete(dtype)) this.shown.add(dtype);
    if (this.shown.size === 0) this.shown.add(dtype);  // avoids an empty picture
    button.setAttribute("aria-pressed", this.shown.has(dtype));
    this.width = 0;
    this.draw();
  }

  // Bands of groups, those that are far from exact first, each with its own error axis.
  bands() {
    const drawn = this.groups.map((group) => ({ group, rows: group.rows.filter((row) => this.shown.has(row.dtype)
      && row.seconds > 0 && row.relative_error > 0) })).filter(({ rows }) => rows.length > 0);
    const exact = ({ rows }) => Math.max(...rows.map((row) => row.relative_error)) < 0.02;
    const named = [["Other outputs: the distance is the mechanism's", drawn.filter((x) => !exact(x))],
      ["The same outputs: the distance is rounding", drawn.filter(exact)]];
    return named.filter(([, list]) => list.length > 0);
  }

  draw() {
    const width = this.plot.clientWidth;
    if (width === 0 || width === this.width) return;
    this.width = width;
    this.choose(null);
    const bands = this.bands(), left = 76, right = width - 14, titleHeight = 24;
    this.points = [];
    const times = bands.flatMap(([, list]) => list.flatMap(({ rows }) => rows.map((row) => row.seconds)));
    if (times.length === 0) return this.plot.replaceChildren(element("p", "No error is a number above 0."));
    const x = logAxis(times, left + 10, right - Math.min(170, width / 5));
    let top = 0;
    const svg = shape("svg", { role: "img", "aria-label": "Scatter of error against time; the table below has its numbers" });
    for (const [title, list] of bands) {
      const height = bands.length === 1 ? 420 : list.length > 4 ? 340 : 200;
      top += titleHeight;
      svg.append(shape("text", { class: "group", x: left, y: top - 8 }, title));
      this.drawBand(svg, list, x, { left, right, top, bottom: top + height });
      top += height + 8;
    }
    for (const tick of x.ticks) {
      svg.append(shape("text", { x: x.at(tick), y: top + 12, "text-anchor": "middle" }, seconds(tick)));
    }
    svg.append(shape("text", { class: "axis", x: (left + right) / 2, y: top + 34, "text-anchor": "middle" }, "time of a call"));
    const middle = (top + titleHeight) / 2;
    svg.append(shape("text", { class: "axis", x: 0, y: 0, "text-anchor": "middle", transform: `translate(12 ${middle}) rotate(-90)` }, "rms error"));
    svg.setAttribute("viewBox", `0 0 ${width} ${top + 42}`);
    this.plot.replaceChildren(svg, this.tip);
  }

  drawBand(svg, list, x, { left, right, top, bottom }) {
    const y = logAxis(list.flatMap(({ rows }) => rows.map((row) => row.relative_error)), bottom - 12, top + 12);
    svg.append(shape("rect", { class: "frame", x: left, y: top, width: right - left, height: bottom - top }));
    for (const tick of y.ticks) {
      svg.append(shape("line", { class: "grid", x1: left, x2: right, y1: y.at(tick), y2: y.at(tick) }),
        shape("text", { x: left - 8, y: y.at(tick) + 4, "text-anchor": "end" }, tick >= 0.01 && tick < 1e4 ? `${Number(tick.toPrecision(1))}` : power(Math.round(Math.log10(tick)))));
    }
    for (const tick of x.ticks) svg.append(shape("line", { class: "grid", x1: x.at(tick), x2: x.at(tick), y1: top, y2: bottom }));
    if (this.most !== null && y.has(this.most)) {
      const at = y.at(this.most);
      svg.append(shape("line", { class: "limit", x1: left, x2: right, y1: at, y2: at }),
        shape("text", { class: "limit", x: right - 4, y: at - 4, "text-anchor": "end" }, `error budget ${digits(this.most)}`));
    }
    const frontier = list.flatMap(({ rows }) => rows.filter((row) => row.frontier)).sort((a, b) => a.seconds - b.seconds);
    if (frontier.length > 0) {
      const steps = frontier.map((row, i) => (i === 0 ? `M${x.at(row.seconds)} ${y.at(row.relative_error)}` : `H${x.at(row.seconds)}V${y.at(row.relative_error)}`));
      svg.append(shape("path", { class: "frontier", d: steps.join("") }));
    }
    const labels = [], obstacles = [];
    for (const { group, rows } of list) {
      const points = rows.map((row) => ({ row, group, x: x.at(row.seconds), y: y.at(row.relative_error) }));
      const node = shape("g", { class: "series" });
      node.append(shape("path", { class: "thread", d: `M${points.map((p) => `${p.x} ${p.y}`).join("L")}` }),
        ...points.map((p) => {
          const mark = sign(p.row.dtype, p.x, p.y, p.row.frontier ? 6.5 : 5);
          mark.classList.toggle("outside", p.row.within === false);
          return mark;
        }));
      svg.append(node);
      group.node = node;
      this.points.push(...points);
      obstacles.push(...points.map((p) => ({ left: p.x - 6, right: p.x + 6, top: p.y - 5, bottom: p.y + 5 })));
      const options = group.options.replace(/, assumed$/, "");
      const last = points.reduce((a, b) => (b.x > a.x ? b : a)), first = points.reduce((a, b) => (b.x < a.x ? b : a));
      labels.push({ group, name: group.name, options, y: last.y, right: last.x, left: first.x, anchor: last, min: left + 2, max: right - 2 });
    }
    const context = element("canvas").getContext("2d");
    context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    for (const label of labels) label.width = context.measureText(`${label.name} ${label.options}`).width;
    placeLabels(labels.sort((a, b) => a.y - b.y), top, bottom, obstacles);
    for (const { group, name, options, shown, right: from, left: to } of labels) {
      if (!shown) continue;
      const text = shape("text", { class: "label", x: shown.left, y: shown.y + 4 }, `${name} `);
      text.append(shape("tspan", {}, options));
      const near = shown.side === "right" ? from + 6 : to - 6, far = shown.side === "right" ? shown.left - 2 : shown.right + 2;
      const end = labels.find((label) => label.group === group).y;
      if (Math.abs(shown.y - end) > 7) group.node.append(shape("line", { class: "leader", x1: near, y1: end, x2: far, y2: shown.y }));
      group.node.append(text);
    }
  }

  point(event) {
    const box = this.plot.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    let best = null, nearest = 28;
    for (const p of this.points ?? []) {
      const distance = Math.hypot(p.x - px, p.y - py);
      if (distance < nearest) [best, nearest] = [p, distance];
    }
    this.choose(best);
  }

  // Moves to the next point by time; the first key moves to the leftmost.
  press(event) {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") return this.choose(null);
    if (by === undefined || !(this.points?.length > 0)) return;
    event.preventDefault();
    const ordered = [...this.points].sort((a, b) => a.x - b.x || b.y - a.y);
    const at = ordered.indexOf(this.chosen), last = ordered.length - 1;
    this.choose(ordered[at < 0 ? (by === Infinity ? last : 0) : Math.min(Math.max(at + by, 0), last)]);
    this.live.textContent = this.tip.textContent;
  }

  // Shows the numbers and the series of a point.
  choose(point) {
    this.chosen = point;
    this.tip.hidden = !point;
    for (const group of this.groups) {
      group.node?.classList.toggle("faint", point !== null && group !== point.group);
      group.node?.classList.toggle("marked", point !== null && group === point.group);
    }
    this.mark(point?.group ?? null, point?.row ?? null);
    if (!point) return;
    const { row, group } = point, list = element("dl");
    for (const [name, value] of this.describe(row)) list.append(element("dt", name), element("dd", value));
    this.tip.replaceChildren(element("b", `${group.name} ${group.options}`), `in ${row.dtype}`, list);
    const right = point.x + 16 + this.tip.offsetWidth <= this.width;
    const y = Math.max(0, Math.min(point.y - 20, this.plot.clientHeight - this.tip.offsetHeight));
    this.tip.style.transform = `translate(${right ? point.x + 16 : point.x - 16 - this.tip.offsetWidth}px, ${y}px)`;
  }

  // Fades all groups except the one under the pointer in the table.
  markGroup(group) {
    for (const each of this.groups) each.node?.classList.toggle("faint", group !== null && each !== group);
  }
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"], i = n < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(n) / 10));
  return `${i === 0 ? n : digits(n / 1024 ** i)} ${units[i]}`;
}
