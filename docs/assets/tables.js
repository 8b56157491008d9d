// A table with text in its cells is stacked on phones: extra.css shows each cell on a line, with the title of its column.
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const titles = Array.from(table.querySelectorAll("thead th"), (cell) => cell.textContent);
  const cells = Array.from(table.querySelectorAll("tbody td"));
  const isLong = (cell) => cell.textContent.length > (cell.cellIndex ? 30 : 90 - 5 * titles.length);
  const isLongName = (cell) => cell.cellIndex === 0 && cell.textContent.length > 40;
  if (cells.some(titles.length > 2 ? isLong : isLongName)) {
    table.dataset.stacked = "";
    for (const cell of cells) cell.dataset.title = titles[cell.cellIndex] && `${titles[cell.cellIndex]}:`;
  }
  // A long name may wrap between its words, a shorter one only on phones.
  for (const code of table.querySelectorAll(":is(th, td) code:not(:has(*))")) {
    const length = Math.max(...code.textContent.split(/\s/).map((name) => name.length));
    if (length > 11) code.innerHTML = code.innerHTML.replace(/::|[_/]|[a-z0-9](?=[A-Z])/g, "$&<wbr>");
    if (length < 32) code.dataset.short = "";
  }
}
