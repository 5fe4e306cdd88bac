// Sortable tables: a click on a header sorts by its column, the next click reverses the order.

// The number or text to sort by; undefined comes last.
function sortKey({ tr }, column) {
  const cell = tr.cells[column];
  if (cell.dataset.value === undefined) return cell.textContent;
  const value = Number(cell.dataset.value);
  return Number.isNaN(value) ? Infinity : value;
}

function sortBy(body, head, rows, column, descending) {
  const order = (a, b) => {
    const x = sortKey(a, column), y = sortKey(b, column);
    const sign = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x === y ? 0 : x - y;
    return (descending ? -sign : sign) || a.index - b.index;
  };
  body.append(...[...rows].sort(order).map(({ tr }) => tr));
  [...head.cells].forEach((th, i) => {
    if (i === column) th.setAttribute("aria-sort", descending ? "descending" : "ascending");
    else th.removeAttribute("aria-sort");
  });
}

// `rows`: [{ tr, index }] of `body`; `head` has a header for each column.
function makeSortable(body, head, rows) {
  [...head.cells].forEach((th, i) => {
    const button = element("button", th.textContent, { type: "button" });
    button.addEventListener("click", () => sortBy(body, head, rows, i, th.getAttribute("aria-sort") === "ascending"));
    th.replaceChildren(button);
    th.scope = "col";
  });
}
