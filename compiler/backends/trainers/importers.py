"""The trainers that read YAML: axolotl, LLaMA-Factory, transformers' own arguments, and ms-swift.

Sources: axolotl at 2026-07-24, `utils/schemas/` and `core/builders/base.py`; LLaMA-Factory at 2026-08-18, `hparams/`,
and transformers' `TrainingArguments`; ms-swift at 2026-08-22, `arguments/`, `trainers/arguments.py`,
`megatron/arguments/megatron_args.py`, `config/`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from parcompile.backends import reading
from parcompile.backends.kinds import AXOLOTL, LLAMA_FACTORY, SWIFT, TRAINER
from parcompile.backends.megatron.over_model import read_megatron, settle, typed
from parcompile.backends.reading import Draft, Importer, Source, Undecided
from parcompile.backends.recipes import flattened
from parcompile.text import Document
from parcompile.text.typed import integer, word

from . import ADAPTER, CHANGING, MEGATRON_SWIFT, METHOD, options, stored_tool
from .read import read_model, reader, reduced_by_fsdp, with_deepspeed

# axolotl.

_AXOLOTL = stored_tool("axolotl")
_OF_STAGE = ("fsdp", "fsdp_version", "fsdp_config.reshard_after_forward", "fsdp_config.fsdp_version")
_RINGS = {
    "varlen_llama3": {"cp_implementation": "all_gather"},
    **{
        f"batch_{name}": {"cp_implementation": "ring", "cp_layout": layout}
        for name, layout in (("ring", "contiguous"), ("zigzag", "zigzag"), ("stripe", "striped"))
    },
}


def _read_axolotl(source: Source, draft: Draft) -> None:
    _sharding(source, draft)
    kind = source.given.get("ring_attn_func")
    if isinstance(kind, str) and kind in _RINGS:
        draft.fill(("parallelism",), _RINGS[kind])
        source.use(["ring_attn_func"], ("parallelism", "cp_implementation"))
    if source.given.get("batch_size") is not None:
        source.lose("batch_size", "write gradient_accumulation_steps, which is batch_size / micro_batch_size")
    source.ignore("parcompile.plan", "the plan that the plug-in trains by")
    others = [name for name in source.under("parcompile") if name != "parcompile.plan"]
    source.lose(others, "the plug-in refuses it: the section has one key, plan")
    reader(_AXOLOTL)(source, draft)


def _sharding(source: Source, draft: Draft) -> None:
    """FSDP is ZeRO: it shards weights as stage 3 does, and as stage 2 where weights stay gathered after the forward."""
    fsdp = [name for name in source.given if name == "fsdp" or name.startswith(("fsdp_config", "fsdp_version"))]
    if any(source.given[name] for name in fsdp):
        stays = source.given.get("fsdp_config.reshard_after_forward") is False
        draft.take(source, _OF_STAGE, {reading.STAGE: 2 if stays else 3})
        for name in ("bf16", "fp16"):
            if source.given.get(name) is True:
                reduced_by_fsdp(source, draft, name, name)
        source.lose([name for name in fsdp if name not in _OF_STAGE], "FSDP's own: ZeRO has no such setting")
    shards, replicas = (source.given.get(name) for name in ("dp_shard_size", "dp_replicate_size"))
    if isinstance(shards, int):
        sizes = [one for one in (shards, replicas) if isinstance(one, int)]
        draft.take(source, ["dp_shard_size"], {reading.DP: math.prod(sizes)})
    if isinstance(replicas, int) and replicas > 1:
        source.lose("dp_replicate_size", "the runtime shards over all of dp, not within groups of it")
    elif isinstance(replicas, int):
        source.use(["dp_replicate_size"], reading.DP)


AXOLOTL_IMPORTER = Importer(
    tool="axolotl",
    options=options,
    defaults=lambda: {**_AXOLOTL.all_defaults(), "sequence_len": 512},
    read=_read_axolotl,
    tree=lambda document: with_deepspeed(document, AXOLOTL),
)

# LLaMA-Factory, and `TrainingArguments` that are given as a file.

_LLAMA_FACTORY, _TRAINER = stored_tool("LLaMA-Factory"), stored_tool("transformers' Trainer")


def _read_llama_factory(source: Source, draft: Draft) -> None:
    if source.given.get("stage") in ("pt", "sft"):
        source.ignore("stage", "both train on the next token; your program masks the labels")
    else:
        source.lose("stage", METHOD)
    if source.given.get("finetuning_type") == "full":
        source.ignore("finetuning_type", "all weights are trained")
    # Its patches switch recomputation on unless they are told not to.
    off = source.given.get("disable_gradient_checkpointing") is True
    draft.take(source, ["disable_gradient_checkpointing"], {reading.RECOMPUTE: "none" if off else "full"})
    reader(_LLAMA_FACTORY)(source, draft)


LLAMA_FACTORY_IMPORTER = Importer(
    tool="LLaMA-Factory",
    options=options,
    defaults=lambda: {**_LLAMA_FACTORY.all_defaults(), "cutoff_len": 2048},
    read=_read_llama_factory,
    tree=lambda document: with_deepspeed(document, LLAMA_FACTORY),
)
TRAINER_IMPORTER = Importer(
    tool="transformers",
    options=options,
    defaults=_TRAINER.all_defaults,
    read=reader(_TRAINER),
    tree=lambda document: with_deepspeed(document, TRAINER),
)

# ms-swift: `swift sft`, whose arguments are the Trainer's, and `megatron sft`, whose are Megatron-LM's beside a model.

_SWIFT = stored_tool("ms-swift")
_ZERO: Mapping[str, Any] = {f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)} | {
    f"zero{stage}_offload": {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}
    for stage in (2, 3)
}
"""DeepSpeed configurations that ms-swift has by name, but for values that the Trainer fills in and sizes of buffers."""
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_RANKS = {"nnodes": ("cluster", "nodes"), "nproc_per_node": ("cluster", "gpus_per_node")}
_FSDP = {"fsdp2": 3}


def _tree(document: Document) -> dict[str, Any]:
    tree: dict[str, Any] = dict(document.tree) if isinstance(document.tree, Mapping) else {}
    if isinstance(name := tree.get("deepspeed"), str) and name in _ZERO:
        return {**tree, "deepspeed": _ZERO[name]}
    return with_deepspeed(document, SWIFT)


def _options(tree: Mapping[str, Any]) -> dict[str, Any]:
    found = {_RENAMED.get(name, name): value for name, value in options(tree).items()}
    for name, variable in (("nproc_per_node", "ENV.NPROC_PER_NODE"), ("nnodes", "ENV.NNODES")):
        if variable in found:
            found[name] = found.pop(variable)
    return {"tuner_type": "lora", **found}


_RENAMED = {"train_type": "tuner_type", "sft_type": "tuner_type"}


def _read_common(source: Source, draft: Draft) -> None:
    """What both programs have: how they are started, the method, the type of the weights."""
    for name, path in _RANKS.items():
        draft.carry(source, name, path, integer)
    if source.given.get("command", "sft") in ("sft", "pt"):
        source.ignore("command", "both train on the next token; your program masks the labels")
    else:
        source.lose("command", METHOD, changes=True)
    if source.given["tuner_type"] == "full":
        source.ignore("tuner_type", "all weights are trained")
    else:
        source.lose("tuner_type", ADAPTER, changes=True)
    switched = [name for name in ("bf16", "fp16") if source.given.get(name) is True]
    kind = _PRECISIONS.get(str(source.given.get("torch_dtype")))
    draft.values.pop(reading.PRECISION, None)
    if switched or kind:
        draft.set(reading.PRECISION, switched[0] if switched else kind, said=True)
    else:
        draft.ask(reading.PRECISION, "ms-swift takes it from the model's config.json")
    source.use((*switched, *(["torch_dtype"] if kind else [])), reading.PRECISION)


def _rate(source: Source, draft: Draft, name: str) -> None:
    """ms-swift's own rate where none is given (`_init_override`)."""
    if not source.has(name):
        draft.set(("training", "optimizer", "lr"), 1e-5 if source.given["tuner_type"] == "full" else 1e-4, said=True)


