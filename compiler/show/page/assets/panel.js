// What stands beside the grid: everything about the picked rank. And picking, by mouse, keyboard and number.
const panel = document.getElementById("panel");
const empty = [...panel.childNodes];
const number = document.getElementById("rank");
const said = document.getElementById("said");
const axisOf = document.getElementById("axis");

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== null) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

const whole = (value) => value.toLocaleString("en-US");
const coordinates = (place) => AXES.map((axis) => `${axis} ${place[axis]}`).join(", ");

// A bar with stretches [start, stop) of a whole.
function bar(stretches, length, hue, label) {
  const made = element("div", null, { class: "bar", role: "img", "aria-label": label });
  for (const [start, stop] of stretches) {
    const part = element("i", null);
    part.style.left = `${(100 * start) / length}%`;
    part.style.width = `${(100 * (stop - start)) / length}%`;
    part.style.background = `var(--${hue})`;
    made.append(part);
  }
  return made;
}

function groupList(found) {
  const list = element("ul", null, { class: "groups" });
  for (const group of found.groups) {
    if (group.ranks.length < 2) continue;
    const nodes = new Set(group.ranks.map((one) => Math.floor(one / plan.perNode))).size;
    const button = element("button", null, { type: "button", "aria-pressed": String(state.group === group.name) });
    const swatch = element("i", null, { class: "swatch", "aria-hidden": "true" });
    const hues = group.name.split("-").filter((part) => AXES.includes(part) && !group.name.startsWith("expert"));
    const [first, second] = hues.length > 1 ? hues : [hueOf(group.name), hueOf(group.name)];
    swatch.style.background = `linear-gradient(90deg, var(--${first}) 50%, var(--${second}) 50%)`;
    const ranks = element("span", `${group.ranks.length} ranks on ${nodes} ${nodes === 1 ? "node" : "nodes"}: ${runs(group.ranks)} `);
    ranks.append(element("small", group.use));
    button.append(swatch, element("b", group.name), ranks);
    button.addEventListener("click", () => {
      state.group = state.group === group.name ? null : group.name;
      for (const one of list.querySelectorAll("button")) one.setAttribute("aria-pressed", "false");
      button.setAttribute("aria-pressed", String(state.group !== null));
      draw();
    });
    const item = element("li", null);
    item.append(button);
    list.append(item);
  }
  return list.childElementCount ? list : element("p", "It shares no group with another rank.", { class: "note" });
}

function sliceTable(found) {
  const table = element("table", null, { "aria-label": "Slices of this rank" });
  const head = element("tr", null);
  for (const name of ["parameter", "held", "shape here"]) head.append(element("th", name, { scope: "col" }));
  table.append(element("thead", null), element("tbody", null));
  table.tHead.append(head);
  for (const row of found.slices) {
    const line = element("tr", null);
    const cut = row.pieces === null ? "whole" : `dim ${row.dim}: ${row.pieces.map(([a, b]) => `[${whole(a)}, ${whole(b)})`).join(" ")}`;
    const name = row.count > 1 ? `${row.name} × ${row.count}` : row.name;
    const expert = row.expertDim === null ? "" : `; experts are shared over ep (dim ${row.expertDim})`;
    line.append(element("td", name), element("td", cut + expert), element("td", row.shape.join(" × ")));
    for (const cell of line.cells) cell.style.overflowWrap = "anywhere";
    table.tBodies[0].append(line);
  }
  const frame = element("div", null, { class: "scroll", tabindex: "0", role: "region", "aria-label": "Slices of this rank" });
  frame.append(table);
  return frame;
}

// At ZeRO stage 3 a shard is a run of each parameter, otherwise one of all parameters behind each other.
function shareOf({ index, shards, start, stop, numel }) {
  const which = plan.shardsEach ? `${whole(stop - start)} elements, a run of each parameter` : `elements [${whole(start)}, ${whole(stop)}) of ${whole(numel)}`;
  return `shard ${index} of ${shards}: ${which}, ${whole((stop - start) * plan.stateBytes)} bytes`;
}

