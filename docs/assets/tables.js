// A table with text in its cells is stacked on phones: extra.css shows each cell on a line, with the title of its column.
const stacks = (cell) => cell.textContent.length > (cell.cellIndex ? 30 : 70);
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const titles = Array.from(table.querySelectorAll("thead th"), (cell) => cell.textContent);
  const cells = Array.from(table.querySelectorAll("tbody td"));
  if (titles.length > 2 && cells.some(stacks)) {
    table.dataset.stacked = "";
    for (const cell of cells) cell.dataset.title = titles[cell.cellIndex] && `${titles[cell.cellIndex]}:`;
  }
  // A long name may wrap between its words.
  for (const code of table.querySelectorAll("td code:not(:has(*))")) {
    if (/\S{32}/.test(code.textContent)) code.innerHTML = code.innerHTML.replace(/::|[_/]/g, "$&<wbr>");
  }
}
