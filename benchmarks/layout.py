"""Compiling plans for 8 to 1,048,576 ranks, and computing groups beside those who enumerate them.

    python benchmarks/layout.py [--rounds 5] [--json FILE]

"compile" is everything from the text of a spec to the texts of all artefacts, in one process that has done it before.
"peak" is what that allocates at its height (Python's own count, in a run of its own), "files" the size of them all.
"one rank" computes the tp, cp, dp, pp and dp-cp groups of a single rank; "all" lists every group of the world, as
torch's mesh of ranks does (the lists that DeviceMesh makes its groups of). The methods take turns in every round; given
are medians, and the quartiles as a share of the median. What lists all is no longer asked when a round took it longer
than a second.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import JSON, heads, parsed, quartiles, row, seconds_in_turns, write_json

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


def one_rank(world: int) -> object:
    groups = Groups(Grid.of(ORDER, sizes(world)))
    return [groups.of_rank(name, world // 3) for name in NAMES]


def every_group(world: int) -> object:
    groups = Groups(Grid.of(ORDER, sizes(world)))
    return [list(groups.all(name)) for name in NAMES]


def torch_mesh(world: int) -> object:
    """What torch does for each dim of a mesh: move it last, cut into rows, make lists of them."""
    import torch

    shape = [sizes(world)[axis] for axis in reversed(ORDER)]
    mesh = torch.arange(world).view(shape)
    found = [mesh.swapdims(-1, dim).reshape(-1, mesh.size(dim)).tolist() for dim in range(4)]
    found.append(mesh.permute(0, 3, 1, 2).reshape(-1, shape[1] * shape[2]).tolist())
    return found


LISTED: dict[str, Callable[[int], object]] = {"all": every_group, "torch": torch_mesh}


def plain(lists: Any) -> list[list[tuple[int, ...]]]:
    """The groups of each name in one order, whoever has listed them."""
    return sorted(sorted(map(tuple, groups)) for groups in lists)


def measure(world: int, rounds: int, skipped: set[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "spec.json"
        file.write_text(json.dumps(spec(world)), encoding="utf-8")
        methods: dict[str, Callable[[], object]] = {"compile": lambda: compiled(file)}
        for name, list_groups in {"one rank": one_rank, **LISTED}.items():
            if name not in skipped:
                methods[name] = lambda list_groups=list_groups: list_groups(world)
        texts = compiled(file)
        gc.disable()  # what one method leaves behind is not swept up in the time of the next
        times = seconds_in_turns(methods, rounds, before=gc.collect)
        gc.enable()
        tracemalloc.start()
        compiled(file)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if world <= 4096:
        assert plain(torch_mesh(world)) == plain(every_group(world)), f"torch lists other groups for {world} ranks"
    skipped |= {name for name in LISTED if name in times and statistics.median(times[name]) > LIMIT_SECONDS}
    size = sum(len(text.encode()) for text in texts.values())
    return {"world_size": world, "peak_bytes": peak, "file_bytes": size, "seconds": times}


def cell(one: dict[str, Any], name: str) -> str:
    if name not in one["seconds"]:
        return "–"
    low, middle, high = quartiles(one["seconds"][name])
    return f"{middle * 1e3:.3f} ms ± {(high - low) / middle / 2:.0%}"


def main() -> None:
    options = parsed(__doc__, rounds=5, json=JSON)
    skipped: set[str] = set()
    rows = [measure(world, options.rounds, skipped) for world in SHAPES]
    methods = ("compile", "one rank", *LISTED)
    heads("world", *methods, "peak", "files")
    for one in rows:
        sizes = f"{one['peak_bytes'] / 1e6:.1f} MB", f"{one['file_bytes'] / 1e3:.0f} kB"
        row(f"{one['world_size']:,}", *(cell(one, name) for name in methods), *sizes)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
