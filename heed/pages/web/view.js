// The page of `heed view`: what is chosen, and what keys, mouse and fingers do to it.

const state = { layer: 0, head: 0, q: 0, k: 0, scale: "sqrt", norm: "map", measure: "mean", pattern: "shade", across: false };
let hover = null;  // a pair that is pointed at; the chosen one returns when it goes
let what = null;   // what the map shows
const implied = new ImpliedView((pair) => { hover = pair; showPair(true); }, choose);
const overlay = $("overlay");
const heat = new HeatMap($("stage"), $("heat"), overlay, () => implied.follow(heat));
const summaries = layers.map(() => []);
const thumbs = [];

const layer = () => layers[state.layer];
const clampTo = (value, n) => Math.min(n - 1, Math.max(0, value));

// --- showing ---------------------------------------------------------------------------------------------------------------

// A head that was not shown before.
function showHead() {
  const current = layer(), map = mapOf(current, state.head);
  state.q = clampTo(state.q, map.rows);
  state.k = clampTo(state.k, map.cols);
  const shown = state.measure === "max" && map.strongest ? map.strongest : map;
  what = { layer: current, map, values: shown.data, rowMax: shown.rowMax, max: shown.max, scale: state.scale, norm: state.norm, measure: state.measure,
    kept: state.pattern === "shade" ? current.keptCells(state.head) : null };
  const summary = summaries[state.layer][state.head] ??= summarize(current, map);
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
  for (const thumb of thumbs) {
    const chosen = thumb.layer === state.layer && thumb.head === state.head;
    thumb.button.setAttribute("aria-pressed", chosen);
    thumb.button.tabIndex = chosen ? 0 : -1;
  }
  showPair();
}

// The pair that is pointed at, else the chosen one. While the mouse moves, what surrounds the map follows once per frame.
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

// The next head of all, from one layer into the next.
function stepHead(by) {
  const head = state.head + by;
  if (head < 0 && state.layer > 0) chooseHead(state.layer - 1, layers[state.layer - 1].heads.length - 1);
  else if (head >= layer().heads.length && state.layer + 1 < layers.length) chooseHead(state.layer + 1, 0);
  else chooseHead(state.layer, head);
}

// --- the link --------------------------------------------------------------------------------------------------------------

const HASH = { layer: "layer", head: "head", q: "row", k: "column" };

function writeHash() {
  const parts = Object.entries(HASH).map(([key, name]) => `${name}=${state[key]}`);
  for (const [key, usual] of [["scale", "sqrt"], ["norm", "map"], ["measure", "mean"], ["pattern", "shade"]]) {
    if (state[key] !== usual) parts.push(`${key}=${state[key]}`);
  }
  if (state.across) parts.push("across=1");
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
  for (const key of ["scale", "norm", "measure", "pattern"]) {
    if ([...$(key).options].some((option) => option.value === given.get(key))) $(key).value = state[key] = given.get(key);
  }
  setDirection(given.get("across") === "1");
}

// --- pickers and buttons ---------------------------------------------------------------------------------------------------

