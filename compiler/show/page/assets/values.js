// The table of values, narrowed to what is searched for.
const text = document.getElementById("value-text");
const origin = document.getElementById("value-origin");
const count = document.getElementById("value-count");
const lines = [...document.getElementById("values-table").tBodies[0].rows];

function narrow() {
  const wanted = text.value.trim().toLowerCase();
  let shown = 0;
  for (const line of lines) {
    const fits = line.textContent.toLowerCase().includes(wanted) && (origin.value === "all" || line.cells[2].textContent === origin.value);
    line.hidden = !fits;
    shown += fits;
  }
  count.textContent = `${shown} of ${lines.length} values`;
}

text.addEventListener("input", narrow);
origin.addEventListener("change", narrow);
