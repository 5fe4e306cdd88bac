// The attention itself: computes one head's map at a time from the page's data.
//
// A map is { rows, cols, data, low, high, rowMax, max }: probabilities, row-major; row i sees columns low[i] up to but
// not including high[i], without masked pairs, which are below 0. Rows are queries and columns keys, or bins of them in
// a page of pooled maps.

const holdsMaps = data.layers[0].bins !== undefined;  // otherwise q and k
const pooled = data.layers.some(({ bins, queries, keys }) => holdsMaps && (bins[0] < queries || bins[1] < keys));

// Returns the bytes of a data element and removes it; null if it does not exist.
function takeBytes(id) {
  const node = $(id);
  if (node === null) return null;
  const text = node.textContent;
  node.remove();
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; ++i) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

// Every float16 as a float32.
const HALF = (() => {
  const table = new Float32Array(65536);
  for (let bits = 0; bits < 65536; ++bits) {
    const sign = bits & 0x8000 ? -1 : 1, exponent = bits >> 10 & 31, fraction = bits & 1023;
    table[bits] = sign * (exponent === 0 ? fraction * 2 ** -24
      : exponent === 31 ? (fraction ? NaN : Infinity) : (1 + fraction / 1024) * 2 ** (exponent - 15));
  }
  return table;
})();

// Elements [begin, begin + count) of a little-endian float16 array.
function halves(bytes, begin, count) {
  const out = new Float32Array(count);
  for (let i = 0, at = 2 * begin; i < count; ++i, at += 2) out[i] = HALF[bytes[at] | bytes[at + 1] << 8];
  return out;
}

const setBytes = new Map();  // sets of cells by id, which layers may share

// Cells of head h of a set, { id, heads, bits }: a bit or a byte each.
function cellsOf({ id, heads, bits = 1 }, h, n) {
  if (!setBytes.has(id)) setBytes.set(id, takeBytes(id));
  const bytes = setBytes.get(id), head = heads === 1 ? 0 : h;
  if (bits === 8) return bytes.subarray(head * n, (head + 1) * n);
  const begin = head * Math.ceil(n / 8);
  return Uint8Array.from({ length: n }, (_, i) => (bytes[begin + (i >> 3)] >> (i & 7) & 1 ? 255 : 0));
}

class Layer {
  constructor(header, index) {
    Object.assign(this, header);
    this.index = index;
    this.tokens = header.tokens !== undefined ? header.tokens : data.tokens;
    [this.rows, this.cols] = holdsMaps ? header.bins : [header.queries, header.keys];
    this.low = new Int32Array(this.rows);
    this.high = new Int32Array(this.rows);
    for (let i = 0; i < this.rows; ++i) {
      const [first, end] = this.rowRange(i);
      const low = this.visible(first)[0], high = this.visible(end - 1)[1];
      this.low[i] = pooled ? Math.floor(low * this.cols / this.keys) : low;
      this.high[i] = high <= low ? this.low[i] : pooled ? Math.floor((high - 1) * this.cols / this.keys) + 1 : high;
    }
    this.masks = this.seen !== undefined || this.low.some((x) => x > 0) || this.high.some((x) => x < this.cols);
  }

  // Keys [low, high) that query i may see.
  visible(i) {
    const p = i + this.start, [left, right] = this.window;
    const low = left < 0 ? 0 : Math.max(0, p - left);
    let high = this.keys;
    if (this.causal) high = Math.min(high, p + 1);
    if (right >= 0) high = Math.min(high, p + right + 1);
    return [Math.min(low, this.keys), Math.max(high, 0)];
  }

  // Queries of a row, keys of a column: [first, end).
  rowRange(i) { return pooled ? binRange(i, this.rows, this.queries) : [i, i + 1]; }
  colRange(j) { return pooled ? binRange(j, this.cols, this.keys) : [j, j + 1]; }

