// Sorts the table of problems by a column, shows only some, and opens the programs of a problem that a link leads
// to.
(function () {
  const table = document.getElementById("problem-table");
  const tools = document.getElementById("problem-tools");
  if (!table || !tools) return;
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const chips = document.querySelectorAll(".chips > details");
  const heads = Array.from(table.tHead.rows[0].cells);

  function value(row, column) {
    const cell = row.cells[column];
    const given = cell.dataset.v;
    return given === undefined ? cell.textContent : Number(given);
  }

  function sort(head, column) {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const order = down ? -1 : 1;
    rows.sort(function (a, b) {
      const left = value(a, column), right = value(b, column);
      if (typeof left === "number") return order * (left - right);
      return order * left.localeCompare(right, undefined, { numeric: true });
    });
    body.append(...rows);
  }

  heads.forEach(function (head, column) {
    if (!("sort" in head.dataset)) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", function () { sort(head, column); });
    head.append(button);
  });

  function open() {
    const target = document.getElementById(location.hash.slice(1));
    const details = target && target.closest("details");
    if (!details) return;
    if (details.hidden) showAll();
    details.classList.remove("unlisted");
    details.open = true;
    target.scrollIntoView();
  }

  // End a search in programs that hides a problem.
  function showAll() {
    const verdict = document.getElementById("program-verdict");
    document.getElementById("program-search").value = verdict.value = "";
    verdict.dispatchEvent(new Event("change"));
  }

  const text = document.getElementById("problem-filter");
  const kind = document.getElementById("problem-kind");
  const shown = document.getElementById("problem-shown");

  function filter() {
    const wanted = text.value.toLowerCase();
    let number = 0;
    function fits(item) {
      const solved = kind.value === "" || item.dataset.solved === kind.value;
      return solved && item.dataset.id.toLowerCase().includes(wanted);
    }
    for (const row of rows) {
      row.hidden = !fits(row);
      number += row.hidden ? 0 : 1;
    }
    for (const chip of chips) chip.classList.toggle("unlisted", !fits(chip));
    shown.textContent = number + " of " + rows.length + " shown";
  }

  text.addEventListener("input", filter);
  kind.addEventListener("change", filter);
  tools.hidden = false;
  filter();
  window.addEventListener("hashchange", open);
  open();
})();
