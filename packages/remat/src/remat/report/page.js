// Sorts a table by the column whose head is pressed, and gives plotly the colours of the page, and
// on a phone names alone in the tiles of a treemap, where figures find no room.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), table = head.closest("table"), body = table.tBodies[0];
    const down = head.getAttribute("aria-sort") !== "descending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => row.cells[head.cellIndex].dataset.figure ?? row.cells[head.cellIndex].textContent;
    const order = (a, b) => key(a).localeCompare(key(b), undefined, { numeric: true });
    const figures = head.classList.contains("words") ? order : (a, b) => key(a) - key(b);
    body.append(...[...body.rows].sort((a, b) => (down ? -1 : 1) * figures(a, b)));
  });
}
const dark = matchMedia("(prefers-color-scheme: dark)");
function recolour() {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  for (const figure of document.querySelectorAll(".plotly-graph-div")) {
    const change = { "font.color": colour("--text") };
    for (const axis of ["xaxis", "yaxis"])
      if (figure.layout[axis]) change[`${axis}.gridcolor`] = colour("--grid");
    if (matchMedia("(pointer: coarse)").matches) change.dragmode = false; // a finger scrolls
    Plotly.relayout(figure, change);
  }
}
function names() {
  if (!matchMedia("(max-width: 40rem)").matches) return;
  for (const figure of document.querySelectorAll(".plotly-graph-div"))
    if (figure.data[0]?.type === "treemap") Plotly.restyle(figure, { texttemplate: "%{label}" });
}
dark.addEventListener("change", recolour);
addEventListener("load", recolour);
addEventListener("load", names);
