// The large map: a canvas with the probabilities and the labels of both axes, and a canvas above it for the cursor.

const nice = (n) => {  // 1, 2, 5, 10, 20, 50, ...
  const power = 10 ** Math.floor(Math.log10(Math.max(1, n)));
  return [1, 2, 5, 10].map((x) => x * power).find((x) => x >= n);
};

// Labels of an axis of n cells and their places, [[cells from the start, text]], from the cell `first` on, as dense as
// is readable: tokens at their cells, or round positions if a cell holds several.
function axisTicks(layer, first, n, total, cell, label) {
  const ticks = [], perCell = pooled ? total / n : 1;
  const step = nice(13 / cell * perCell);
  for (let t = Math.ceil(first * perCell / step) * step; t < total; t += step) {
    ticks.push(pooled ? [t / perCell, whole(t)] : [t + 0.5, label(layer, t)]);
  }
  return ticks;
}

const SHADE = 0.5;  // fraction of the shade in the color of cells that a pattern drops

const edges = (n, from, count, total) => Int32Array.from({ length: n + 1 },
  (_, p) => Math.min(total, Math.max(0, Math.floor(from + p * count / n + 1e-9))));

class HeatMap {
  // Calls `drawn` after every drawing.
  constructor(stage, base, overlay, drawn = () => {}) {
    Object.assign(this, { stage, base, overlay, drawn, zoom: 1, x: 0, y: 0 });
    this.widths = new Map();
  }

  // Sets the content: { map, values, layer, scale, norm, kept, marks }; `values` is map.data or map.strongest.data.
  // Cells with less than 255 in `kept`, if present, are shaded; `marks` are { rows, columns }, sets of search results.
  show(what) {
    const resized = !this.what || what.map.rows !== this.what.map.rows || what.map.cols !== this.what.map.cols;
    this.what = what;
    if (resized) this.reset();
    this.layout();
  }

  reset() { this.zoom = 1; this.x = 0; this.y = 0; }

  // Sizes in CSS pixels; the plot keeps square cells if that leaves a usable height.
  layout() {
    const { rows, cols } = this.what.map, width = this.stage.clientWidth;
    const narrow = width < 480;
    this.font = `${narrow ? 10 : 11}px ${getComputedStyle(document.body).fontFamily}`;
    const longest = this.longestLabel() + 14;  // tokens may be of any length: labels take at most a quarter
    this.left = Math.round(Math.min(longest, width / 4));
    this.top = Math.round(Math.min(longest, width / 4));
    this.plotWidth = Math.max(40, width - this.left - 2);
    this.plotHeight = Math.round(Math.min(this.plotWidth * 1.15, Math.max(this.plotWidth * rows / cols, Math.min(rows * 30, 150))));
    this.width = width;
    this.height = this.top + this.plotHeight + 2;
    this.ratio = Math.min(3, window.devicePixelRatio || 1);
    for (const canvas of [this.base, this.overlay]) {
      const w = Math.round(this.width * this.ratio), h = Math.round(this.height * this.ratio);
      if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
      canvas.style.height = `${this.height}px`;
    }
    this.clamp();
    this.draw();
  }

  // In CSS pixels; the same for both axes and at every zoom, so that the plot does not move.
  longestLabel() {
    const { layer } = this.what, context = this.base.getContext("2d"), name = `${layer.index} ${this.font}`;
    if (this.longest?.name !== name) {
      context.font = `600 ${this.font}`;  // the font under the cursor
      let width = 24;
      const measure = (text) => { width = Math.max(width, context.measureText(text).width); };
      for (let q = 0; q < layer.rows; ++q) measure(rowLabel(layer, q));
      for (let k = 0; k < layer.cols; ++k) measure(colLabel(layer, k));
      this.longest = { name, width };
    }
    return this.longest.width;
  }

  get cellWidth() { return this.plotWidth / this.what.map.cols * this.zoom; }
  get cellHeight() { return this.plotHeight / this.what.map.rows * this.zoom; }
  get largestZoom() {
    const { rows, cols } = this.what.map;
    return Math.max(1, 56 / Math.min(this.plotWidth / cols, this.plotHeight / rows));
  }
  centre(q, k) {
    return [this.left + (k + 0.5 - this.x) * this.cellWidth, this.top + (q + 0.5 - this.y) * this.cellHeight];
  }

  // The pair at a point of the stage, or null.
  pairAt(px, py) {
    const { rows, cols } = this.what.map;
    if (px < this.left || py < this.top || px >= this.left + this.plotWidth || py >= this.top + this.plotHeight) return null;
    const k = Math.floor(this.x + (px - this.left) / this.cellWidth), q = Math.floor(this.y + (py - this.top) / this.cellHeight);
    return k >= 0 && k < cols && q >= 0 && q < rows ? { q, k } : null;
  }

