// All heads as thumbnails: selection, order, and navigation between them.

const THUMB = 64;  // pixels of a thumbnail

// Sort orders of heads, largest first: from a head, { layer, head, summary }, to a number and its text. Structure is
// known at once, the others after a head's map has been computed.
const ORDERS = {
  layer: null,
  structure: [({ layer, head }) => layers[layer].structure[head], (x) => `${digits(x)} bits`],
  entropy: [({ summary }) => summary?.entropy, (x) => `${digits(x)} bits`],
  distance: [({ summary }) => summary?.distance, (x) => `${digits(x)} away`],
  first: [({ summary }) => summary?.first, percent],
};

// True if a text names the head: by numbers and ranges "0-3, 7", with a layer "2.7", "4.*", or by words of its habit,
// such as "previous". An empty text names all heads.
function isNamed(text, layer, name, words) {
  const terms = text.toLowerCase().split(",").map((term) => term.trim()).filter((term) => term !== "");
  const within = (part, label) => {
    const [from, to] = part.split("-").map(Number), n = Number(label);
    return part === "*" || part === label.toLowerCase() || (n >= from && n <= (to ?? from));
  };
  const numbers = /^(?:(\d+(?:-\d+)?|\*)\.)?(\d+(?:-\d+)?|\*)$/;
  return terms.length === 0 || terms.some((term) => {
    const match = numbers.exec(term);
    return match ? within(match[1] ?? "*", layer) && within(match[2], name) : words.toLowerCase().includes(term);
  });
}

