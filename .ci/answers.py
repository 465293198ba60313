"""What the compiler says of every model type in several layouts, as text: the net under a change of its structure.

    python .ci/answers.py OUT              writes the answers of this checkout
    python .ci/answers.py --against REV    compares them with those of a revision, and shows the lines that differ

One line for each answer: hashes of the rows of parameters, matmul parameters and FLOPs of a token, the terms of memory
and the collectives of every stage in seven layouts, findings of the rules in four, and the words of
`parcompile models`. A revision is asked with its own copy of this file. Nothing is built, and no rank runs: about ten
seconds each.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 2, "cp": 2, "recompute": "full"},
    {"cp": 4, "cp_layout": "contiguous"},
    {"pp": 2, "dp": 2, "recompute": "full"},
    {"tp": 2, "cp": 2, "pp": 2, "sequence_parallel": True, "zero_stage": 0, "element_bytes": 4},
    {"framework": "megatron", "tp": 2},
)
RULES: tuple[tuple[dict[str, Any], int], ...] = (
    ({"tp": 2}, 16),
    ({"tp": 2, "cp": 2, "sequence_parallel": True}, 32),
    ({"cp": 4}, 16),
    ({"pp": 2, "tp": 3}, 16),
)
QWEN4 = {
    "model_type": "qwen4_exp_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "vocab_size": 248320,
    "max_position_embeddings": 32768,
    "eos_token_id": 248046,
    "ple_layer_ids": [2, 6],
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
}
"""At its published size, where tables of n-grams are the largest gradients."""


def configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every type that the runtime trains, tiny."""
    from families import tiny_config

    from parcompile.model.catalogue import RUNTIME_FAMILIES

    yield "qwen4_exp_text, published", QWEN4
    for name in RUNTIME_FAMILIES:
        yield name, tiny_config(name)


def answers() -> Iterator[str]:
    """All of them, a line each."""
    from parcompile.model.catalogue import model_types
    from parcompile.model.describing import kinds_of

    for name, config in configurations():
        yield from (f"{name} {line}" for line in _of_costs(config))
        yield from (f"{name} {line}" for line in _of_rules(config))
    for one in model_types().values():
        yield f"{one.name} words {kinds_of(one)}"


def _of_costs(config: dict[str, Any]) -> Iterator[str]:
    from parcompile.cost.collectives import collectives
    from parcompile.cost.flops import matmul_parameters, mixed_matmul_parameters, model_flops_per_token
    from parcompile.cost.memory_terms import memory_terms
    from parcompile.cost.workload import Workload
    from parcompile.model.derived_rows import parameter_table
    from parcompile.model.hf_config import shape_from_config

    shape = shape_from_config(config)
    rows = hashlib.sha256(repr(list(parameter_table(shape))).encode()).hexdigest()
    mixed = mixed_matmul_parameters(shape, moe=shape.has_moe)
    yield f"rows {rows} {matmul_parameters(shape)} {model_flops_per_token(shape, 64)} {mixed}"
    for layout in LAYOUTS:
        try:
            work = Workload(shape, 1, 8, "h100-sxm", 64, 2, 4, **layout)
            terms = [asdict(one) for one in memory_terms(work)]
            sent = [
                sorted((str(axis), kind, one.messages, one.wire_bytes) for (axis, kind), one in found.items())
                for found in (collectives(work, stage) for stage in work.stages)
            ]
        except (ValueError, ArithmeticError) as error:  # a layout that the model does not have
            yield f"{layout} {type(error).__name__} {error}"
            continue
        yield f"{layout} memory {terms}"
        yield f"{layout} sent {sent}"


def _of_rules(config: dict[str, Any]) -> Iterator[str]:
    from parcompile.rules import check
    from parcompile.spec.resolve import Resolution

    for parallelism, length in RULES:
        ranks = math.prod(size for size in parallelism.values() if size is not True)
        tree = {
            "version": 1,
            "name": "answers",
            "model": {"hf_config": "config.json"},
            "cluster": {"gpus_per_node": ranks, "accelerator": "cpu"},
            "parallelism": {"make_vocab_size_divisible_by": 8, **parallelism},
            "training": {"sequence_length": length, "global_batch_size": 2, "micro_batch_size": 2},
        }
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            found = [(one.code, one.message, str(one.help)) for one in check(Resolution(tree, folder=Path(folder)))]
            yield f"rules {parallelism} {str(found).replace(folder, 'FOLDER')}"


@contextlib.contextmanager
def importable(checkout: Path) -> Iterator[Path]:
    """A folder from which `parcompile` is imported as the checkout has it."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "parcompile"
        package.mkdir()
        for entry in (*(checkout / "compiler").iterdir(), checkout / "runtime", checkout / "schemas"):
            (package / entry.name).symlink_to(entry)
        yield Path(folder)


def written(checkout: Path, out: Path) -> list[str]:
    """The answers of a checkout, by a process of its own."""
    with importable(checkout) as folder:
        paths = os.pathsep.join([str(folder), str(checkout / "tests" / "runtime")])
        command = [sys.executable, str(checkout / ".ci" / "answers.py"), "--here", str(out)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"})
    return sorted(out.read_text().splitlines())  # the order of types does not matter


def compared(revision: str) -> int:
    """How many lines of the answers differ from those of a revision; they are printed."""
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "-q", "--detach", str(before), revision], check=True)
        try:
            if not (before / ".ci" / "answers.py").exists():
                (before / ".ci" / "answers.py").write_text(Path(__file__).read_text())
            old, new = written(before, Path(folder) / "old"), written(ROOT, Path(folder) / "new")
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(before)], check=True)
    changed = [line for line in difflib.unified_diff(old, new, lineterm="", n=0) if line[:3] not in ("---", "+++")]
    print("\n".join(line[:400] for line in changed[:60]))
    count = sum(line[0] in "+-" for line in changed)
    print(f"{len(new)} answers, {count} lines differ from {revision}")
    return count


def main() -> int:
    """0: written, or equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--against", metavar="REV", help="compare with a revision")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here is not None:
        options.here.write_text("".join(f"{line}\n" for line in answers()))
        return 0
    if options.against is not None:
        return int(compared(options.against) > 0)
    if options.out is None:
        parser.error("name a file to write, or a revision")
    print(f"{len(written(ROOT, options.out))} answers in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