  clamp() {
    const { rows, cols } = this.what.map;
    this.zoom = Math.min(this.largestZoom, Math.max(1, this.zoom));
    this.x = Math.min(cols - cols / this.zoom, Math.max(0, this.x));
    this.y = Math.min(rows - rows / this.zoom, Math.max(0, this.y));
  }

  // Zooms by a factor around a point of the stage.
  zoomAt(factor, px = this.left + this.plotWidth / 2, py = this.top + this.plotHeight / 2) {
    const k = this.x + (px - this.left) / this.cellWidth, q = this.y + (py - this.top) / this.cellHeight;
    this.zoom = Math.min(this.largestZoom, Math.max(1, this.zoom * factor));
    this.x = k - (px - this.left) / this.cellWidth;
    this.y = q - (py - this.top) / this.cellHeight;
    this.clamp();
    this.draw();
  }

  pan(dx, dy) {
    this.x -= dx / this.cellWidth;
    this.y -= dy / this.cellHeight;
    this.clamp();
    this.draw();
  }

  // Scrolls just far enough to show a pair.
  reveal({ q, k }) {
    const { rows, cols } = this.what.map;
    const across = cols / this.zoom, down = rows / this.zoom, before = [this.x, this.y];
    if (k < this.x) this.x = k;
    if (k + 1 > this.x + across) this.x = k + 1 - across;
    if (q < this.y) this.y = q;
    if (q + 1 > this.y + down) this.y = q + 1 - down;
    this.clamp();
    if (before[0] !== this.x || before[1] !== this.y) this.draw();
  }

  strongest(i) { return this.what.norm === "row" ? this.what.rowMax[i] : this.what.max; }

  draw() {
    const context = this.base.getContext("2d");
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    this.drawShares(context);
    this.drawNumbers(context);
    this.drawAxes(context);
    this.drawCursor();
    this.drawn();
  }

  // The color of rows [i0, i1) and columns [j0, j1) in the format of ImageData: that of the largest probability there.
  painter() {
    const { map, values, scale, kept } = this.what, { cols } = map;
    const masked = packedColor(cssColor("--masked")), undefinedColor = packedColor(cssColor("--muted"));
    const dropped = packedColor(cssColor("--dropped"));
    return (i0, i1, j0, j1) => {
      let best = -1, bad = false, sum = 0, seen = 0;
      for (let i = i0; i < i1; ++i) {
        const end = Math.min(j1, map.high[i]), row = i * cols;
        for (let j = Math.max(j0, map.low[i]); j < end; ++j) {
          const value = values[row + j];
          if (value > best) best = value;
          else if (value !== value) bad = true;
          if (kept) {
            sum += kept[row + j];
            ++seen;
          }
        }
      }
      const color = bad ? undefinedColor : best < 0 ? masked : ramp.packed[toneIndex(best, this.strongest(i0), scale)];
      return seen > 0 && sum < 255 * seen ? mixed(color, dropped, SHADE * (1 - sum / (255 * seen))) : color;
    };
  }

  // The boundaries of n boxes of equal size along an axis of the shown part, in cells.
  columnEdges(n) { return edges(n, this.x, this.what.map.cols / this.zoom, this.what.map.cols); }
  rowEdges(n) { return edges(n, this.y, this.what.map.rows / this.zoom, this.what.map.rows); }

  // In device pixels.
  drawShares(context) {
    const { rows, cols } = this.what.map, paint = this.painter();
    const x0 = Math.round(this.left * this.ratio), y0 = Math.round(this.top * this.ratio);
    const w = Math.max(1, Math.round(this.plotWidth * this.ratio)), h = Math.max(1, Math.round(this.plotHeight * this.ratio));
    const image = context.createImageData(w, h), pixels = new Uint32Array(image.data.buffer);
    const columns = this.columnEdges(w), lines = this.rowEdges(h);
    const gap = this.cellWidth * this.ratio >= 12 && this.cellHeight * this.ratio >= 12;
    const line = packedColor(cssColor("--card"));
    let previous = -1;
    for (let y = 0; y < h; ++y) {
      const i0 = Math.min(rows - 1, lines[y]), i1 = Math.max(i0 + 1, lines[y + 1]);
      const at = y * w, edge = gap && y > 0 && lines[y] !== lines[y - 1];
      if (!gap && i1 === i0 + 1 && i0 === previous) {
        pixels.copyWithin(at, at - w, at);
        continue;
      }
      previous = i1 === i0 + 1 ? i0 : -1;
      for (let x = 0; x < w; ++x) {
        if (edge || (gap && x > 0 && columns[x] !== columns[x - 1])) {
          pixels[at + x] = line;
          continue;
        }
        const j0 = Math.min(cols - 1, columns[x]), j1 = Math.max(j0 + 1, columns[x + 1]);
        pixels[at + x] = paint(i0, i1, j0, j1);
      }
    }
    context.putImageData(image, x0, y0);
    context.strokeStyle = cssColor("--line");
    context.strokeRect(this.left - 0.5, this.top - 0.5, this.plotWidth + 1, this.plotHeight + 1);
  }

