"""What `parcompile import` makes of files that others wrote.

    python benchmarks/imports.py FOLDER ... [--list]

A file counts as imported when a spec comes out, and as complete when that spec passes `parcompile check`. What a file
does not say (machines, vocabulary, the model of a DeepSpeed file) is answered with the same values for all. Of a
complete spec the parameters are counted: once by the plan, and once here, from the options of the file alone, by the
modules that Megatron-Core and gpt-neox build. A plan of another size than the source is a fault.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import heads, parsed, row

from parcompile.backends.importers import IMPORTERS
from parcompile.backends.kinds import GPT_NEOX, MEGATRON
from parcompile.backends.reading import Importer, RefusedError, Source, SpecPath, Undecided
from parcompile.importing import ImportConflictError, Imported, foreign, import_tree
from parcompile.text import SourceError, read_source
from parcompile.text.python import functions, parsed_python

VOCABULARY = 50257
MACHINES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8), (16, 8), (32, 8), (64, 8))
"""Nodes and GPUs of each; the first on which a file makes a plan is taken."""
MEMORY: Mapping[SpecPath, Any] = {("cluster", "accelerator"): {"memory_gib": 100_000}}
"""So much that it is no reason."""
ANSWERS: Mapping[SpecPath, Any] = {
    ("model", "vocab_size"): VOCABULARY,
    ("model",): {"preset": "llama-3.2-1b"},
    ("training", "sequence_length"): 2048,
    ("training", "precision"): "bf16",
    ("training", "micro_batch_size"): 1,
    ("training", "global_batch_size"): 1024,
    ("training", "gradient_accumulation_steps"): 1,
    ("training", "optimizer"): {"type": "adamw", "lr": 1e-4},
    ("training", "optimizer", "lr"): 1e-4,
    ("training", "optimizer", "betas"): [0.9, 0.999],
    ("training", "optimizer", "eps"): 1e-8,
    ("training", "seed"): 1234,
    ("training", "optimizer", "weight_decay"): 0.1,
    ("training", "lr_scheduler"): {"type": "constant", "warmup_steps": 2},
    ("training", "train_steps"): 1000,
    ("training", "gradient_clipping"): 1.0,
}
"""Answers to what a file leaves open."""


def main() -> None:
    """Prints a row for each kind of file."""
    folders = "folders", {"nargs": "+", "type": Path}
    options = parsed(__doc__, folders, list=(False, "say of each file what became of it"))
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for file in sorted(one for folder in options.folders for one in folder.rglob("*") if one.is_file()):
        for function in _functions(file):
            kind, outcomes = _outcomes(file, function)
            if kind in IMPORTERS:
                found[kind].update(outcomes)
                if options.list:
                    print(file.name, function or "", *outcomes)
    columns = ("files", "refused", "imported", "complete", "counted", "equal")
    heads("kind", *columns)
    for kind, counts in found.items():
        row(IMPORTERS[kind].tool, *(counts[name] for name in columns))


def _functions(file: Path) -> list[str | None]:
    """The configurations of a Python file; None stands for all of any other."""
    if file.suffix != ".py":
        return [None]
    try:
        return [*functions(parsed_python(read_source(str(file))))]
    except SourceError:
        return []


def _outcomes(file: Path, function: str | None) -> tuple[str, list[str]]:
    """The kind of a file or of a configuration in it, and which columns it counts in."""
    try:
        kind, document = foreign(str(file), function=function)
    except (SourceError, RefusedError):
        return "unreadable", []
    importer = IMPORTERS[kind]
    outcomes = ["files"]
    try:
        tree = importer.tree(document)
        for machines in MACHINES:
            result = _answered(importer, tree, machines, file.parent)
            if result.complete:
                break
    except (RefusedError, ImportConflictError):
        return kind, [*outcomes, "refused"]
    outcomes.append("imported")
    if not result.complete:
        outcomes += [one.code for one in result.diagnostics if one.is_error] + [
            ".".join(one.path) for one in result.questions
        ]
    if not result.complete or result.plan is None:
        return kind, outcomes
    outcomes.append("complete")
    shape = result.plan.spec.model.shape
    counted = COUNTS[kind](importer, tree, shape.vocab_size) if kind in COUNTS else None
    here = result.plan.parameters.numel
    if counted is not None:
        outcomes += ["counted", "equal" if counted == here else f"({counted:,} there, {here:,} here)"]
    return kind, outcomes


def _answered(importer: Importer, tree: Mapping[str, Any], machines: tuple[int, int], folder: Path) -> Imported:
    """The import with answers to all that it asks; what the file says itself is not answered."""
    nodes, gpus = machines
    cluster = {("cluster", "nodes"): nodes, ("cluster", "gpus_per_node"): gpus, **MEMORY}
    answers: dict[SpecPath, Any] = {}
    for path, value in cluster.items():
        with contextlib.suppress(ImportConflictError):
            import_tree(tree, importer, {**answers, path: value}, folder)
            answers[path] = value
    while True:
        result = import_tree(tree, importer, answers, folder)
        asked = [question.path for question in result.questions if question.path in ANSWERS]
        if not asked or any(path in answers for path in asked):
            return result
        answers |= {path: ANSWERS[path] for path in asked}


def _values(importer: Importer, tree: Mapping[str, Any]) -> Mapping[str, Any]:
    source = Source(importer.options(tree), importer.defaults())
    given = {name: value for name, value in source.given.items() if not isinstance(value, Undecided)}
    return collections.ChainMap(given, dict(source.defaults))  # type: ignore[arg-type]


def _megatron(importer: Importer, tree: Mapping[str, Any], vocabulary: int) -> int | None:
    """Parameters as Megatron-Core builds a GPT model (core/models/gpt, core/transformer); None without sizes."""
    value = _values(importer, tree)
    hidden, layers, heads = (value.get(name) for name in ("hidden_size", "num_layers", "num_attention_heads"))
    if None in (hidden, layers, heads) or value.get("multi_latent_attention"):
        return None
    gated = bool(value.get("swiglu") or value.get("quick_geglu"))
    width = value.get("ffn_hidden_size") or (int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)
    head = value.get("kv_channels") or hidden // heads
    groups = value.get("num_query_groups") if value.get("group_query_attention") else heads
    biased = not value.get("disable_bias_linear")
    norm = hidden * (1 if value.get("normalization") == "RMSNorm" else 2)
    queries, keys = heads * head, groups * head
    attention = hidden * (queries + 2 * keys) + queries * hidden + (hidden if biased else 0)
    attention += queries + 2 * keys if biased or value.get("add_qkv_bias") else 0
    attention += 2 * head * (1 if value.get("normalization") == "RMSNorm" else 2) if value.get("qk_layernorm") else 0

    def mlp(inner: int) -> int:
        return hidden * inner * (3 if gated else 2) + ((2 if gated else 1) * inner + hidden if biased else 0)

    experts = value.get("num_experts")
    frequency = value.get("moe_layer_freq", 1)
    if experts and frequency not in (1, "1"):
        return None
    block = mlp(width)
    if experts:
        block = experts * (mlp(value.get("moe_ffn_hidden_size") or width) + hidden)
        shared = value.get("moe_shared_expert_intermediate_size")
        block += mlp(shared) if shared else 0
        block += hidden if shared and value.get("moe_shared_expert_gate") else 0
        block += experts if value.get("moe_router_enable_expert_bias") else 0
    table = vocabulary * hidden
    positions = 0
    if value.get("position_embedding_type") == "learned_absolute" and not value.get("use_rotary_position_embeddings"):
        positions = value["max_position_embeddings"] * hidden
    ends = table + positions + norm + (table if value.get("untie_embeddings_and_output_weights") else 0)
    return int(layers * (attention + block + 2 * norm) + ends)


def _gpt_neox(importer: Importer, tree: Mapping[str, Any], vocabulary: int) -> int | None:
    """Parameters as gpt-neox builds a model (megatron/model/transformer.py); None without sizes."""
    value = _values(importer, tree)
    hidden, layers, heads = (value.get(name) for name in ("hidden_size", "num_layers", "num_attention_heads"))
    if None in (hidden, layers, heads):
        return None
    gated = value["activation"] in ("geglu", "reglu", "swiglu", "bilinear", "glu")
    multiple = value["mlp_multiple_of"]
    first = value.get("intermediate_size") or int((value.get("expansion_factor") or 4) * hidden)
    first = int(first * 2 / 3) if gated else first
    second = first // 2 if gated else first
    first = 2 * multiple * ((first + 2 * multiple - 1) // (2 * multiple))
    second = multiple * ((second + multiple - 1) // multiple)
    keys = (value.get("num_kv_heads") or heads) * (hidden // heads)
    attention = hidden * (hidden + 2 * keys) + hidden * hidden
    attention += 2 * hidden + 2 * keys if value["use_bias_in_attn_linear"] else 0
    mlp = hidden * (first + second) + (first + hidden if value["use_bias_in_mlp"] else 0)
    norm = hidden * (1 if "rmsnorm" in value["norm"] else 2)
    table = vocabulary * hidden
    positions = value["max_position_embeddings"] * hidden if value["pos_emb"] == "learned" else 0
    ends = table * (2 if value["no_weight_tying"] else 1) + positions + norm
    return int(layers * (attention + mlp + 2 * norm) + ends)


COUNTS = {MEGATRON: _megatron, GPT_NEOX: _gpt_neox}
"""Other files say nothing of the sizes of their model."""

if __name__ == "__main__":
    main()
