// The grid of ranks on a canvas: nodes as blocks of cells, coloured by a coordinate or by the groups of the picked rank.
const canvas = document.getElementById("grid");
const dark = matchMedia("(prefers-color-scheme: dark)");
const print = matchMedia("print");
const state = { axis: document.getElementById("axis").value, rank: null, group: null };
let tiling = null;

const colours = () => plan.colours[dark.matches && !print.matches ? "dark" : "light"];

function tile(width) {
  const columns = Math.min(plan.perNode, 8);
  const rows = Math.ceil(plan.perNode / columns);
  const most = width < 600 ? 900 : plan.world > 4096 ? 760 : 620;
  let found = null;
  for (let cell = 60; cell >= 3; cell -= 1) {
    const gap = cell < 12 ? 4 : 14;
    const below = cell < 12 ? 2 : 14;
    const head = cell >= 22 ? 18 : 0;
    const across = Math.max(1, Math.floor((width + gap) / (columns * cell + gap)));
    const height = Math.ceil(plan.nodes / across) * (head + rows * cell + below) - below;
    found = { cell, gap, below, head, columns, rows, across, width, height: Math.max(height, cell) };
    if (height <= most && columns * cell <= width) break;
  }
  return found;
}

function corner(rank) {
  const { cell, gap, below, head, columns, rows, across } = tiling;
  const node = Math.floor(rank / plan.perNode);
  const place = rank % plan.perNode;
  return [
    (node % across) * (columns * cell + gap) + (place % columns) * cell,
    Math.floor(node / across) * (head + rows * cell + below) + head + Math.floor(place / columns) * cell,
  ];
}

function rankAt(x, y) {
  const { cell, gap, below, head, columns, rows, across } = tiling;
  const column = Math.floor(x / (columns * cell + gap));
  const row = Math.floor(y / (head + rows * cell + below));
  const left = x - column * (columns * cell + gap);
  const top = y - row * (head + rows * cell + below) - head;
  const place = Math.floor(top / cell) * columns + Math.floor(left / cell);
  const node = row * across + column;
  if (column >= across || left >= columns * cell || top < 0 || top >= rows * cell) return null;
  return place < plan.perNode && node < plan.nodes ? node * plan.perNode + place : null;
}

// Whose colour a group has: that of its axis, or of the first of its axes.
const hueOf = (name) => {
  if (name === "ep" || name.startsWith("expert")) return "ep";
  return name.split("-").find((part) => AXES.includes(part)) || "tp";
};

function lit(rank) {
  const found = new Map();
  const groups = plan.groups.filter((one) => (state.group ? one.name === state.group : AXES.includes(one.name)));
  for (const group of groups) for (const one of groupOf(rank, group)) if (!found.has(one)) found.set(one, hueOf(group.name));
  found.set(rank, "ink");
  return found;
}

function shade(rank) {
  const { size, stride } = plan.axes[state.axis];
  const ramp = colours().ramps[state.axis];
  const margin = Math.max(0, 4 - Math.floor(size / 2));
  const at = Math.floor(rank / stride) % size;
  return ramp[size === 1 ? plan.shades / 2 : margin + Math.floor((at * (plan.shades - 1 - 2 * margin)) / (size - 1))];
}

// Black or white, whichever is further from a colour.
function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => {
    const value = parseInt(colour.slice(at, at + 2), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}

function draw() {
  const width = canvas.clientWidth;
  if (!width) return;
  tiling = tile(width);
  const sharp = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * sharp);
  canvas.height = Math.round(tiling.height * sharp);
  canvas.style.height = `${tiling.height}px`;
  const context = canvas.getContext("2d");
  context.scale(sharp, sharp);
  const scheme = colours();
  const marked = state.rank === null ? null : lit(state.rank);
  const side = tiling.cell - (tiling.cell > 8 ? 2 : tiling.cell > 4 ? 1 : 0.4);
  context.font = `${tiling.cell >= 44 ? 14 : tiling.cell >= 30 ? 12 : 10}px system-ui, sans-serif`;
  const paint = (rank, colour, grow) => {
    const [x, y] = corner(rank);
    context.fillStyle = colour;
    context.fillRect(x - grow, y - grow, side + 2 * grow, side + 2 * grow);
    if (tiling.head) {
      context.fillStyle = inkOn(colour);
      context.textAlign = "center";
      context.fillText(String(rank), x + side / 2, y + side / 2 + 4);
    }
  };
  for (let rank = 0; rank < plan.world; rank += 1) {
    if (!marked || !marked.has(rank)) paint(rank, marked ? scheme.track : shade(rank), 0);
  }
  // Over their neighbours, and larger where cells are too small to be found.
  if (marked) for (const [rank, hue] of marked) paint(rank, scheme[hue], tiling.cell < 12 ? 1 : 0);
  if (state.rank !== null && tiling.cell < 12) {
    const [x, y] = corner(state.rank);
    context.strokeStyle = scheme.ink;
    context.lineWidth = 2;
    context.strokeRect(x - 5, y - 5, side + 10, side + 10);
  }
  if (tiling.head) {
    context.fillStyle = scheme.soft;
    context.textAlign = "left";
    for (let node = 0; node < plan.nodes; node += 1) {
      const [x, y] = corner(node * plan.perNode);
      context.fillText(`node ${node}`, x, y - 6);
    }
  }
}