class HeadGrid {
  // Calls `choose` with the layer and the head of a clicked thumbnail.
  constructor(choose) {
    this.box = $("thumbs");
    this.hidden = new Set();
    this.thumbs = layers.flatMap((each, layer) => each.heads.map((name, head) => this.make(layer, head, name, choose)));
    this.box.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const next = this.neighbor(event.key);
      if (next === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      if (!next) return;
      choose(next.layer, next.head);
      next.button.focus();
    });
  }

  make(layer, head, name, choose) {
    const title = `Layer ${layerName(layers[layer])}, head ${name}`;
    const button = element("button", "", { type: "button", class: "thumb", "aria-pressed": "false", tabindex: "-1" });
    const canvas = element("canvas", "", { width: "1", height: "1" });
    button.append(canvas);
    button.addEventListener("click", () => choose(layer, head));
    const thumb = { layer, head, name, title, button, canvas, caption: element("span", "", { class: "caption", "aria-hidden": "true" }) };
    this.say(thumb);
    return thumb;
  }

  // Writes the known values of a head to its thumbnail.
  say(thumb) {
    const value = this.value(thumb);
    const parts = [thumb.summary === undefined ? "" : habit(thumb.summary), value === undefined ? "" : ORDERS[this.order][1](value)].filter((x) => x !== "");
    const title = [thumb.title, ...parts.slice(0, 1)].join(": ") + parts.slice(1).map((x) => `; ${x}`).join("");
    thumb.button.title = title;
    thumb.button.setAttribute("aria-label", title);
    thumb.caption.replaceChildren(element("b", `${layers.length > 1 ? `${layerName(layers[thumb.layer])}.` : ""}${thumb.name}`),
      value === undefined ? "" : ` ${ORDERS[this.order][1](value)}`);
  }

  value(thumb) {
    const value = ORDERS[this.order ?? "layer"]?.[0](thumb);
    return Number.isFinite(value) ? value : undefined;
  }

  // Shows the heads that `only` names and that are not hidden, in an order; heads without a value come last.
  arrange({ order, reverse, only }) {
    Object.assign(this, { order });
    this.shown = this.thumbs.filter((thumb) => !this.hidden.has(thumb) && isNamed(only, layerName(layers[thumb.layer]), thumb.name,
      thumb.button.title));
    if (ORDERS[order]) {
      const value = (thumb) => this.value(thumb) ?? (reverse ? Infinity : -Infinity);
      this.shown.sort((a, b) => (reverse ? value(a) - value(b) : value(b) - value(a)) || 0);
    }
    this.thumbs.forEach((thumb) => this.say(thumb));
    this.lay();
    const all = this.thumbs.length, n = this.shown.length;
    $("shown-heads").textContent = n === all ? "" : n === 0 ? "no head has this name" : `${whole(n)} of ${whole(all)} heads`;
    $("all-heads").disabled = n === all;
    $("reverse").disabled = !ORDERS[order];
    $("reverse").setAttribute("aria-pressed", reverse);
  }

  // Layers are rows if that is the order; otherwise heads follow one another with their sort value.
  lay() {
    const { box, shown } = this, sorted = ORDERS[this.order] !== null;
    box.classList.toggle("sorted", sorted);
    if (sorted) {
      box.style.gridTemplateColumns = "";
      box.replaceChildren(...shown.map((thumb) => {
        const cell = element("span", "", { class: "cell" });
        cell.append(thumb.button, thumb.caption);
        return cell;
      }));
      return;
    }
    const columns = [...new Set(shown.map(({ head }) => head))].sort((a, b) => a - b);
    const rows = [...new Set(shown.map(({ layer }) => layer))];
    box.style.gridTemplateColumns = `max-content repeat(${columns.length}, minmax(14px, ${columns.length < 6 ? "92px" : "1fr"}))`;
    const axis = (text, more = "") => element("span", text, { class: `axis${more}`, "aria-hidden": "true" });
    box.replaceChildren(axis(""), ...columns.map((head) => {
      const names = new Set(layers.filter((each) => head < each.heads.length).map((each) => each.heads[head]));
      return axis(names.size === 1 ? [...names][0] : "");
    }));
    for (const layer of rows) {
      box.append(axis(layerName(layers[layer]), " layer"));
      for (const head of columns) {
        box.append(shown.find((thumb) => thumb.layer === layer && thumb.head === head)?.button ?? element("span"));
      }
    }
  }

  find(layer, head) { return this.thumbs.find((thumb) => thumb.layer === layer && thumb.head === head); }

  // Marks the chosen head, which receives focus from the Tab key; if it is not shown, the first one does.
  mark(layer, head) {
    this.chosen = this.find(layer, head);
    const entry = this.shown.includes(this.chosen) ? this.chosen : this.shown[0];
    for (const thumb of this.thumbs) {
      thumb.button.setAttribute("aria-pressed", thumb === this.chosen);
      thumb.button.tabIndex = thumb === entry ? 0 : -1;
    }
    $("hide-head").disabled = !this.shown.includes(this.chosen) || this.shown.length === 1;
  }

  // The shown head `by` places further; for a head that is not shown, the nearest one after or before it.
  step(by) {
    const { shown, thumbs, chosen } = this, at = shown.indexOf(chosen);
    if (at >= 0) return shown[at + by] ?? chosen;
    const place = thumbs.indexOf(chosen);
    return (by > 0 ? thumbs.slice(place) : thumbs.slice(0, place).reverse()).find((thumb) => shown.includes(thumb)) ?? chosen;
  }

  // The target of an arrow key: undefined for other keys, null if there is none.
  neighbor(key) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }, move = moves[key];
    if (!move) return undefined;
    const { shown, chosen } = this;
    if (!shown.includes(chosen)) return shown[0] ?? null;
    if (ORDERS[this.order]) {
      const across = getComputedStyle(this.box).gridTemplateColumns.split(" ").length;
      return shown[shown.indexOf(chosen) + move[1] + move[0] * across] ?? null;
    }
    const ahead = shown.filter(({ layer, head }) => (move[0] === 0 ? layer === chosen.layer && (head - chosen.head) * move[1] > 0
      : head === chosen.head && (layer - chosen.layer) * move[0] > 0));
    return (move[0] + move[1] > 0 ? ahead[0] : ahead.at(-1)) ?? null;
  }

  // Hides the chosen head, and returns the one that follows it.
  hide() {
    const { shown, chosen } = this, at = shown.indexOf(chosen);
    if (at < 0 || shown.length === 1) return null;
    this.hidden.add(chosen);
    return shown[at + 1] ?? shown[at - 1];
  }

  paint(thumb) {
    const { canvas, small } = thumb;
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

  paintAll() { this.thumbs.forEach((thumb) => this.paint(thumb)); }

  // Computes all thumbnails, a few milliseconds at a time, so that the page stays responsive.
  *compute() {
    for (const thumb of this.thumbs) {
      const each = layers[thumb.layer], map = recent.get(`${thumb.layer} ${thumb.head}`) ?? (yield* each.compute(thumb.head));
      thumb.small = shrink(map, THUMB);
      thumb.summary ??= summarize(each, map);
      this.say(thumb);
      this.paint(thumb);
      yield;
    }
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
