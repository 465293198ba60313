"""Compiling plans for 8 to 1,048,576 ranks, and computing groups beside those who enumerate them.

    python benchmarks/layout.py [--rounds 5] [--json FILE] [--plot FILE]

"compile" is everything from the text of a spec to the texts of all artefacts, in one process that has done it before.
"peak" is what that allocates at its height (Python's own count, in a run of its own), "files" the size of them all.
"one rank" computes the tp, cp, dp, pp and dp-cp groups of a single rank; "all" lists every group of the world, as the
peers do: Megatron-Core's RankGenerator and torch's mesh of ranks (the lists that DeviceMesh makes its groups of). The
methods take turns in every round; given are medians, and the quartiles as a share of the median. "x fewer" is the
faster peer's time over that of one rank here: what a rank saves that needs only its own groups. A peer is no longer
asked when a round took it longer than a second; a peer that is not installed is left out.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import JSON, parsed, quartiles, write_json

from parcompile.backends.registry import render
from parcompile.layout.groups import Grid, Groups
from parcompile.pipeline import compile_file

SHAPES = {
    8: (2, 2, 1),
    64: (4, 2, 2),
    512: (8, 2, 4),
    4096: (8, 4, 8),
    32_768: (8, 8, 16),
    262_144: (8, 16, 16),
    1_048_576: (8, 16, 16),
}
"""World size: tp, cp, pp; dp is what is left."""

NAMES = ("tp", "cp", "dp", "pp", "dp-cp")
ORDER = ("tp", "cp", "dp", "pp")
LIMIT_SECONDS = 1.0


def spec(world: int) -> dict[str, Any]:
    """Llama 3 8B on that many GPUs."""
    tp, cp, pp = SHAPES[world]
    return {
        "version": 1,
        "name": f"{world} ranks",
        "model": {"preset": "llama-3-8b"},
        "cluster": {"nodes": max(1, world // 16), "gpus_per_node": min(world, 16), "accelerator": "b200"},
        "parallelism": {"tp": tp, "cp": cp, "pp": pp, "order": "-".join(ORDER), "sequence_parallel": True},
        "training": {
            "sequence_length": 131_072,
            "micro_batch_size": 1,
            "gradient_accumulation_steps": pp,
            "gradient_accumulation_dtype": "bf16" if pp == 1 else "fp32",
            "activation_checkpointing": "full",
        },
    }


def compiled(file: Path) -> dict[str, str]:
    """All artefacts of a spec."""
    plan, checked = compile_file(file)
    if plan is None:
        raise SystemExit("\n".join(f"{one.code}: {one.message}" for one in checked.diagnostics if one.is_error))
    return render(plan)


def sizes(world: int) -> dict[str, int]:
    tp, cp, pp = SHAPES[world]
    return {"tp": tp, "cp": cp, "dp": world // (tp * cp * pp), "pp": pp}


def ours_one(world: int) -> object:
    groups = Groups(Grid.of(ORDER, sizes(world)))
    return [groups.of_rank(name, world // 3) for name in NAMES]


def ours_all(world: int) -> object:
    groups = Groups(Grid.of(ORDER, sizes(world)))
    return [list(groups.all(name)) for name in NAMES]


def megatron(world: int) -> Callable[[], object] | None:
    try:
        from megatron.core.parallel_state import RankGenerator
    except ImportError:
        return None

    def run() -> object:
        generator = RankGenerator(ep=1, order="-".join(ORDER), **sizes(world))
        return [generator.get_ranks(name) for name in NAMES]

    return run


def torch_mesh(world: int) -> Callable[[], object] | None:
    try:
        import torch
    except ImportError:
        return None
    shape = [sizes(world)[axis] for axis in reversed(ORDER)]

    def run() -> object:
        # What torch does for each dim of a mesh: move it last, cut into rows, make lists of them.
        mesh = torch.arange(world).view(shape)
        found = [mesh.swapdims(-1, dim).reshape(-1, mesh.size(dim)).tolist() for dim in range(4)]
        found.append(mesh.permute(0, 3, 1, 2).reshape(-1, shape[1] * shape[2]).tolist())
        return found

    return run


def same(found: object, expected: object) -> bool:
    """Whether two methods list the same groups of each name, in whatever order."""

    def plain(lists: Any) -> list[list[tuple[int, ...]]]:
        return [sorted(tuple(group) for group in groups) for groups in lists]

    return sorted(plain(found)) == sorted(plain(expected))


def quartile_spread(times: list[float]) -> float:
    low, middle, high = quartiles(times) if len(times) > 1 else (1.0, 1.0, 1.0)
    return (high - low) / middle


def measure(world: int, rounds: int, skipped: set[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "spec.json"
        file.write_text(json.dumps(spec(world)), encoding="utf-8")
        methods: dict[str, Callable[[], object] | None] = {
            "compile": lambda: compiled(file),
            "one rank": lambda: ours_one(world),
            "all": lambda: ours_all(world),
            "megatron": megatron(world),
            "torch": torch_mesh(world),
        }
        active = {name: run for name, run in methods.items() if run is not None and name not in skipped}
        times: dict[str, list[float]] = {name: [] for name in active}
        texts = compiled(file)
        for _ in range(rounds):
            for name, run in active.items():
                # What one method leaves behind is not swept up in the time of the next.
                gc.collect()
                gc.disable()
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
                gc.enable()
        if world <= 4096:
            for peer in {"megatron", "torch"} & active.keys():
                assert same(active[peer](), active["all"]()), f"{peer} lists other groups for {world} ranks"
        tracemalloc.start()
        compiled(file)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    for name in ("all", "megatron", "torch"):
        if name in times and statistics.median(times[name]) > LIMIT_SECONDS:
            skipped.add(name)
    return {
        "world_size": world,
        "peak_bytes": peak,
        "file_bytes": sum(len(text.encode()) for text in texts.values()),
        "seconds": {name: statistics.median(found) for name, found in times.items()},
        "spread": {name: quartile_spread(found) for name, found in times.items()},
    }


COLUMNS = ("compile", "one rank", "all", "megatron", "torch")


def table(rows: list[dict[str, Any]]) -> str:
    heads = [f"{name:>17}" for name in COLUMNS]
    lines = [f"{'world':>9}{''.join(heads)}{'x fewer':>10}{'peak':>9}{'files':>9}"]
    for row in rows:
        seconds, spread = row["seconds"], row["spread"]
        cells = [
            f"{seconds[name] * 1e3:>9.3f} ms ±{spread[name] / 2:>3.0%}" if name in seconds else "-" for name in COLUMNS
        ]
        peers = [seconds[name] for name in ("megatron", "torch") if name in seconds]
        cells = [f"{cell:>17}" for cell in cells]
        cells.append(f"{min(peers) / seconds['one rank']:>10,.0f}" if peers else f"{'-':>10}")
        cells += [f"{row['peak_bytes'] / 1e6:>6.1f} MB", f"{row['file_bytes'] / 1e3:>6.0f} kB"]
        lines.append(f"{row['world_size']:>9,}{''.join(cells)}")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name in COLUMNS:
        points = [(row["world_size"], row["seconds"][name]) for row in rows if name in row["seconds"]]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds", title="Compiling a plan, and its groups")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    options = parsed(__doc__, rounds=5, json=JSON, plot=Path)
    skipped: set[str] = set()
    rows = [measure(world, options.rounds, skipped) for world in SHAPES]
    print(table(rows))
    write_json(options.json, rows)
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
