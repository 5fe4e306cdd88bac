// The page of attention: its state, and its reactions to keys, mouse and touch.

const state = { layer: 0, head: 0, q: 0, k: 0, scale: "sqrt", norm: "map", measure: "mean", pattern: "shade", across: false,
  find: "", order: "layer", reverse: false, only: "" };
let hover = null;  // the pair under the pointer, which temporarily replaces the chosen one
let what = null;   // the content of the map
const implied = new ImpliedView((pair) => { hover = pair; showPair(true); }, choose);
const overlay = $("overlay");
const heat = new HeatMap($("stage"), $("heat"), overlay, () => implied.follow(heat));
const grid = new HeadGrid(chooseHead);
const search = new Search(() => state.across, (text) => { state.find = text; mark(); showPair(); link(); },
  (index) => choose(state.across ? { q: state.q, k: index } : { q: index, k: state.k }));

const layer = () => layers[state.layer];
const clampTo = (value, n) => Math.min(n - 1, Math.max(0, value));

// --- showing ---------------------------------------------------------------------------------------------------------------

// Shows another head.
function showHead() {
  const current = layer(), map = mapOf(current, state.head);
  state.q = clampTo(state.q, map.rows);
  state.k = clampTo(state.k, map.cols);
  const shown = state.measure === "max" && map.strongest ? map.strongest : map;
  what = { layer: current, map, values: shown.data, rowMax: shown.rowMax, max: shown.max, scale: state.scale, norm: state.norm, measure: state.measure,
    kept: state.pattern === "shade" ? current.keptCells(state.head) : null, marks: search.look(current, state.find) };
  const thumb = grid.find(state.layer, state.head), summary = thumb.summary ??= summarize(current, map);
  const head = current.heads[state.head];
  $("map-title").textContent = `Layer ${layerName(current)}, head ${head}`;
  $("map-tag").textContent = habit(summary);
  document.title = `Layer ${layerName(current)}, head ${head} \u2013 attention`;
  $("layer").value = state.layer;
  if ($("head").length !== current.heads.length) fillHeadPicker();
  $("head").value = state.head;
  fillStats(current, summary);
  heat.show(what);
  implied.show(what, state.head);
  fillLegend(what);
  fillKept(current, state.head);
  grid.mark(state.layer, state.head);
  showPair();
}

// Marks search results, in this map and in the one below.
function mark() {
  what.marks = search.look(layer(), state.find);
  implied.mark(what.marks);
}

// The pair under the pointer, else the chosen one. While the mouse moves, everything around the map is updated once per
// frame.
let following = 0;
function showPair(moving = false) {
  const pair = hover ?? state;
  heat.setCursor(pair);
  implied.showPair(pair);
  fillReadout(what, pair);
  cancelAnimationFrame(following);
  if (moving) following = requestAnimationFrame(() => fillAround(pair));
  else fillAround(pair);
}

function fillAround(pair) {
  fillBars(what, pair, state.across, choose);
  text.fill(what, pair, state.across);
}

let announcing = 0;
function announce() {
  clearTimeout(announcing);
  announcing = setTimeout(() => { $("live").textContent = describe(what, hover ?? state); }, 200);
}

let writingHash = 0;
function changed() {
  announce();
  link();
}
function link() {
  clearTimeout(writingHash);
  writingHash = setTimeout(writeHash, 120);
}

function choose({ q, k }) {
  state.q = clampTo(q, what.map.rows);
  state.k = clampTo(k, what.map.cols);
  hover = null;
  hideTip();
  heat.reveal(state);
  showPair();
  changed();
}

function chooseHead(layerIndex, head) {
  state.layer = clampTo(layerIndex, layers.length);
  state.head = clampTo(head, layers[state.layer].heads.length);
  hover = null;
  hideTip();
  showHead();
  changed();
}

// The next one of the shown heads, in their order.
function stepHead(by) {
  const next = grid.step(by);
  chooseHead(next.layer, next.head);
}

function arrange() {
  grid.arrange(state);
  grid.mark(state.layer, state.head);
}

// --- the link --------------------------------------------------------------------------------------------------------------

const HASH = { layer: "layer", head: "head", q: "row", k: "column" };

// A page in a frame of a notebook has no address of its own.
const linked = location.protocol !== "about:";

function writeHash() {
  if (!linked) return;
  const parts = Object.entries(HASH).map(([key, name]) => `${name}=${state[key]}`);
  for (const [key, usual] of [["scale", "sqrt"], ["norm", "map"], ["measure", "mean"], ["pattern", "shade"], ["order", "layer"], ["find", ""], ["only", ""]]) {
    if (state[key] !== usual) parts.push(`${key}=${encodeURIComponent(state[key])}`);
  }
  for (const key of ["across", "reverse"]) if (state[key]) parts.push(`${key}=1`);
  history.replaceState(null, "", `#${parts.join("&")}`);
}

function readHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  const number = (name, fallback) => {
    const value = Number.parseInt(given.get(name) ?? "", 10);
    return Number.isSafeInteger(value) && value >= 0 ? value : fallback;
  };
  state.layer = clampTo(number("layer", state.layer), layers.length);
  state.head = clampTo(number("head", state.head), layer().heads.length);
  state.q = clampTo(number("row", state.q), layer().rows);
  state.k = clampTo(number("column", state.k), layer().cols);
  for (const key of ["scale", "norm", "measure", "pattern", "order"]) {
    if ([...$(key).options].some((option) => option.value === given.get(key))) $(key).value = state[key] = given.get(key);
  }
  state.find = given.get("find") ?? "";
  state.only = $("only").value = given.get("only") ?? "";
  state.reverse = given.get("reverse") === "1";
  setDirection(given.get("across") === "1");
}

// --- pickers and buttons ---------------------------------------------------------------------------------------------------

function fillHeadPicker() {
  $("head").replaceChildren(...layer().heads.map((name, i) => element("option", name, { value: i })));
}

// Hides a head and shows the next one in its place.
function hideHead() {
  const next = grid.hide();
  if (!next) return;
  arrange();
  chooseHead(next.layer, next.head);
}

function setDirection(across) {
  state.across = across;
  $("looks-at").setAttribute("aria-pressed", !across);
  $("looked-at").setAttribute("aria-pressed", across);
}

function zoomed(factor) {
  if (factor === 0) {
    heat.reset();
    heat.layout();
  } else {
    const [x, y] = heat.centre(state.q, state.k);
    const inside = heat.pairAt(x, y) !== null;
    if (inside) heat.zoomAt(factor, x, y);
    else heat.zoomAt(factor);
  }
  afterZoom();
}

function afterZoom() {
  overlay.classList.toggle("zoomed", heat.zoom > 1.001);
  $("zoom-reset").textContent = `${heat.zoom < 9.95 ? Number(heat.zoom.toFixed(1)) : heat.zoom.toFixed(0)}\u00d7`;
}

// The title of saved maps.
const headTitle = () => `Layer ${visible(layerName(layer()))}, head ${layer().heads[state.head]}: ${habit(grid.chosen.summary)}`;
const fileName = () => `attention-layer${layerName(layer())}-head${layer().heads[state.head]}`;

function wireControls() {
  $("layer").replaceChildren(...layers.map((each, i) => element("option", layerName(each), { value: i })));
  fillHeadPicker();
  $("layer").addEventListener("change", () => chooseHead(Number($("layer").value), state.head));
  $("head").addEventListener("change", () => chooseHead(state.layer, Number($("head").value)));
  for (const key of ["scale", "norm", "measure", "pattern"]) {
    $(key).addEventListener("change", () => {
      state[key] = $(key).value;
      showHead();
      grid.paintAll();
      changed();
    });
  }
  $("order").addEventListener("change", () => { state.order = $("order").value; arrange(); link(); });
  $("reverse").addEventListener("click", () => { state.reverse = !state.reverse; arrange(); link(); });
  $("only").addEventListener("input", () => { state.only = $("only").value; arrange(); link(); });
  $("hide-head").addEventListener("click", hideHead);
  $("all-heads").addEventListener("click", () => {
    grid.hidden.clear();
    state.only = $("only").value = "";
    arrange();
    link();
  });
  $("measure-label").hidden = !pooled;
  $("pattern-label").hidden = !data.pattern;
  $("layer").parentNode.hidden = layers.length === 1;
  for (const [id, across] of [["looks-at", false], ["looked-at", true]]) {
    $(id).addEventListener("click", () => { setDirection(across); mark(); showPair(); changed(); });
  }
  $("zoom-in").addEventListener("click", () => zoomed(1.6));
  $("zoom-out").addEventListener("click", () => zoomed(1 / 1.6));
  $("zoom-reset").addEventListener("click", () => zoomed(0));
  wireSaving(heat, headTitle, fileName);
  $("help-open").addEventListener("click", () => $("help").showModal());
}

// --- mouse and fingers -----------------------------------------------------------------------------------------------------

function hideTip() { $("tip").hidden = true; }