def _read(source: Source, draft: Draft) -> None:
    reader(_SWIFT)(source, draft)
    if not source.has("gradient_accumulation_steps"):
        why = "ms-swift takes 16 sequences / per_device_train_batch_size / ranks"
        draft.ask(("training", "gradient_accumulation_steps"), why)
    if source.has("fsdp") and word(source.given["fsdp"], "fsdp") in _FSDP:
        draft.carry(source, "fsdp", reading.STAGE, lambda value, _name: _FSDP[value])
    _rate(source, draft, "learning_rate")
    _read_common(source, draft)


SWIFT_IMPORTER = Importer(tool="ms-swift", options=_options, defaults=_SWIFT.all_defaults, read=_read, tree=_tree)
"""Reads YAML, scripts and args.json of `swift sft`."""

_OF_MEGATRON: Mapping[str, str] = MEGATRON_SWIFT["names"]
"""What it calls options of Megatron-LM; its loss_scale are weights of tokens, that of Megatron-LM scales fp16."""


def _megatron_options(tree: Mapping[str, Any]) -> dict[str, Any]:
    found = {_OF_MEGATRON.get(name, name): value for name, value in _options(flattened(tree, ())).items()}
    return {name: typed(name, value) for name, value in found.items() if value != "none"}


def _read_megatron(source: Source, draft: Draft) -> None:
    read_model("model", source, draft)
    if not source.has("train_iters"):
        answered = draft.answers.get(reading.STEPS)
        source.given["train_iters"] = answered or Undecided("", "the number of samples")
    read_megatron(source, draft)
    _rate(source, draft, "lr")
    _read_common(source, draft)
    # Gradients of bf16 weights are summed in fp32 (`_init_mixed_precision`).
    draft.set(reading.SUMS, "fp32", said=True)
    for name in list(source.unread()):
        if (why := _SWIFT.reason(name)) is not None:
            source.lose(name, why, changes=why in CHANGING and bool(source.given[name]))
    settle(source)


MEGATRON_SWIFT_IMPORTER = Importer(
    tool="Megatron-SWIFT",
    options=_megatron_options,
    defaults=lambda: MEGATRON_SWIFT["defaults"],
    read=_read_megatron,
)
"""Reads YAML, scripts and args.json of `megatron sft`."""