function fillHeadPicker() {
  $("head").replaceChildren(...layer().heads.map((name, i) => element("option", name, { value: i })));
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

function savePicture() {
  const title = `Layer ${layerName(layer())}, head ${layer().heads[state.head]}: ${habit(summaries[state.layer][state.head])}`;
  heat.toBlob(title, (blob) => {
    const url = URL.createObjectURL(blob);
    const link = element("a", "", { href: url, download: `attention-layer${layerName(layer())}-head${layer().heads[state.head]}.png` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  });
}

function wireControls() {
  $("layer").replaceChildren(...layers.map((each, i) => element("option", layerName(each), { value: i })));
  fillHeadPicker();
  $("layer").addEventListener("change", () => chooseHead(Number($("layer").value), state.head));
  $("head").addEventListener("change", () => chooseHead(state.layer, Number($("head").value)));
  for (const key of ["scale", "norm", "measure", "pattern"]) {
    $(key).addEventListener("change", () => {
      state[key] = $(key).value;
      showHead();
      paintThumbs();
      changed();
    });
  }
  $("measure-label").hidden = !pooled;
  $("pattern-label").hidden = !data.pattern;
  $("layer").parentNode.hidden = layers.length === 1;
  $("looks-at").addEventListener("click", () => { setDirection(false); showPair(); changed(); });
  $("looked-at").addEventListener("click", () => { setDirection(true); showPair(); changed(); });
  $("zoom-in").addEventListener("click", () => zoomed(1.6));
  $("zoom-out").addEventListener("click", () => zoomed(1 / 1.6));
  $("zoom-reset").addEventListener("click", () => zoomed(0));
  $("save").addEventListener("click", savePicture);
  $("help-open").addEventListener("click", () => $("help").showModal());
}

// --- all heads -------------------------------------------------------------------------------------------------------------

const THUMB = 64;  // pixels of a thumbnail

function makeThumbs() {
  const most = Math.max(...layers.map((each) => each.heads.length));
  const box = $("thumbs");
  box.style.gridTemplateColumns = `max-content repeat(${most}, minmax(14px, ${most < 6 ? "92px" : "1fr"}))`;
  box.append(element("span", "", { class: "axis" }));
  for (let h = 0; h < most; ++h) {
    const names = new Set(layers.filter((each) => h < each.heads.length).map((each) => each.heads[h]));
    box.append(element("span", names.size === 1 ? [...names][0] : "", { class: "axis", "aria-hidden": "true" }));
  }
  layers.forEach((each, l) => {
    box.append(element("span", layerName(each), { class: "axis layer", "aria-hidden": "true" }));
    for (let h = 0; h < most; ++h) {
      if (h >= each.heads.length) {
        box.append(element("span"));
        continue;
      }
      const name = `Layer ${layerName(each)}, head ${each.heads[h]}`;
      const button = element("button", "", { type: "button", class: "thumb", "aria-pressed": "false", "aria-label": name, title: name, tabindex: "-1" });
      const canvas = element("canvas", "", { width: "1", height: "1" });
      button.append(canvas);
      button.addEventListener("click", () => chooseHead(l, h));
      box.append(button);
      thumbs.push({ layer: l, head: h, button, canvas, name, small: null });
    }
  });
  box.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const move = moves[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    chooseHead(state.layer + move[0], state.head + move[1]);
    thumbs.find((thumb) => thumb.layer === state.layer && thumb.head === state.head).button.focus();
  });
}

function paintThumb({ canvas, small }) {
  if (!small) return;
  canvas.width = small.cols;
  canvas.height = small.rows;
  const context = canvas.getContext("2d"), image = context.createImageData(small.cols, small.rows);
  const pixels = new Uint32Array(image.data.buffer), masked = packedColor(cssColor("--masked"));
  for (let i = 0; i < small.rows; ++i) {
    const line = small.data.subarray(i * small.cols, (i + 1) * small.cols);
    const reference = state.norm === "row" ? Math.max(...line) : small.max;
    for (let j = 0; j < small.cols; ++j) {
      pixels[i * small.cols + j] = line[j] < 0 ? masked : ramp.packed[toneIndex(line[j], reference, state.scale)];
    }
  }
  context.putImageData(image, 0, 0);
}
const paintThumbs = () => thumbs.forEach(paintThumb);

// All thumbnails, a few milliseconds at a time, so that the page answers meanwhile.
function* computeThumbs() {
  for (const thumb of thumbs) {
    const each = layers[thumb.layer], map = recent.get(`${thumb.layer} ${thumb.head}`) ?? (yield* each.compute(thumb.head));
    thumb.small = shrink(map, THUMB);
    const summary = summaries[thumb.layer][thumb.head] ??= summarize(each, map);
    thumb.button.title = `${thumb.name}: ${habit(summary)}`;
    thumb.button.setAttribute("aria-label", thumb.button.title);
    paintThumb(thumb);
    yield;
  }
}

function inSlices(steps, finished) {
  const slice = () => {
    const end = performance.now() + 12;
    while (performance.now() < end) if (steps.next().done) return finished();
    setTimeout(slice);
  };
  setTimeout(slice);
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
  const pointers = new Map();  // those that are down: [x, y]
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
    if (out && heat.zoom <= 1 && !event.ctrlKey) return;  // the page may scroll
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

// The head with most to see.
function interestingHead() {
  let most = -Infinity;
  layers.forEach((each, l) => each.structure.forEach((bits, h) => {
    if (bits > most) [most, state.layer, state.head] = [bits, l, h];
  }));
}

// A pair that says something: the strongest one away from the diagonal and the ends, of a row in the first third.
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
  $("how").textContent = pooled
    ? `Too many tokens to draw one by one: each row is a stretch of about ${stretch} tokens, each column a stretch that it looks at. The stronger the color, the larger the share of its attention that goes there; a row adds up to 100\u2009%.`
    : `Each row is a token, each column a token that it looks at. The stronger the color, the larger the share of its attention that goes there; a row adds up to 100\u2009%.`;
  const own = pooled ? "Pooled maps, computed by heed from the tensors." : "Computed in this page from q and k, rounded to 16-bit floats.";
  const options = [...new Set(layers.map((each) => each.options))].join("; ");
  $("notes").replaceChildren(...[`${own} Written by heed ${data.version}.`, [`Attention: ${options}`, ...data.notes].join("; ") + "."]
    .map((note) => element("li", note)));
}

describePage();
wireControls();
wirePointer();
makeThumbs();
document.addEventListener("keydown", onKey);
ramp = makeRamp(isDark());
interestingHead();
readHash();
if (!new URLSearchParams(location.hash.slice(1)).has("row")) interestingPair();
showHead();
afterZoom();
addEventListener("hashchange", () => { readHash(); hover = null; showHead(); });
followTheme(() => {
  ramp = makeRamp(isDark());
  showHead();
  paintThumbs();
});
new ResizeObserver(() => {
  heat.layout();
  implied.layout();
}).observe($("stage"));
inSlices(computeThumbs(), () => { document.documentElement.dataset.ready = "true"; });

// For tests and for the curious: the page's own numbers.
window.heed = {
  state, layers,
  probability: (l, h, q, k) => mapOf(layers[l], h).data[q * layers[l].cols + k],
  centre: (q, k) => heat.centre(q, k),
  impliedCentre: (q, k) => implied.heat.centre(q, k),
  implied: (l, h, m, q) => [...new Implied(layers[l], h, layers[l].implied[m]).row(q)],
};