function showTip(pair, x, y) {
  const tip = $("tip"), { map, values } = what;
  $("tip-pair").textContent = `${rowName(what.layer, pair.q)[0]} \u2192 ${colName(what.layer, pair.k)[0]}`;
  $("tip-value").textContent = isVisible(map, pair) ? percent(values[pair.q * map.cols + pair.k]) : "not allowed to look";
  const where = [rowName(what.layer, pair.q)[1], colName(what.layer, pair.k)[1]].filter((part) => part !== "");
  const places = pooled ? where.join(" \u2192 ") : where.length === 2 ? `positions ${where.join(" \u2192 ")}` : "";
  $("tip-where").textContent = [places, loss(what, pair)].filter((part) => part !== "").join("; ");
  tip.hidden = false;
  const right = x + 18 + tip.offsetWidth <= heat.width, below = y + 18 + tip.offsetHeight <= heat.height;
  tip.style.transform = `translate(${Math.max(0, right ? x + 18 : x - 18 - tip.offsetWidth)}px, ${Math.max(0, below ? y + 18 : y - 18 - tip.offsetHeight)}px)`;
}

function wirePointer() {
  const pointers = new Map();  // pressed pointers: [x, y]
  let moved = 0, pinch = 0;
  const at = (event) => {
    const box = overlay.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const point = (event) => {
    const [x, y] = at(event), pair = heat.pairAt(x, y);
    hover = pair;
    if (pair) showTip(pair, x, y);
    else hideTip();
    showPair(true);
    if (pair) announce();
  };
  overlay.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    pointers.set(event.pointerId, at(event));
    if (pointers.size === 1) moved = 0;
    overlay.setPointerCapture(event.pointerId);
  });
  overlay.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) {
      if (event.pointerType === "mouse") point(event);
      return;
    }
    const now = at(event);
    pointers.set(event.pointerId, now);
    if (pointers.size === 2) {
      const [a, b] = [...pointers.values()], distance = Math.hypot(a[0] - b[0], a[1] - b[1]);
      if (pinch > 0) heat.zoomAt(distance / pinch, (a[0] + b[0]) / 2, (a[1] + b[1]) / 2);
      pinch = distance;
      moved = Infinity;
      afterZoom();
      return;
    }
    moved += Math.hypot(now[0] - before[0], now[1] - before[1]);
    if (moved > 4 && heat.zoom > 1) {
      overlay.classList.add("grabbing");
      hideTip();
      heat.pan(now[0] - before[0], now[1] - before[1]);
    }
  });
  const up = (event) => {
    if (!pointers.delete(event.pointerId)) return;
    pinch = 0;
    overlay.classList.remove("grabbing");
    const pair = heat.pairAt(...at(event));
    if (event.type === "pointerup" && moved <= 4 && pair) {
      choose(pair);
      if (event.pointerType === "mouse") point(event);
      else showTip(pair, ...at(event));
    }
  };
  overlay.addEventListener("pointerup", up);
  overlay.addEventListener("pointercancel", up);
  overlay.addEventListener("pointerleave", () => {
    if (pointers.size > 0) return;
    hover = null;
    hideTip();
    showPair();
  });
  overlay.addEventListener("wheel", (event) => {
    if (event.deltaY === 0) return;
    const out = event.deltaY > 0;
    if (out && heat.zoom <= 1 && !event.ctrlKey) return;  // lets the page scroll
    event.preventDefault();
    heat.zoomAt(Math.exp(-Math.max(-60, Math.min(60, event.deltaY)) * 0.006), ...at(event));
    afterZoom();
    point(event);
  }, { passive: false });
  overlay.addEventListener("dblclick", (event) => {
    heat.zoomAt(2.5, ...at(event));
    afterZoom();
  });
}

// --- keys ------------------------------------------------------------------------------------------------------------------

