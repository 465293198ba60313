"""Megatron-LM arguments on their own: the layout, and training. The names are those of flags, with underscores.

Most of it stands in `rules.json`; here is what its expressions read, and the rules that divide ranks and layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from parcompile.backends.kinds import MEGATRON
from parcompile.layout.pipeline import PipelineSplit
from parcompile.lint.registry import Settings, file_rule
from parcompile.lint.stored import register
from parcompile.rules import Finding

from . import also, fits, flag, is_nvidias, is_open, size, trains

_TP, _PP, _CP, _EP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
_ETP = "expert_tensor_parallel_size"


def _world(settings: Settings) -> int | None:
    """The world size when the file says it: torchrun's nodes and processes, or world_size."""
    if settings.number("world_size"):
        return size(settings, "world_size")
    if settings.number("nproc_per_node"):
        nodes = settings.get("nnodes", default=1)
        return size(settings, "nproc_per_node") * nodes if isinstance(nodes, int) else None
    return None


def _model_ranks(settings: Settings) -> int:
    return size(settings, _TP) * size(settings, _PP) * size(settings, _CP)


def _dp(settings: Settings) -> int:
    world, ranks = _world(settings), _model_ranks(settings)
    return world // ranks if world and world % ranks == 0 else 1


def _parts_of_sequence(settings: Settings) -> int:
    """In so many parts each rank of cp cuts its own of a sequence."""
    tp = size(settings, _TP) if settings.get("sequence_parallel") is True else 1
    return math.lcm(2 if size(settings, _CP) > 1 else 1, tp)


def _product_of_sizes(settings: Settings) -> int | None:
    sizes = settings.get("hierarchical_context_parallel_sizes")
    is_read = isinstance(sizes, list) and sizes and all(isinstance(one, int) for one in sizes)
    return math.prod(sizes) if is_read else None


def _kinds_of_cp(settings: Settings) -> list[Any]:
    kinds = settings.get("cp_comm_type")
    return kinds if isinstance(kinds, list) else [kinds]


def _had_biases(settings: Settings) -> bool:
    """The dispatcher "allgather", and experts one by one, had biases before core_v0.13.0."""
    has_other = settings.tree.get("moe_token_dispatcher_type", "allgather") != "allgather"
    return not has_other and not settings.tree.get("moe_grouped_gemm") and fits(settings, "core_v0.12.0")


def _one(settings: Settings, name: str) -> Any:
    """A list of one value as that value."""
    kinds = settings.get(name)
    return kinds[0] if isinstance(kinds, list) and len(kinds) == 1 else kinds


_FACTS: Mapping[str, Callable[..., Any]] = {
    "tp": lambda settings: size(settings, _TP),
    "cp": lambda settings: size(settings, _CP),
    "ep": lambda settings: size(settings, _EP),
    "dp": _dp,
    "tp_of_experts": lambda settings: size(settings, _TP if settings.left_out(_ETP) else _ETP),
    "parts_of_sequence": _parts_of_sequence,
    "product_of_sizes": _product_of_sizes,
    "kinds_of_cp": _kinds_of_cp,
    "had_biases": _had_biases,
    "recomputed": lambda settings: (  # what comes last counts
        "selective" if settings.get("recompute_activations") is True else settings.get("recompute_granularity")
    ),
    "is_open": is_open,
    "is_nvidias": is_nvidias,
    "trains": trains,
    "flag.": flag,
    "size.": lambda settings, name: size(settings, name, 0),
    "count.": size,
    "one.": _one,
}
register(__package__, MEGATRON, _FACTS)


@file_rule("F101", MEGATRON)
def axes_divide_the_world(settings: Settings) -> Iterator[Finding]:
    """Fires when the world is known and not a multiple."""
    world, ranks = _world(settings), _model_ranks(settings)
    if world and world % ranks:
        names = [name for name in (_TP, _PP, _CP) if size(settings, name) > 1]
        terms = " · ".join(f"{name} {size(settings, name)}" for name in names)
        message = f"world size {world} / ({terms}) = {world} / {ranks} is not whole"
        yield Finding(message, (names[0],), related=also(settings, "nnodes", "nproc_per_node", *names[1:]))


@file_rule("F104", MEGATRON)
def layers_divide(settings: Settings) -> Iterator[Finding]:
    """Fires when the layers that are left over do not divide."""
    layers = size(settings, "num_layers", 0)
    if not layers or settings.tree.get("pipeline_model_parallel_layout") or not _counts_layers(settings):
        return
    try:
        _split(settings).counts(layers)
    except ValueError as error:
        yield Finding(str(error), (_PP,), related=also(settings, "num_layers", *_ENDS))


def _counts_layers(settings: Settings) -> bool:
    """Whether every stage gets equally many: DeepSpeed's pipeline engine in forks balances whatever there is."""
    return is_nvidias(settings) or flag(settings, "no_pipeline_parallel")


_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


def _split(settings: Settings, virtual: int = 1) -> PipelineSplit:
    first, last = (settings.number(name) for name in _ENDS)
    return PipelineSplit(
        size(settings, _PP),
        virtual,
        embedding=flag(settings, "account_for_embedding_in_pipeline_split"),
        loss=flag(settings, "account_for_loss_in_pipeline_split"),
        first=None if first is None else int(first),
        last=None if last is None else int(last),
    )


@file_rule("F105", MEGATRON)
def virtual_stages_fit(settings: Settings) -> Iterator[Finding]:
    """Fires for each of the three."""
    each, virtual = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
    given = [name for name in (each, virtual) if settings.number(name)]
    if not given:
        return
    if len(given) == 2:
        yield Finding(f"{each} and {virtual} exclude each other", (virtual,), related=also(settings, each))
    pp = size(settings, _PP)
    least = 3 if settings.get("no_overlap_p2p_communication") is True else 2
    stages, problem = _virtual(settings, given[0])
    if stages > 1 and pp < least:
        yield Finding(f"{given[0]} with {_PP} {pp}: it needs {least} or more", (given[0],), related=also(settings, _PP))
    elif problem:
        yield Finding(problem, (given[0],), related=also(settings, "num_layers", _PP, *_ENDS))


def _virtual(settings: Settings, name: str) -> tuple[int, str]:
    """Virtual stages of a rank, as validate_args counts them, and why the layers do not divide into them."""
    layers, split = size(settings, "num_layers", 0), _split(settings)
    if name == "num_virtual_stages_per_pipeline_rank":
        virtual = size(settings, name)
        return virtual, _indivisible(_split(settings, virtual), layers)
    if split.first is not None or split.last is not None:
        return 2, "layers of the first or last stage are given: that needs num_virtual_stages_per_pipeline_rank"
    share, rest = divmod(layers + split.embedding + split.loss, split.pp)
    if not layers or rest:
        return 1, ""  # F104 says it
    if share % size(settings, name):
        return 2, f"{share} layers of a stage / {name} {size(settings, name)} is not whole"
    return share // size(settings, name), ""


def _indivisible(split: PipelineSplit, layers: int) -> str:
    try:
        PipelineSplit(split.pp, 1, split.embedding, split.loss, split.first, split.last).counts(layers)
    except ValueError:
        return ""  # F104 says it
    try:
        split.counts(layers)
    except ValueError as error:
        return str(error)
    return ""
