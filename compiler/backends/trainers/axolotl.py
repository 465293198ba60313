"""Axolotl's YAML. Source: axolotl at 2026-07-24, `utils/schemas/` and `core/builders/base.py`."""

from __future__ import annotations

from parcompile.backends.kinds import AXOLOTL
from parcompile.backends.reading import Draft, Importer, Source

from . import options, stored_tool
from .read import reader, with_deepspeed

TOOL = stored_tool("axolotl")


def read(source: Source, draft: Draft) -> None:
    """What a spec has a place for."""
    _sharding(source, draft)
    _ring(source, draft)
    if source.given.get("batch_size") is not None:
        source.lose("batch_size", "write gradient_accumulation_steps, which is batch_size / micro_batch_size")
    source.ignore("parcompile.plan", "the plan that the plug-in trains by")
    for name in source.given:
        if name.partition(".")[0] == "parcompile" and name != "parcompile.plan":
            source.lose(name, "the plug-in refuses it: the section has one key, plan")
    reader(TOOL)(source, draft)


def _sharding(source: Source, draft: Draft) -> None:
    """FSDP is ZeRO: it shards weights as stage 3 does, and as stage 2 where weights stay gathered after the forward."""
    fsdp = [name for name in source.given if name == "fsdp" or name.startswith(("fsdp_config", "fsdp_version"))]
    if any(source.given[name] for name in fsdp):
        stays = source.given.get("fsdp_config.reshard_after_forward") is False
        draft.set(("zero", "stage"), 2 if stays else 3, said=True)
        for name in fsdp:
            if name in ("fsdp", "fsdp_version", "fsdp_config.reshard_after_forward", "fsdp_config.fsdp_version"):
                source.used[name] = {("zero", "stage")}
            else:
                source.lose(name, "FSDP's own: ZeRO has no such setting")
    shards, replicas = (source.given.get(name) for name in ("dp_shard_size", "dp_replicate_size"))
    sizes = [one for one in (shards, replicas) if isinstance(one, int)]
    if isinstance(shards, int):
        dp = 1
        for size in sizes:
            dp *= size
        draft.set(("parallelism", "dp"), dp, said=True)
        source.used["dp_shard_size"] = {("parallelism", "dp")}
    if isinstance(replicas, int) and replicas > 1:
        source.lose("dp_replicate_size", "the runtime shards over all of dp, not within groups of it")
    elif isinstance(replicas, int):
        source.used["dp_replicate_size"] = {("parallelism", "dp")}


def _ring(source: Source, draft: Draft) -> None:
    kind = source.given.get("ring_attn_func")
    if kind is None:
        return
    found = {"varlen_llama3": "all_gather", "batch_ring": "ring", "batch_zigzag": "ring", "batch_stripe": "ring"}
    layouts = {"batch_ring": "contiguous", "batch_zigzag": "zigzag", "batch_stripe": "striped"}
    if isinstance(kind, str) and kind in found:
        draft.set(("parallelism", "cp_implementation"), found[kind], said=True)
        if kind in layouts:
            draft.set(("parallelism", "cp_layout"), layouts[kind], said=True)
        source.used["ring_attn_func"] = {("parallelism", "cp_implementation")}


IMPORTER = Importer(
    tool="axolotl",
    options=options,
    defaults=lambda: {**TOOL.all_defaults(), "sequence_len": 512},
    read=read,
    tree=lambda document: with_deepspeed(document, AXOLOTL),
)