function onKey(event) {
  if ($("help").open || event.altKey || event.metaKey) return;
  const inField = /^(SELECT|INPUT|TEXTAREA)$/.test(event.target.tagName);
  const onButton = event.target.tagName === "BUTTON";
  const { rows, cols } = what.map;
  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const anywhere = {
    "?": () => $("help").showModal(),
    "/": () => $("find").focus(), "x": hideHead,
    "[": () => stepHead(-1), "]": () => stepHead(1),
    "{": () => chooseHead(state.layer - 1, state.head), "}": () => chooseHead(state.layer + 1, state.head),
    "+": () => zoomed(1.6), "=": () => zoomed(1.6), "-": () => zoomed(1 / 1.6), "0": () => zoomed(0), "Escape": () => zoomed(0),
  };
  const onMap = {
    PageUp: () => chooseHead(state.layer - 1, state.head), PageDown: () => chooseHead(state.layer + 1, state.head),
    Home: () => choose(event.ctrlKey ? { q: 0, k: state.k } : { q: state.q, k: 0 }),
    End: () => choose(event.ctrlKey ? { q: rows - 1, k: state.k } : { q: state.q, k: cols - 1 }),
    Enter: () => choose({ q: state.q, k: ranked(what, state, false)[0]?.at ?? state.k }),
  };
  let act = null;
  const step = steps[event.key];
  if (step && !inField && !onButton && !event.ctrlKey) {
    act = event.shiftKey ? () => heat.pan(-60 * step[1], -60 * step[0]) : () => choose({ q: state.q + step[0], k: state.k + step[1] });
  } else if (!inField && !event.ctrlKey && anywhere[event.key]) act = anywhere[event.key];
  else if (event.target === overlay && onMap[event.key]) act = onMap[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

// --- beginning -------------------------------------------------------------------------------------------------------------

const text = new RunningText((position) => {
  if (state.across) choose({ q: state.q, k: position });
  else if (position >= layer().start) choose({ q: position - layer().start, k: state.k });
}, (position) => {
  const row = position === null ? -1 : position - layer().start;
  hover = position === null ? null : state.across ? { q: state.q, k: position } : row >= 0 ? { q: row, k: state.k } : null;
  showPair();
});

// The head with the most structure.
function interestingHead() {
  let most = -Infinity;
  layers.forEach((each, l) => each.structure.forEach((bits, h) => {
    if (bits > most) [most, state.layer, state.head] = [bits, l, h];
  }));
}

// An interesting pair: the strongest one away from the diagonal and the ends, in a row in the first third.
function interestingPair() {
  const map = mapOf(layer(), state.head), { rows, cols } = map;
  let best = -1;
  for (let q = 0; q < Math.max(1, Math.floor(rows / 3)); ++q) {
    for (let k = Math.max(1, map.low[q]); k < Math.min(cols - 1, map.high[q]); ++k) {
      if (Math.abs(k - q - (pooled ? 0 : layer().start)) < 2) continue;
      if (map.data[q * cols + k] > best) [best, state.q, state.k] = [map.data[q * cols + k], q, k];
    }
  }
}

function describePage() {
  const first = layers[0], most = Math.max(...layers.map((each) => each.heads.length));
  const count = (n, word) => `${whole(n)} ${word}${n === 1 ? "" : "s"}`;
  const stretch = digits(first.keys / first.cols);
  const tokens = first.queries === first.keys ? count(first.keys, "token") : `${count(first.queries, "query")}, ${count(first.keys, "key")}`;
  $("subtitle").textContent = [data.model, data.file, count(layers.length, "layer"), count(most, "head"), tokens].filter(Boolean).join(" \u00b7 ");
  const things = pooled
    ? `Too many tokens to draw one by one: each row is a stretch of about ${stretch} tokens, each column a stretch that it looks at.`
    : "Each row is a token, each column a token that it looks at.";
  const sum = layers.some((each) => each.sinks) ? "what a row lacks of 100\u2009% goes to a sink, which is no token" : "a row adds up to 100\u2009%";
  $("how").textContent = `${things} The stronger the color, the larger the share of its attention that goes there; ${sum}.`;
  const own = pooled ? "Pooled maps, computed by heed from the tensors." : holdsMaps
    ? "Computed by heed from the tensors, rounded to 16-bit floats." : "Computed in this page from q and k, rounded to 16-bit floats.";
  const options = [...new Set(layers.map((each) => each.options))].join("; ");
  $("notes").replaceChildren(...[`${own} Written by heed ${data.version}.`, [`Attention: ${options}`, ...data.notes].join("; ") + "."]
    .map((note) => element("li", note)));
}

describePage();
wireControls();
wirePointer();
document.addEventListener("keydown", onKey);
ramp = makeRamp(isDark());
interestingHead();
readHash();
if (!new URLSearchParams(location.hash.slice(1)).has("row")) interestingPair();
arrange();
showHead();
afterZoom();
addEventListener("hashchange", () => { readHash(); hover = null; arrange(); showHead(); });
followTheme(() => {
  ramp = makeRamp(isDark());
  showHead();
  grid.paintAll();
});
new ResizeObserver(() => {
  heat.layout();
  implied.layout();
}).observe($("stage"));
inSlices(grid.compute(), () => {
  arrange();  // all values for sorting and naming heads are known now
  document.documentElement.dataset.ready = "true";
});

// For tests and exploration: the page's own numbers.
window.heed = {
  state, layers, grid, ramp: (dark) => makeRamp(dark).rgb, found: () => what.marks,
  probability: (l, h, q, k) => mapOf(layers[l], h).data[q * layers[l].cols + k],
  centre: (q, k) => heat.centre(q, k),
  impliedCentre: (q, k) => implied.heat.centre(q, k),
  implied: (l, h, m, q) => [...new Implied(layers[l], h, layers[l].implied[m]).row(q)],
};
