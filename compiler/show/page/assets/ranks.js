// What the plan gives to a rank, computed from sizes and strides. Tested against the compiler for every kind of plan.
const plan = JSON.parse(document.getElementById("plan").textContent);
const AXES = ["tp", "cp", "dp", "pp"];

const along = (rank, axis) => Math.floor(rank / plan.axes[axis].stride) % plan.axes[axis].size;

// The ranks of the group to which a rank belongs: its members differ by multiples of each stride.
function groupOf(rank, group) {
  const steps = group.members;
  if (group.ends && plan.axes.pp.size > 1) {
    const place = along(rank, "pp");
    const last = place === plan.axes.pp.size - 1;
    if (place !== 0 && !(last && steps.length)) return [];
    const first = last && steps.length ? rank - steps[0][1] : rank;
    return steps.length ? [first, first + steps[0][1]] : [first];
  }
  let found = [rank - steps.reduce((sum, [size, stride]) => sum + (Math.floor(rank / stride) % size) * stride, 0)];
  for (const [size, stride] of steps) {
    found = Array.from({ length: size }, (_, step) => found.map((one) => one + step * stride)).flat();
  }
  return found.sort((a, b) => a - b);
}

// The positions of a sequence that a cp rank holds: [start, stop) pairs, and the step between tokens.
function tokensOf(place) {
  const { length, layout, chunks } = plan.sequence;
  const cp = plan.axes.cp.size;
  if (layout === "striped") return { ranges: [[place, length]], step: cp };
  const size = length / (cp * chunks);
  const ids = layout === "zigzag" ? [place, 2 * cp - 1 - place] : [place];
  const ranges = [];
  for (const id of ids) {
    const last = ranges[ranges.length - 1];
    if (last && last[1] === id * size) last[1] += size;
    else ranges.push([id * size, (id + 1) * size]);
  }
  return { ranges, step: 1 };
}

// A slice of each parameter: where it stands, its local shape, and the pieces of the cut dim.
function slicesOf(stage, tp) {
  const held = plan.stages[stage];
  const has = {
    embedding: held.embedding || (plan.tied && held.head),
    head: held.head,
    layers: true,
  };
  return plan.tensors
    .filter((row) => has[row.place])
    .map((row) => {
      const count = row.layers === null ? 1 : held.layers.reduce((sum, [start, stop]) =>
        row.layers.reduce((both, [from, to]) => both + Math.max(0, Math.min(stop, to) - Math.max(start, from)), sum), 0);
      return { ...row, count, pieces: row.ranges === null ? null : row.ranges[tp] };
    })
    .filter((row) => row.count > 0);
}

function describe(rank) {
  const place = Object.fromEntries(AXES.map((axis) => [axis, along(rank, axis)]));
  const shards = plan.shards;
  const index = shards === 1 ? 0 : groupOf(rank, plan.groups.find((one) => one.name === "dp-cp")).indexOf(rank);
  const stage = plan.stages[place.pp];
  const start = index * stage.shard;
  return {
    rank,
    node: Math.floor(rank / plan.perNode),
    gpu: rank % plan.perNode,
    place,
    groups: plan.groups.map((group) => ({ ...group, ranks: groupOf(rank, group) })),
    tokens: tokensOf(place.cp),
    layers: stage.layers,
    slices: slicesOf(place.pp, place.tp),
    optimizer: { index, shards, start, stop: start + stage.shard, numel: stage.numel },
    experts: expertsOf(rank, stage),
  };
}

// The optimizer states of experts that are dealt over ep are cut over the ranks that hold the same ones.
function expertsOf(rank, stage) {
  if (stage.experts === null) return null;
  const ranks = groupOf(rank, plan.groups.find((one) => one.name === "expert-dp"));
  const shards = plan.shards === 1 ? 1 : ranks.length;
  const index = shards === 1 ? 0 : ranks.indexOf(rank);
  const start = index * stage.experts.shard;
  return { index, shards, start, stop: start + stage.experts.shard, numel: stage.experts.numel };
}

// `0-7` for consecutive numbers, `1-25:8` for steps of 8; the middle of a long irregular list is left out.
function runs(numbers) {
  if (numbers.length > 2) {
    const step = numbers[1] - numbers[0];
    if (numbers.every((one, at) => at === 0 || one - numbers[at - 1] === step)) {
      return `${numbers[0]}-${numbers[numbers.length - 1]}${step > 1 ? `:${step}` : ""}`;
    }
  }
  if (numbers.length > 8) return `${numbers.slice(0, 6).join(", ")}, …, ${numbers[numbers.length - 1]}`;
  return numbers.join(", ") || "-";
}
