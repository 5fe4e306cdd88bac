// The panel around the map: the pair in words, the row as bars, the head in numbers, the text.

const BARS = 14;

// The values along the row or, `across`, the column of a pair: [{ at, value }], strongest first.
function ranked(what, { q, k }, across) {
  const { map, values } = what, list = [];
  if (across) {
    for (let i = 0; i < map.rows; ++i) {
      if (isVisible(map, { q: i, k })) list.push({ at: i, value: values[i * map.cols + k] });
    }
  } else {
    for (let j = map.low[q]; j < map.high[q]; ++j) if (isVisible(map, { q, k: j })) list.push({ at: j, value: values[q * map.cols + j] });
  }
  const size = ({ value }) => (Number.isNaN(value) ? -1 : value);
  return list.sort((a, b) => size(b) - size(a));
}

// A token in quotes, since it may be a comma; positions have none.
const quoted = ({ tokens }, words) => (tokens ? ["\u201c", element("b", words), "\u201d"] : [element("b", words)]);

const isVisible = (map, { q, k }) => k >= map.low[q] && k < map.high[q] && !(map.data[q * map.cols + k] < 0);

// A remark on a pair that the pattern drops, or a cell that it keeps only partly; otherwise empty.
function loss({ map, kept }, { q, k }) {
  const share = kept && isVisible(map, { q, k }) ? kept[q * map.cols + k] : 255;
  return share === 255 ? "" : share === 0 ? "the pattern drops this" : `the pattern keeps ${percent(share / 255)} of these pairs`;
}

// A sentence for display and for screen readers.
function describe(what, pair) {
  const { layer, map, values, measure } = what;
  const from = joined(rowName(layer, pair.q)), to = joined(colName(layer, pair.k));
  if (!isVisible(map, pair)) return `${from} is not allowed to look at ${to}`;
  const share = percent(values[pair.q * map.cols + pair.k]), without = loss(what, pair), end = without && `; ${without}`;
  if (measure === "max") return `the strongest single pair from ${from} to ${to} has ${share}${end}`;
  return pooled ? `${from} give ${share} of their attention to ${to}${end}` : `${from} gives ${share} of its attention to ${to}${end}`;
}

function fillReadout(what, pair) {
  const { layer, map, values, measure } = what, value = values[pair.q * map.cols + pair.k], visible = isVisible(map, pair);
  $("value").textContent = visible ? percent(value) : "\u2014";
  const readout = $("readout");
  readout.dataset.query = pair.q;
  readout.dataset.key = pair.k;
  readout.dataset.value = visible ? value : 0;
  const name = ([words, where]) => {
    const parts = quoted(layer, words);
    if (where !== "") parts.push(element("i", ` ${where}`));
    return parts;
  };
  const from = name(rowName(layer, pair.q)), to = name(colName(layer, pair.k));
  if (!visible) $("sentence").replaceChildren(...from, " is not allowed to look at ", ...to);
  else if (measure === "max") $("sentence").replaceChildren("in one pair, from ", ...from, " to ", ...to);
  else $("sentence").replaceChildren(`of the attention of `, ...from, " goes to ", ...to);
  const without = loss(what, pair);
  if (without !== "") $("sentence").append("; ", element("em", without));
}

// Calls `choose` with the pair of a clicked bar.
function fillBars(what, pair, across, choose) {
  const { layer } = what, list = ranked(what, pair, across), shown = list.slice(0, BARS);
  const top = shown.length > 0 && shown[0].value > 0 ? shown[0].value : 1;
  const [words] = across ? colName(layer, pair.k) : rowName(layer, pair.q);
  $("row-title").replaceChildren(...(across ? ["Who looks most at ", ...quoted(layer, words)] : ["Where ", ...quoted(layer, words), pooled ? " look most" : " looks most"]));
  $("bars").replaceChildren(...shown.map(({ at, value }) => {
    const [label, where] = across ? rowName(layer, at) : colName(layer, at);
    const button = element("button", "", { type: "button", title: joined([label, where]) });
    const token = element("span", "", { class: "token" });
    token.append(element("bdi", label.replace(/^tokens? (?=\d)/, "")));
    if (where !== "" && !pooled) token.append(element("small", where));
    const bar = element("span", "", { class: "bar" });
    bar.style.width = `${Math.max(0, 100 * value / top)}%`;
    bar.classList.toggle("dropped", loss(what, across ? { q: at, k: pair.k } : { q: pair.q, k: at }) !== "");
    button.append(token, bar, element("span", percent(value), { class: "share" }));
    if (at === (across ? pair.q : pair.k)) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => choose(across ? { q: at, k: pair.k } : { q: pair.q, k: at }));
    const item = element("li");
    item.append(button);
    return item;
  }));
  const others = list.length - shown.length;
  let rest = "";
  if (list.length === 0) rest = across ? "Nobody is allowed to look here." : "This row is not allowed to look anywhere.";
  else if (others > 0 && !across && what.measure !== "max") {
    const left = list.slice(BARS).reduce((sum, { value }) => sum + value, 0);
    rest = `and ${percent(left)} on ${whole(others)} other${others === 1 ? "" : "s"}`;
  } else if (others > 0) rest = `and ${whole(others)} other${others === 1 ? "" : "s"}`;
  $("rest").textContent = rest;
}