  // The fraction of pairs that the pattern keeps in each cell of head h, 0 to 255; null without a pattern.
  keptCells(h) {
    return this.kept ? cellsOf(this.kept, h, this.rows * this.cols) : null;
  }

  // Computes the map of head h, a few rows at a time, and yields between them.
  *compute(h) {
    return holdsMaps ? this.unpack(h) : yield* this.multiply(h);
  }

  *multiply(h) {
    const { rows, cols, dim, softcap } = this;
    const { q, k } = this.rowsOf(h);
    const lse = new DataView(this.bytes.lse.buffer, this.bytes.lse.byteOffset + 4 * h * rows, 4 * rows);
    const factor = this.factors[h];
    const out = new Float32Array(rows * cols);
    for (let i = 0; i < rows; ++i) {
      const end = this.high[i], base = i * cols, sum = lse.getFloat32(4 * i, true);
      for (let j = this.low[i]; j < end; ++j) {
        let s = 0;
        for (let d = 0, a = i * dim, b = j * dim; d < dim; ++d) s += q[a + d] * k[b + d];
        s *= factor;
        if (softcap > 0) s = softcap * Math.tanh(s / softcap);
        out[base + j] = Math.exp(s - sum);
      }
      if (i % 8 === 7) yield;
    }
    return this.finish(out);
  }

  // q [rows, dim] and k [cols, dim] of a head, as stored in the page.
  rowsOf(h) {
    const { rows, cols, dim } = this, key = Math.floor(h * this.keyHeads / this.heads.length);
    this.bytes ??= { q: takeBytes(`q${this.index}`), k: takeBytes(`k${this.index}`), lse: takeBytes(`lse${this.index}`) };
    return { q: halves(this.bytes.q, h * rows * dim, rows * dim), k: halves(this.bytes.k, key * cols * dim, cols * dim) };
  }

  unpack(h) {
    const { rows, cols } = this, n = rows * cols;
    this.bytes ??= { mean: takeBytes(`mean${this.index}`), max: takeBytes(`max${this.index}`) };
    const seen = this.seen ? cellsOf(this.seen, h, n) : null;
    const values = (bytes, factor) => {
      const shares = halves(bytes, h * n, n);
      for (let i = 0; i < n; ++i) shares[i] = seen && seen[i] === 0 ? -1 : shares[i] * factor(i % cols);
      return this.finish(shares);
    };
    const keys = (j) => { const [first, end] = this.colRange(j); return end - first; };
    const map = values(this.bytes.mean, (j) => keys(j) * this.meanFactors[h]);
    map.strongest = this.bytes.max ? values(this.bytes.max, () => this.maxFactors[h]) : map;
    return map;
  }

  finish(values) {
    const { rows, cols, low, high } = this;
    const rowMax = new Float32Array(rows);
    let max = 0;
    for (let i = 0; i < rows; ++i) {
      for (let j = low[i]; j < high[i]; ++j) if (values[i * cols + j] > rowMax[i]) rowMax[i] = values[i * cols + j];
      if (rowMax[i] > max) max = rowMax[i];
    }
    return { rows, cols, data: values, low, high, rowMax, max };
  }
}

// Members of bin b of n: those with floor(i n / total) = b.
function binRange(b, n, total) {
  return [Math.ceil(b * total / n), Math.ceil((b + 1) * total / n)];
}

const layers = data.layers.map((header, i) => new Layer(header, i));

// Finishes a map that is needed now.
function finishNow(steps) {
  for (;;) {
    const { done, value } = steps.next();
    if (done) return value;
  }
}

const recent = new Map();  // maps of the heads shown last
const KEPT = 6;
function mapOf(layer, h) {
  const name = `${layer.index} ${h}`;
  const map = recent.get(name) ?? finishNow(layer.compute(h));
  recent.delete(name);
  recent.set(name, map);
  if (recent.size > KEPT) recent.delete(recent.keys().next().value);
  return map;
}

