"""How many public configuration files `parcompile import` turns into specs, and whether these describe the same model.

    python benchmarks/imports.py FOLDER [KIND ...]

FOLDER holds files in `megatron/` and `neox/`. A file is imported with the ranks that its axes need, a vocabulary of
50,257 where it names none, and nothing else. Of each complete spec the parameters are compared with those that the
tool itself has: Megatron-LM builds its model on the meta device (`.ci/upstream/megatron_lm.py`; PARCOMPILE_MEGATRON
names its sources), gpt-neox's are counted here from the widths that its layers are made with.
"""

from __future__ import annotations

import collections
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parcompile.backends.gpt_neox.options import defaults, spelling
from parcompile.backends.importer import RefusedError
from parcompile.backends.importers import IMPORTERS
from parcompile.backends.megatron.file import Call
from parcompile.backends.megatron.write import as_list
from parcompile.importing import Imported, import_tree
from parcompile.pipeline import recognised
from parcompile.text import read_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".ci"))

KINDS = {"megatron": "megatron", "neox": "gpt_neox"}
VOCABULARY = 50257
ROWS = ("files", "recognised", "complete", "asks", "in the way", "refused", "failed", "counted", "equal")


def main() -> int:
    folder, kinds = Path(sys.argv[1]), sys.argv[2:] or list(KINDS)
    counts = {kind: of_kind(folder / kind, KINDS[kind]) for kind in kinds}
    print("| | " + " | ".join(kinds) + " |\n|---|" + "---|" * len(kinds))
    for row in ROWS:
        print(f"| {row} | " + " | ".join(str(counts[kind][row]) for kind in kinds) + " |")
    return 0


def of_kind(folder: Path, kind: str) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    judge = _judge() if kind == "megatron" else None
    start = time.perf_counter()
    for file in sorted(folder.iterdir()):
        counts["files"] += 1
        try:
            outcome, result, call = one(file, kind)
        except Exception as error:
            print(f"{file.name}: {type(error).__name__}: {error}", file=sys.stderr)
            outcome, result, call = "failed", None, None
        if outcome:
            counts["recognised"] += 1
            counts[outcome] += 1
        if result is not None and result.plan is not None and call is not None:
            own = counted(call, kind, result, judge)
            if own is not None:
                counts["counted"] += 1
                counts["equal"] += own == result.plan.parameters.numel
                if own != result.plan.parameters.numel:
                    print(f"{file.name}: {own:,} there, {result.plan.parameters.numel:,} here", file=sys.stderr)
    print(f"{folder.name}: {counts['files'] / (time.perf_counter() - start):.1f} files/s", file=sys.stderr)
    return counts


def one(file: Path, kind: str) -> tuple[str, Imported | None, Any]:
    """What becomes of a file; "" when it is of another kind."""
    found, recognition = recognised(read_file(str(file)))
    if recognition.kind != kind or found.document is None:
        return "", None, None
    importer = IMPORTERS[kind]
    tree = {
        key if kind == "megatron" else spelling(str(key)): one for key, one in importer.tree(found.document).items()
    }
    answers: dict[tuple[str, ...], Any] = {("cluster", "nodes"): 1, ("cluster", "gpus_per_node"): ranks(tree)}
    if any(name in tree for name in ("nnodes", "nproc_per_node")):
        answers.clear()
    if tree.get("vocab_size") is None:
        answers["model", "vocab_size"] = VOCABULARY
    try:
        result = import_tree(tree, importer, answers)
    except RefusedError:
        return "refused", None, None
    outcome = "complete" if result.complete else "asks" if result.questions else "in the way"
    return outcome, result, found.document if kind == "megatron" else tree


def ranks(tree: Mapping[str, Any]) -> int:
    """The fewest ranks that the axes of a file need."""

    def size(*names: str) -> int:
        return next((tree[name] for name in names if isinstance(tree.get(name), int) and tree[name] > 0), 1)

    tp, pp = (
        size("tensor_model_parallel_size", "model_parallel_size"),
        size("pipeline_model_parallel_size", "pipe_parallel_size"),
    )
    return math.lcm(tp * pp * size("context_parallel_size"), tp * pp * size("expert_model_parallel_size"))


def counted(call: Any, kind: str, result: Imported, judge: Any) -> int | None:
    """The parameters that the tool itself has; None when it cannot be asked."""
    if kind == "gpt_neox":
        return gpt_neox_parameters(call, result.plan.spec.model.shape.vocab_size if result.plan else 0)
    if judge is None or not isinstance(call, Call):
        return None
    given = {name: value for name, value in call.arguments.values.items() if value is not None}
    given.setdefault("vocab_size", VOCABULARY)
    try:
        return int(judge.parameters(as_list(given)))
    except (RuntimeError, StopIteration, KeyError):
        return None


def gpt_neox_parameters(given: Mapping[str, Any], vocabulary: int) -> int:
    """From the widths of the linears in megatron/model/transformer.py, word_embeddings.py and norms.py."""
    found = {**defaults(), **{name: value for name, value in given.items() if value is not None}}
    hidden, heads = found["hidden_size"], found["num_attention_heads"]
    kv = hidden // heads * (found["num_kv_heads"] or heads)
    width = found["intermediate_size"] or int((found["expansion_factor"] or 4) * hidden)
    gated, multiple = found["activation"] in ("swiglu", "geglu", "reglu"), found["mlp_multiple_of"]
    first, second = (int(width * 2 / 3), int(width * 2 / 3) // 2) if gated else (width, width)
    first = 2 * multiple * math.ceil(first / (2 * multiple))
    second = multiple * math.ceil(second / multiple)
    if found.get("mlp_type") == "llama":
        second = 256 * math.ceil(int(2 * hidden * 4 / 3) / 256)
        first = 2 * second
    attention = hidden * (hidden + 2 * kv) + hidden * hidden
    attention += (hidden + 2 * kv + hidden) * bool(found["use_bias_in_attn_linear"])
    mlp = hidden * first + second * hidden + (first + hidden) * bool(found["use_bias_in_mlp"])
    norm = hidden if "rmsnorm" in found["norm"] else 2 * hidden
    positions = found["max_position_embeddings"] * hidden if found["pos_emb"] == "learned" else 0
    ends = vocabulary * hidden * (2 if found["no_weight_tying"] else 1) + positions + norm
    return int(found["num_layers"] * (attention + mlp + 2 * norm) + ends)


def _judge() -> Any:
    sources = os.environ.get("PARCOMPILE_MEGATRON")
    if not sources:
        return None
    from upstream.megatron_lm import Judge

    return Judge(Path(sources)).__enter__()


if __name__ == "__main__":
    sys.exit(main())
