"""Megatron-LM arguments on their own: layers over pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.layout.stages import PipelineSplit

from .f_megatron_layout import ARGUMENTS, BASE, PP
from .file_registry import MEGATRON, Settings, file_rule
from .megatron_settings import also, flag, is_nvidias, size, where_decided
from .registry import Finding


@file_rule(
    "F104",
    MEGATRON,
    "the layers do not divide into stages",
    """num_layers is a multiple of pp, unless embedding and loss are counted as layers, or the first and last stage get
    numbers of their own; then what is left divides over the other stages.""",
    wrong={**BASE, PP: 16, "num_layers": 126},
    right={
        **BASE,
        PP: 16,
        "num_layers": 126,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    },
    sources=(*ARGUMENTS, "Megatron-LM#1304"),
)
@where_decided
def layers_divide(settings: Settings) -> Iterator[Finding]:
    """Fires when the layers that are left over do not divide."""
    layers = size(settings, "num_layers", 0)
    if not layers or settings.tree.get("pipeline_model_parallel_layout") or not _counts_layers(settings):
        return
    try:
        _split(settings).counts(layers)
    except ValueError as error:
        yield Finding(str(error), (PP,), related=also(settings, "num_layers", *_ENDS))


def _counts_layers(settings: Settings) -> bool:
    """Whether every stage gets equally many: DeepSpeed's pipeline engine in forks balances whatever there is."""
    return is_nvidias(settings) or flag(settings, "no_pipeline_parallel")


_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


def _split(settings: Settings, virtual: int = 1) -> PipelineSplit:
    first, last = (settings.number(name) for name in _ENDS)
    return PipelineSplit(
        size(settings, PP),
        virtual,
        embedding=flag(settings, "account_for_embedding_in_pipeline_split"),
        loss=flag(settings, "account_for_loss_in_pipeline_split"),
        first=None if first is None else int(first),
        last=None if last is None else int(last),
    )


@file_rule(
    "F105",
    MEGATRON,
    "virtual stages do not fit",
    """Interleaving needs pp > 1 (pp > 2 without overlap_p2p_communication), one of its two options, and layers of a
    stage that divide into virtual stages.""",
    wrong={**BASE, "num_layers_per_virtual_pipeline_stage": 5},
    right={**BASE, "num_layers_per_virtual_pipeline_stage": 4},
    sources=ARGUMENTS,
)
@where_decided
def virtual_stages_fit(settings: Settings) -> Iterator[Finding]:
    """Fires for each of the three."""
    each, virtual = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
    given = [name for name in (each, virtual) if settings.number(name)]
    if not given:
        return
    if len(given) == 2:
        yield Finding(f"{each} and {virtual} exclude each other", (virtual,), related=also(settings, each))
    pp = size(settings, PP)
    least = 3 if settings.get("no_overlap_p2p_communication") is True else 2
    stages, problem = _virtual(settings, given[0])
    if stages > 1 and pp < least:
        yield Finding(f"{given[0]} with {PP} {pp}: it needs {least} or more", (given[0],), related=also(settings, PP))
    elif problem:
        yield Finding(problem, (given[0],), related=also(settings, "num_layers", PP, *_ENDS))


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