function fill(found) {
  const { ranges, step } = found.tokens;
  const { start, stop, numel } = found.optimizer;
  const sequences = plan.batch.micro * plan.batch.steps;
  const tokens = ranges.map(([a, b]) => (step > 1 ? `every ${step}th from ${a}` : `[${whole(a)}, ${whole(b)})`)).join(" and ");
  const shown = step > 1 ? [[0, plan.sequence.length]] : ranges;
  const layers = found.layers.map(([a, b]) => (b - a > 1 ? `${a}-${b - 1}` : `${a}`)).join(", ");
  const stage = plan.stages[found.place.pp];
  const more = [stage.embedding ? "the embedding" : "", stage.head ? "the head" : ""].filter(Boolean).join(" and ");
  panel.replaceChildren(
    element("h3", `Rank ${found.rank}`),
    element("p", `node ${found.node}, GPU ${found.gpu}; ${coordinates(found.place)}`),
    element("h3", "Groups"),
    groupList(found),
    element("h3", "Tokens"),
    element("p", `${tokens} of each sequence of ${whole(plan.sequence.length)}; ${whole(sequences)} sequences in a step`, { class: "note" }),
    bar(shown, plan.sequence.length, "cp", "The tokens of this rank within a sequence"),
    element("h3", "Optimizer state"),
    element("p", shareOf(found.optimizer), { class: "note" }),
    bar([[start, stop]], Math.max(numel, stop), "dp", "The optimizer range of this rank"),
    ...(found.experts === null ? [] : [element("p", `of its experts, ${shareOf(found.experts)}`, { class: "note" })]),
    element("h3", "Weights"),
    element("p", `layers ${layers || "none"}${more ? ` with ${more}` : ""}`, { class: "note" }),
    sliceTable(found),
  );
}

// The picked rank and the axis stand in the address, so that a link shows the same.
function remember() {
  const parts = [state.rank === null ? "" : `rank=${state.rank}`, axisOf.value === axisOf.options[0].value ? "" : `axis=${axisOf.value}`];
  const text = parts.filter(Boolean).join("&");
  if (text || /^#(rank|axis)=/.test(location.hash)) history.replaceState(null, "", `#${text}`);
}

function recall() {
  const found = new URLSearchParams(location.hash.slice(1));
  const axis = found.get("axis");
  if ([...axisOf.options].some((one) => one.value === axis)) {
    axisOf.value = axis;
    state.axis = axis;
    legend();
  }
  const rank = Number(found.get("rank"));
  if (found.has("rank") && Number.isInteger(rank) && rank >= 0 && rank < plan.world) pick(rank);
}

function pick(rank) {
  state.rank = rank;
  remember();
  if (rank === null) state.group = null;
  document.getElementById("legend").hidden = rank !== null;
  number.value = rank === null ? "" : String(rank);
  if (rank === null) {
    panel.replaceChildren(...empty);
    said.textContent = "";
  } else {
    const found = describe(rank);
    fill(found);
    said.textContent = `Rank ${rank}: node ${found.node}, GPU ${found.gpu}; ${coordinates(found.place)}`;
  }
  draw();
}

function legend() {
  const place = document.getElementById("legend");
  const { size, stride } = plan.axes[state.axis];
  const shown = size <= 8 ? [...Array(size).keys()] : [...Array(6).keys()].map((at) => Math.floor((at * (size - 1)) / 5));
  place.replaceChildren(...shown.map((at) => {
    const made = element("span", null);
    const swatch = element("i", null);
    swatch.style.background = shade(at * stride);
    made.append(swatch, `${state.axis} ${at}`);
    return made;
  }));
}

canvas.addEventListener("pointerdown", (event) => {
  const box = canvas.getBoundingClientRect();
  const rank = rankAt(event.clientX - box.left, event.clientY - box.top);
  if (rank !== null) pick(rank);
});
canvas.addEventListener("pointermove", (event) => {
  const box = canvas.getBoundingClientRect();
  const rank = rankAt(event.clientX - box.left, event.clientY - box.top);
  if (rank !== null) canvas.title = `rank ${rank}: ${coordinates(Object.fromEntries(AXES.map((axis) => [axis, along(rank, axis)])))}`;
});
canvas.addEventListener("keydown", (event) => {
  const from = state.rank;
  const first = from === null ? 0 : from - (from % plan.perNode);
  // Down is the cell below: the next row of the node, or the node below.
  const below = plan.perNode > tiling.columns ? tiling.columns : plan.perNode * tiling.across;
  const to = {
    ArrowRight: () => from + 1,
    ArrowLeft: () => from - 1,
    ArrowDown: () => from + below,
    ArrowUp: () => from - below,
    Home: () => first,
    End: () => first + plan.perNode - 1,
    PageDown: () => from + plan.perNode,
    PageUp: () => from - plan.perNode,
  }[event.key];
  if (event.key === "Escape") pick(null);
  else if (to) pick(from === null ? 0 : Math.min(plan.world - 1, Math.max(0, to())));
  else return;
  event.preventDefault();
});
number.addEventListener("input", () => {
  const rank = Number(number.value);
  if (number.value !== "" && Number.isInteger(rank) && rank >= 0 && rank < plan.world) pick(rank);
});
document.getElementById("clear").addEventListener("click", () => pick(null));
axisOf.addEventListener("change", (event) => {
  state.axis = event.target.value;
  legend();
  pick(null);
});
const redraw = () => {
  legend();
  draw();
};
dark.addEventListener("change", redraw);
print.addEventListener("change", redraw);
addEventListener("resize", draw);
redraw();
recall();
addEventListener("hashchange", recall);
performance.mark("drawn");
window.parcompile = { describe, pick, corner, state };