// Describes the head in a sentence and in fractions.
function fillStats(layer, summary) {
  const stats = $("stats");
  if (!summary) {
    stats.replaceChildren(element("p", "The numbers of this head are not defined: its q or k hold NaN or infinities."));
    return;
  }
  const favorite = pooled ? position(...layer.colRange(summary.favorite)) : joined(colName(layer, summary.favorite));
  const things = pooled ? "stretches of text" : "tokens";
  const list = element("dl");
  const rows = [...Object.keys(HABITS).map((name) => [HABITS[name], summary[name]]), [`most seen: ${favorite}`, summary.favoriteShare]];
  for (const [name, share] of rows) {
    const meter = element("dd", "", { class: "meter" }), fill = element("div");
    fill.style.width = `${Math.min(100, 100 * share)}%`;
    meter.append(fill);
    list.append(element("dt", name, { title: name }), meter, element("dd", percent(share), { class: "number" }));
  }
  const habitText = habit(summary);
  const width = summary.spread < 9.95 ? summary.spread.toFixed(1) : summary.spread.toFixed(0);
  const sentence = `A typical row of this head spreads over about ${width} of the ${digits(summary.seen)} ${things} it may look at.`;
  stats.replaceChildren(element("h3", `This head: ${habitText}`), element("p", sentence), list);
}

// The legend below the map.
function fillLegend(what) {
  const canvas = $("legend"), context = canvas.getContext("2d"), image = context.createImageData(256, 1);
  new Uint32Array(image.data.buffer).set(ramp.packed);
  context.putImageData(image, 0, 0);
  $("legend-low").textContent = what.scale === "log" ? (what.norm === "row" ? "1/10,000 of the most" : percent(what.max / 10 ** LOG_DECADES)) : "0";
  $("legend-high").textContent = what.norm === "row" ? "the most of the row" : percent(what.max);
  $("masked-key").hidden = !what.layer.masks;
  $("dropped-key").hidden = !what.kept;
}

// The fraction that the pattern keeps in a head: the line below the legend.
function fillKept({ kept }, head) {
  $("kept-line").hidden = !kept;
  if (!kept) return;
  const share = kept.attention[head], of = share === null ? "" : `, which hold ${percent(share)} of a row's attention on average`;
  $("kept-line").replaceChildren(element("code", data.pattern), ` keeps ${percent(kept.pairs[head])} of the pairs`, of);
}

// The running text. Tokens are created once per layer; `choose` gets the position of a clicked token, `peek` that of
// the token under the pointer, or null.
class RunningText {
  constructor(choose, peek) {
    this.words = $("words");
    this.spans = [];
    this.words.addEventListener("click", (event) => this.at(event, choose));
    this.words.addEventListener("pointerover", (event) => {
      if (event.pointerType === "mouse") this.at(event, peek);
    });
    this.words.addEventListener("pointerleave", () => peek(null));
  }

  at(event, use) {
    const index = event.target.dataset?.at;
    if (index !== undefined) use(Number(index));
  }

  fill(what, pair, across) {
    const { layer, map, values, scale, marks } = what;
    const hidden = pooled || !layer.tokens;
    $("text-section").hidden = hidden;
    if (hidden) return;
    if (this.tokens !== layer.tokens) {
      this.tokens = layer.tokens;
      this.spans = [];
      this.words.replaceChildren();
      running(layer.tokens).forEach(([space, text], i) => {
        if (space !== "") this.words.append(space);
        const span = element("span", text, { "data-at": i });
        this.words.append(span);
        this.spans.push(span);
      });
    }
    const own = pair.q + layer.start, [reader] = rowName(layer, pair.q), [seen] = colName(layer, pair.k);
    $("text-title").replaceChildren(...(across
      ? ["The text: who looks at ", ...quoted(layer, seen), "?"] : ["The text, as ", ...quoted(layer, reader), " sees it"]));
    const strongest = ranked(what, pair, across)[0]?.value ?? 0;
    this.spans.forEach((span, position) => {
      let value = -1;
      if (across) {
        const i = position - layer.start;
        if (i >= 0 && i < map.rows && isVisible(map, { q: i, k: pair.k })) value = values[i * map.cols + pair.k];
      } else if (isVisible(map, { q: pair.q, k: position })) value = values[pair.q * map.cols + position];
      // Linear unless the logarithmic scale is chosen: a page with every word tinted is hard to read.
      const index = Math.round(0.86 * toneIndex(value, strongest, scale === "log" ? "log" : "linear"));
      span.style.backgroundColor = index > 2 ? css(ramp.rgb[index]) : "";
      span.style.color = value < 0 || Number.isNaN(value) ? "var(--muted)" : index <= 2 ? "" : ramp.isLightText(index) ? "#fff" : "#1f1c25";
      span.classList.toggle("reader", position === (across ? pair.k : own));
      span.classList.toggle("found", marks?.columns.has(position) ?? false);
      span.title = value < 0 ? "" : percent(value);
    });
  }
}
