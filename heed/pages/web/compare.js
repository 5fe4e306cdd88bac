// The page of `heed compare`: draws error against time and sorts the table.

const table = $("table"), body = table.tBodies[0], head = table.tHead.rows[1];

// Groups rows of the table with the rows of the data, one for each dtype, that they show.
function makeGroups() {
  const groups = [];
  for (const row of data.rows) {
    const name = [row.mechanism, JSON.stringify(row.options), row.selector, row.assumed.join()].join(" "), last = groups.at(-1);
    if (last?.key === name) last.rows.push(row);
    else groups.push({ key: name, name: row.mechanism, rows: [row], index: groups.length });
  }
  groups.forEach((group, i) => {
    group.tr = body.rows[i];
    group.options = group.tr.cells[1].textContent;
  });
  return groups;
}
const groups = makeGroups();

const scatter = new Scatter($("picture"), groups, [...new Set(data.rows.map((row) => row.dtype))], (group) => {
  for (const each of groups) each.tr.classList.toggle("marked", each === group);
});

makeSortable(body, head, groups);
for (const group of groups) {
  group.tr.addEventListener("pointerenter", () => scatter.markGroup(group));
  group.tr.addEventListener("pointerleave", () => scatter.markGroup(null));
}

$("theme").hidden = false;
followTheme(() => {});
document.documentElement.dataset.ready = "true";
