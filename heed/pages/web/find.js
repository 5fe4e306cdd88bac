// The search for tokens that match a text. They are marked on both axes of the map and in the running text.

// The matches of a text in a layer, { rows, columns }, sets of indices, or null without a search. The search ignores
// case; "#120" matches the token at position 120. In a pooled map only the first token of each bin is searched.
function findTokens(layer, text) {
  const wanted = text.trim().toLowerCase();
  if (wanted === "") return null;
  const place = /^#\d+$/.test(wanted) ? Number(wanted.slice(1)) : null;
  const search = (n, range, start, words) => {
    const found = new Set();
    for (let i = 0; i < n; ++i) {
      const [first, end] = range(i), token = pooled ? words?.[i] : keyToken(layer, first + start);
      const here = place !== null ? place >= first + start && place < end + start
        : token !== null && token !== undefined && plain(token).toLowerCase().includes(wanted);
      if (here) found.add(i);
    }
    return found;
  };
  return { rows: search(layer.rows, (q) => layer.rowRange(q), layer.start, layer.rowWords),
    columns: search(layer.cols, (k) => layer.colRange(k), 0, layer.colWords) };
}

class Search {
  // Calls `changed` with a new text, and `go` with the index of a row or, if `across()` is true, of a column.
  constructor(across, changed, go) {
    Object.assign(this, { across, go, field: $("find"), at: -1, marks: null });
    this.field.addEventListener("input", () => changed(this.field.value));
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.step(event.shiftKey ? -1 : 1);
      else if (event.key === "Escape" && this.field.value !== "") changed(this.field.value = "");
      else return;
      event.preventDefault();
    });
    $("find-next").addEventListener("click", () => this.step(1));
    $("find-previous").addEventListener("click", () => this.step(-1));
  }

  // Searches a layer; steps then go through these matches.
  look(layer, text) {
    if (this.field.value !== text) this.field.value = text;
    if (layer !== this.layer || text !== this.text) Object.assign(this, { layer, text, at: -1, marks: findTokens(layer, text) });
    this.say();
    return this.marks;
  }

  // Matches along the axis of steps.
  list() {
    return this.marks ? [...(this.across() ? this.marks.columns : this.marks.rows)] : [];
  }

  step(by) {
    const list = this.list();
    if (list.length === 0) return;
    this.at = this.at < 0 ? (by > 0 ? 0 : list.length - 1) : (this.at + by + list.length) % list.length;
    this.go(list[this.at]);
    this.say();
  }

  say() {
    const n = this.list().length, what = this.across() ? "column" : "row";
    for (const id of ["find-next", "find-previous"]) $(id).disabled = n === 0;
    $("found").textContent = !this.marks ? ""
      : this.marks.rows.size + this.marks.columns.size === 0 ? "nothing found"
      : this.at >= 0 && this.at < n ? `${this.at + 1} of ${whole(n)} ${what}s` : `${whole(n)} ${what}${n === 1 ? "" : "s"}`;
  }
}