  // Percentages inside cells that are large enough.
  drawNumbers(context) {
    if (this.cellWidth < 38 || this.cellHeight < 22) return;
    const { map, values, scale } = this.what;
    context.font = this.font;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.save();
    context.beginPath();
    context.rect(this.left, this.top, this.plotWidth, this.plotHeight);
    context.clip();
    for (let q = Math.floor(this.y); q < Math.min(map.rows, this.y + map.rows / this.zoom); ++q) {
      for (let k = Math.max(map.low[q], Math.floor(this.x)); k < Math.min(map.high[q], this.x + map.cols / this.zoom); ++k) {
        const value = values[q * map.cols + k];
        if (value < 0) continue;
        const index = toneIndex(value, this.strongest(q), scale);
        context.fillStyle = ramp.isLightText(index) ? "#fff" : "#1f1c25";
        context.fillText(value < 0.0005 ? "0" : digits(100 * value).slice(0, 4).replace(/\.$/, ""), ...this.centre(q, k));
      }
    }
    context.restore();
  }

  // Text cut to a width, with an ellipsis.
  fit(context, text, width) {
    const name = `${context.font} ${width} ${text}`;
    let fitted = this.widths.get(name);
    if (fitted !== undefined) return fitted;
    fitted = text;
    if (context.measureText(text).width > width) {
      const letters = [...text];
      let low = 0, high = letters.length;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (context.measureText(`${letters.slice(0, middle).join("")}\u2026`).width <= width) low = middle;
        else high = middle - 1;
      }
      fitted = `${letters.slice(0, low).join("")}\u2026`;
    }
    if (this.widths.size > 5000) this.widths.clear();
    this.widths.set(name, fitted);
    return fitted;
  }

  drawAxes(context) {
    const { layer } = this.what, { rows, cols } = this.what.map;
    context.font = this.font;
    context.fillStyle = cssColor("--muted");
    context.textBaseline = "middle";
    context.textAlign = "right";
    [this.labelsLeft, this.labelsTop] = [[], []];  // their centres
    for (const [at, label] of axisTicks(layer, this.y, rows, layer.queries, this.cellHeight, rowLabel)) {
      const y = this.top + (at - this.y) * this.cellHeight;
      if (y < this.top + 4 || y > this.top + this.plotHeight - 4) continue;
      context.fillText(this.fit(context, label, this.left - 10), this.left - 6, y);
      this.labelsLeft.push(y);
    }
    context.textAlign = "left";
    for (const [at, label] of axisTicks(layer, this.x, cols, layer.keys, this.cellWidth, colLabel)) {
      const x = this.left + (at - this.x) * this.cellWidth;
      if (x < this.left + 4 || x > this.left + this.plotWidth - 4) continue;
      this.labelsTop.push(x);
      context.save();
      context.translate(x, this.top - 6);
      context.rotate(-Math.PI / 2);
      context.fillText(this.fit(context, label, this.top - 10), 0, 0);
      context.restore();
    }
  }

  // The pair under the cursor: cross hair, frame, both labels in a box.
  setCursor(pair, strong) {
    this.cursor = pair;
    this.strong = strong;
    this.drawCursor();
  }

  drawCursor() {
    const context = this.overlay.getContext("2d");
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    this.drawMarks(context);
    if (!this.cursor) return;
    const { q, k } = this.cursor, [x, y] = this.centre(q, k), { layer } = this.what;
    const inX = x > this.left - this.cellWidth / 2 && x < this.left + this.plotWidth + this.cellWidth / 2;
    const inY = y > this.top - this.cellHeight / 2 && y < this.top + this.plotHeight + this.cellHeight / 2;
    const accent = cssColor("--accent");
    context.save();
    context.beginPath();
    context.rect(this.left, this.top, this.plotWidth, this.plotHeight);
    context.clip();
    context.strokeStyle = accent;
    context.lineWidth = 1;
    context.globalAlpha = 0.55;
    const w = Math.max(this.cellWidth, 5), h = Math.max(this.cellHeight, 5);
    context.beginPath();
    for (const side of [-1, 1]) {
      context.moveTo(side < 0 ? this.left : x + w / 2, y);
      context.lineTo(side < 0 ? x - w / 2 : this.left + this.plotWidth, y);
      context.moveTo(x, side < 0 ? this.top : y + h / 2);
      context.lineTo(x, side < 0 ? y - h / 2 : this.top + this.plotHeight);
    }
    context.stroke();
    context.globalAlpha = 1;
    context.lineWidth = 2;
    context.strokeRect(x - w / 2, y - h / 2, w, h);
    context.restore();

    context.font = `600 ${this.font}`;
    context.textBaseline = "middle";
    const box = (text, along) => {
      const shown = this.fit(context, text, along - 12), width = Math.ceil(context.measureText(shown).width) + 10;
      context.fillStyle = accent;
      context.beginPath();
      context.roundRect(0, -9, width, 18, 4);
      context.fill();
      context.fillStyle = cssColor("--accent-ink");
      context.fillText(shown, 5, 0);
      return width;
    };
    context.fillStyle = cssColor("--card");  // over labels that the box would overlap
    const boxY = Math.min(this.top + this.plotHeight - 9, Math.max(this.top + 9, y));
    const boxX = Math.min(this.left + this.plotWidth - 9, Math.max(this.left + 9, x));
    for (const at of inY ? this.labelsLeft : []) if (Math.abs(at - boxY) < 16) context.fillRect(0, at - 8, this.left - 2, 16);
    for (const at of inX ? this.labelsTop : []) if (Math.abs(at - boxX) < 16) context.fillRect(at - 8, 0, 16, this.top - 2);
    if (inY) {
      const text = rowLabel(layer, q), width = Math.ceil(context.measureText(this.fit(context, text, this.left - 14)).width) + 10;
      context.save();
      context.translate(this.left - 2 - width, boxY);
      box(text, this.left - 2);
      context.restore();
    }
    if (inX) {
      context.save();
      context.translate(boxX, this.top - 2);
      context.rotate(-Math.PI / 2);
      box(colLabel(layer, k), this.top - 2);
      context.restore();
    }
  }

  // Marks the rows and columns of search results: bands over the map, and their labels unless they overlap.
  drawMarks(context) {
    const { marks, layer } = this.what;
    if (!marks) return;
    const { left, top, plotWidth, plotHeight } = this, accent = cssColor("--accent"), card = cssColor("--card");
    const bands = (chosen, at, size, from, length) => [...chosen].map((index) => [index, at(index), Math.max(size, 2)])
      .filter(([, middle, thick]) => middle + thick / 2 > from && middle - thick / 2 < from + length);
    const rows = bands(marks.rows, (q) => this.centre(q, 0)[1], this.cellHeight, top, plotHeight);
    const columns = bands(marks.columns, (k) => this.centre(0, k)[0], this.cellWidth, left, plotWidth);
    context.save();
    context.beginPath();
    context.rect(left, top, plotWidth, plotHeight);
    context.clip();
    context.fillStyle = accent;
    context.globalAlpha = 0.22;
    for (const [, y, thick] of rows) context.fillRect(left, y - thick / 2, plotWidth, thick);
    for (const [, x, thick] of columns) context.fillRect(x - thick / 2, top, thick, plotHeight);
    context.restore();
    context.font = `600 ${this.font}`;
    context.textBaseline = "middle";
    const apart = (list) => {  // labels that do not overlap the one before
      let before = -Infinity;
      return list.filter(([, middle]) => middle - before >= 13 && ((before = middle), true));
    };
    const near = (labels, places) => labels.filter((at) => places.some(([, place]) => Math.abs(at - place) < 13));
    const [named, seen] = [apart(rows), apart(columns)];
    context.fillStyle = card;  // over labels that a search result would overlap
    for (const at of near(this.labelsLeft, named)) context.fillRect(0, at - 8, left - 2, 16);
    for (const at of near(this.labelsTop, seen)) context.fillRect(at - 8, 0, 16, top - 2);
    context.fillStyle = accent;
    context.textAlign = "right";
    for (const [q, y] of named) {
      context.fillText(this.fit(context, rowLabel(layer, q), left - 10), left - 6, y);
    }
    context.textAlign = "left";
    for (const [k, x] of seen) {
      context.save();
      context.translate(x, top - 6);
      context.rotate(-Math.PI / 2);
      context.fillText(this.fit(context, colLabel(layer, k), top - 10), 0, 0);
      context.restore();
    }
  }

  // Draws both canvases on one, with a title, as a PNG for `use`.
  toBlob(title, use) {
    const canvas = element("canvas"), head = 34;
    canvas.width = this.base.width;
    canvas.height = this.base.height + head * this.ratio;
    const context = canvas.getContext("2d");
    context.fillStyle = cssColor("--card");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = cssColor("--ink");
    context.font = `600 ${14 * this.ratio}px ${getComputedStyle(document.body).fontFamily}`;
    context.fillText(title, 8 * this.ratio, 22 * this.ratio);
    context.drawImage(this.base, 0, head * this.ratio);
    context.drawImage(this.overlay, 0, head * this.ratio);
    canvas.toBlob(use, "image/png");
  }
}
