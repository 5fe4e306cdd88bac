// The page of `heed advise`: the frontier of error against time, and the table of all ranks.

const table = $("table"), body = table.tBodies[0], head = table.tHead.rows[0];
const entries = data.rows.map((row, index) => ({ row, index, tr: body.rows[index] }));

// Groups rows that differ only in dtype, which a line joins.
function makeGroups() {
  const groups = new Map();
  for (const { row } of entries) {
    const key = JSON.stringify([row.mechanism, row.options, row.assumed]);
    if (!groups.has(key)) groups.set(key, { name: row.mechanism, options: row.options, rows: [] });
    groups.get(key).rows.push(row);
  }
  return [...groups.values()];
}
const groups = makeGroups();

const known = (x, text) => (x === null ? "-" : text(x));
const describe = (row) => [["rank", String(row.rank)], ["time", known(row.seconds, seconds)], ["predicted", known(row.predicted_seconds, seconds)],
  ["measured", known(row.measured_seconds, seconds)], ["rms error", known(row.relative_error, errorText)], ["memory", bytes(row.memory_bytes)],
  ["state", bytes(row.state_bytes)], ["why", row.reason]];

function mark(group, row) {
  for (const entry of entries) {
    entry.tr.classList.toggle("marked", group !== null && group.rows.includes(entry.row));
    entry.tr.classList.toggle("chosen", row !== null && entry.row === row);
  }
}

const drawn = data.rows.some((row) => row.relative_error > 0);
const scatter = drawn ? new Scatter($("picture"), groups, [...new Set(data.rows.map((row) => row.dtype))], mark, {
  describe, most: data.budget.error,
  how: "The stepped line is the frontier: nothing is faster and as close. What is outside of the budget is pale.",
}) : null;

makeSortable(body, head, entries);
for (const entry of entries) {
  const group = groups.find(({ rows }) => rows.includes(entry.row));
  entry.tr.addEventListener("pointerenter", () => scatter?.markGroup(group));
  entry.tr.addEventListener("pointerleave", () => scatter?.markGroup(null));
}

$("theme").hidden = false;
followTheme(() => {});
document.documentElement.dataset.ready = "true";
