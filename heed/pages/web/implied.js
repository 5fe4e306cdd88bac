// The map that a linear mechanism implies: the weights of its sum of values, computed from q and k a row at a time.

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

  // Weights of row i divided by their sum, or for a mechanism without a normaliser their magnitudes divided by the sum
  // of these.
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

// The second picture, below the first and in its colors, so that equal values look equal; `what` has the same form.
class ImpliedView {
  constructor(point, choose) {
    const overlay = $("implied-overlay");
    this.heat = new HeatMap($("implied-stage"), $("implied"), overlay);
    this.turn = 0;
    const pairAt = (event) => {
      const box = overlay.getBoundingClientRect();
      return this.heat.what ? this.heat.pairAt(event.clientX - box.left, event.clientY - box.top) : null;
    };
    overlay.addEventListener("pointermove", (event) => { if (event.pointerType === "mouse") point(pairAt(event)); });
    overlay.addEventListener("pointerleave", () => point(null));
    overlay.addEventListener("click", (event) => {
      const pair = pairAt(event);
      if (pair) choose(pair);
    });
    $("mechanism").addEventListener("change", () => {
      this.show(this.what, this.head);
      this.showPair(this.pair);
    });
  }

  show(what, head) {
    const list = what.layer.implied ?? [];
    Object.assign(this, { what, head });
    $("implied-section").hidden = list.length === 0;
    if (list.length === 0) return;
    const names = list.map(({ name }) => name);
    if ([...$("mechanism").options].map(({ value }) => value).join() !== names.join()) {
      $("mechanism").replaceChildren(...names.map((name) => element("option", name, { value: name })));
    }
    const weights = list.find(({ name }) => name === $("mechanism").value);
    this.implied = new Implied(what.layer, head, weights);
    $("implied-note").textContent = `${weights.normalize
      ? "The shares of the values that it sums"
      : "The sizes of its weights as shares of their sum, by which it does not divide"}, in the colors of the map above.`;
    const turn = ++this.turn;
    $("implied").dataset.painted = "";
    const steps = this.compute();
    inSlices({ next: () => (turn === this.turn ? steps.next() : { done: true }) }, () => {
      if (turn === this.turn) this.paint();
    });
  }

  // Computes the whole map, and its distance from the exact one: half the sum of the absolute differences in a row
  // (total variation), averaged over rows.
  *compute() {
    const { map } = this.what, { rows, cols } = map, data = new Float32Array(rows * cols);
    const low = new Int32Array(rows), high = new Int32Array(rows);
    let moved = 0, used = 0;
    for (let i = 0; i < rows; ++i) {
      const row = this.implied.row(i), begin = i * cols;
      data.set(row, begin);
      high[i] = row.length;
      let difference = 0;
      for (let j = 0; j < Math.max(row.length, map.high[i]); ++j) {
        const exact = j >= map.low[i] && j < map.high[i] ? map.data[begin + j] : 0;
        difference += Math.abs(exact - data[begin + j]);
      }
      if (difference >= 0) [moved, used] = [moved + difference / 2, used + 1];
      yield;
    }
    this.map = { rows, cols, data, low, high };
    this.distance = moved / used;
  }

  paint() {
    const { layer, rowMax, max, scale, norm, marks } = this.what, { map } = this;
    this.heat.show({ layer, map, values: map.data, rowMax, max, scale, norm, marks });
    $("distance").textContent = percent(this.distance);
    $("implied").dataset.painted = "true";
    this.heat.setCursor(this.pair);
  }

  // Shows the same part of the map as the other picture.
  follow({ zoom, x, y }) {
    if (!this.heat.what || $("implied-section").hidden) return;
    Object.assign(this.heat, { zoom, x, y });
    this.heat.draw();
  }

  mark(marks) {
    if (this.heat.what) this.heat.what.marks = marks;
  }

  layout() {
    if (this.heat.what && !$("implied-section").hidden) this.heat.layout();
  }

  showPair(pair) {
    this.pair = pair;
    if ($("implied-section").hidden) return;
    if (this.heat.what) this.heat.setCursor(pair);
    const { layer, map, values } = this.what, row = this.implied.row(pair.q);
    const share = (seen, value) => (seen ? percent(value) : "not allowed to look");
    const exact = share(isVisible(map, pair), values[pair.q * map.cols + pair.k]);
    $("implied-pair").replaceChildren(...quoted(layer, rowName(layer, pair.q)[0]), " to ", ...quoted(layer, colName(layer, pair.k)[0]), ": ",
      element("b", share(pair.k < row.length, row[pair.k])), `, in exact attention ${exact}`);
  }
}