// The map as a picture of at most n x n: the largest probability of each square, and -1 if all of its pairs are masked.
function shrink(map, n) {
  const rows = Math.min(n, map.rows), cols = Math.min(n, map.cols);
  const small = new Float32Array(rows * cols).fill(-1);
  const column = Int32Array.from({ length: map.cols }, (_, j) => Math.floor(j * cols / map.cols));
  for (let i = 0; i < map.rows; ++i) {
    const base = Math.floor(i * rows / map.rows) * cols;
    for (let j = map.low[i]; j < map.high[i]; ++j) {
      const at = base + column[j], value = map.data[i * map.cols + j];
      if (value > small[at]) small[at] = value;
    }
  }
  return { rows, cols, data: small, max: map.max };
}

// Statistics of a head, averaged over its rows: fractions of its attention; `entropy` in bits; `distance` in tokens.
function summarize(layer, map) {
  const { rows, cols, data: p, low, high } = map;
  const middle = ([first, end]) => (first + end - 1) / 2;
  const places = Float64Array.from({ length: cols }, (_, j) => middle(layer.colRange(j)));
  const total = { self: 0, previous: 0, next: 0, first: 0, last: 0, same: 0 };
  const columns = new Float64Array(cols);
  let entropy = 0, spread = 0, distance = 0, seen = 0, used = 0;
  for (let i = 0; i < rows; ++i) {
    const place = middle(layer.rowRange(i)) + layer.start;
    const own = pooled ? Math.floor(place * cols / layer.keys) : place;
    const label = pooled || !layer.tokens ? null : layer.tokens[own];
    let h = 0, ok = true, same = 0, far = 0, allowed = 0;
    for (let j = low[i]; j < high[i]; ++j) {
      const x = p[i * cols + j];
      if (x < 0) continue;
      if (!(x >= 0)) ok = false;
      if (x > 0) h -= x * Math.log2(x);
      if (label !== null && j !== own && layer.tokens[j] === label) same += x;
      far += x * Math.abs(places[j] - place);
      ++allowed;
    }
    if (!ok || allowed === 0) continue;
    const at = (j) => (j >= low[i] && j < high[i] ? Math.max(0, p[i * cols + j]) : 0);
    total.self += at(own);
    total.previous += at(own - 1);
    total.next += at(own + 1);
    total.first += at(0);
    total.last += at(cols - 1);
    total.same += same;
    for (let j = low[i]; j < high[i]; ++j) columns[j] += at(j);
    entropy += h;
    spread += 2 ** h;
    distance += far;
    seen += allowed;
    ++used;
  }
  if (used === 0) return null;
  for (const name of Object.keys(total)) total[name] /= used;
  let favorite = 0;
  for (let j = 0; j < cols; ++j) if (columns[j] > columns[favorite]) favorite = j;
  return { ...total, favorite, favoriteShare: columns[favorite] / used, entropy: entropy / used, spread: spread / used,
    distance: distance / used, seen: seen / used };
}

const HABITS = pooled
  ? { self: "its own neighborhood", previous: "the stretch just before", next: "the stretch just after", first: "the beginning", last: "the end" }
  : { self: "the token itself", previous: "the previous token", next: "the next token", first: "the first token", last: "the last token", same: "the same word elsewhere" };

// The habit of a head in a few words, or its spread if it has none.
function habit(summary) {
  if (!summary) return "undefined numbers";
  const [name, share] = Object.keys(HABITS).map((key) => [key, summary[key]]).sort((a, b) => b[1] - a[1])[0];
  if (share >= 0.35) return `mostly ${HABITS[name]}`;
  if (summary.spread > 0.45 * summary.seen) return "looks almost everywhere";
  if (share >= 0.18) return `partly ${HABITS[name]}`;
  return summary.spread < 0.12 * summary.seen ? "picks a few tokens" : "a mixture";
}
