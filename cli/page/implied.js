// The map that a linear mechanism implies: the shares with which it sums values, a row at a time from q and k. Its matrix is
// never stored: the picture is painted row by row, and the row that is looked at is computed again.

const PER_CHANNEL = { elu1: (x) => (x > 0 ? x + 1 : Math.exp(x)), identity: (x) => x, taylor: (x) => x };
const OF_PRODUCT = { elu1: (x) => x, identity: (x) => x, taylor: (x) => 1 + x + x * x / 2 };

class Implied {
  constructor(layer, h, weights) {
    Object.assign(this, { layer, weights, logDecay: weights.logDecays[h] });
    const key = Math.floor(h * layer.keyHeads / layer.heads.length);
    const map = PER_CHANNEL[weights.form];
    const features = (x, factor) => Float64Array.from(x, (value) => map(value * factor));
    const { q, k } = layer.rowsOf(h);
    this.q = features(q, layer.qFactors[h]);
    this.k = features(k, layer.keyFactors[key]);
  }

  // Keys [0, end) that row i sees.
  end(i) { return this.layer.causal || !this.weights.seesAll ? i + 1 : this.layer.cols; }

  // Shares of row i: weights over their sum, or where a mechanism does not divide, sizes of weights over theirs.
  row(i) {
    const { q, k, logDecay } = this, { form, scale, normalize, eps } = this.weights, { dim } = this.layer;
    const weigh = OF_PRODUCT[form], out = new Float64Array(this.end(i));
    let sum = normalize ? eps : 0;
    for (let j = 0; j < out.length; ++j) {
      let s = 0;
      for (let d = 0, a = i * dim, b = j * dim; d < dim; ++d) s += q[a + d] * k[b + d];
      const weight = weigh(scale * s) * Math.exp((i - j) * logDecay);
      out[j] = normalize ? weight : Math.abs(weight);
      sum += out[j];
    }
    return sum === 0 ? out : out.map((x) => x / sum);
  }
}

// The second picture, below the first and in colors of its own strongest shares; `what` is as in the first.
class ImpliedView {
  constructor(point, choose) {
    this.canvas = $("implied");
    this.turn = 0;
    const pairAt = (event) => {
      const box = this.canvas.getBoundingClientRect(), { cols, rows } = this.what.layer;
      return { q: clampTo(Math.floor((event.clientY - box.top) / box.height * rows), rows),
        k: clampTo(Math.floor((event.clientX - box.left) / box.width * cols), cols) };
    };
    this.canvas.addEventListener("pointermove", (event) => { if (event.pointerType === "mouse") point(pairAt(event)); });
    this.canvas.addEventListener("pointerleave", () => point(null));
    this.canvas.addEventListener("click", (event) => choose(pairAt(event)));
    $("mechanism").addEventListener("change", () => {
      this.show(this.what, this.head, this.plot);
      this.showPair(this.pair);
    });
  }

  // Paints the head that `what` shows, as wide as `plot`, { left, width, height }.
  show(what, head, plot) {
    const list = what.layer.implied ?? [];
    Object.assign(this, { what, head, plot });
    $("implied-section").hidden = list.length === 0;
    if (list.length === 0) return;
    const names = list.map(({ name }) => name);
    if ([...$("mechanism").options].map(({ value }) => value).join() !== names.join()) {
      $("mechanism").replaceChildren(...names.map((name) => element("option", name, { value: name })));
    }
    const weights = list.find(({ name }) => name === $("mechanism").value);
    this.implied = new Implied(what.layer, head, weights);
    $("implied-note").textContent = weights.normalize
      ? "The shares of the values that it sums."
      : "The sizes of its weights as shares of their sum, by which it does not divide.";
    this.layout(plot);
    const turn = ++this.turn;
    this.canvas.dataset.painted = "";
    const steps = this.paint();
    inSlices({ next: () => (turn === this.turn ? steps.next() : { done: true }) }, () => {
      if (turn === this.turn) this.canvas.dataset.painted = "true";
    });
  }

  layout(plot) {
    this.plot = plot;
    Object.assign(this.canvas.style, { marginLeft: `${plot.left}px`, width: `${plot.width}px`, height: `${plot.height}px` });
  }

  *paint() {
    const { rows, cols } = this.what.layer, { norm, scale } = this.what, { implied } = this;
    const rowMax = new Float64Array(rows);
    for (let i = 0; i < rows; ++i) {
      for (const share of implied.row(i)) if (share > rowMax[i]) rowMax[i] = share;
      yield;
    }
    const max = rowMax.reduce((a, b) => Math.max(a, b), 0);
    $("implied-note").textContent += ` The strongest is ${percent(max)}, in the map above ${percent(this.what.max)}.`;
    Object.assign(this.canvas, { width: cols, height: rows });
    const context = this.canvas.getContext("2d"), image = context.createImageData(cols, 1);
    const pixels = new Uint32Array(image.data.buffer);
    const masked = packedColor(cssColor("--masked")), undefinedColor = packedColor(cssColor("--muted"));
    for (let i = 0; i < rows; ++i) {
      const row = implied.row(i), reference = norm === "row" ? rowMax[i] : max;
      for (let j = 0; j < cols; ++j) {
        pixels[j] = j >= row.length ? masked : Number.isNaN(row[j]) ? undefinedColor : ramp.packed[toneIndex(row[j], reference, scale)];
      }
      context.putImageData(image, 0, i);
      yield;
    }
  }

  showPair(pair) {
    this.pair = pair;
    if ($("implied-section").hidden) return;
    const { layer, map, values } = this.what, row = this.implied.row(pair.q);
    const share = (seen, value) => (seen ? percent(value) : "not allowed to look");
    const exact = share(isVisible(map, pair), values[pair.q * map.cols + pair.k]);
    $("implied-pair").replaceChildren(...quoted(layer, rowName(layer, pair.q)[0]), " to ", ...quoted(layer, colName(layer, pair.k)[0]), ": ",
      element("b", share(pair.k < row.length, row[pair.k])), `, in exact attention ${exact}`);
  }
}
