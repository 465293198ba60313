"""Activation checkpointing: what is recomputed, and by whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.layout.groups import Axis
from parcompile.spec.resolve import Resolution

from .arithmetic import also
from .registry import Finding, rule

_PATH = ("training", "activation_checkpointing")
_VIRTUAL = ("parallelism", "num_virtual_stages_per_pipeline_rank")
_PP = ("parallelism", "pp")
_FP32_SUMS = {"gradient_accumulation_dtype": "fp32"}


@rule(
    "R001",
    "selective checkpointing recomputes nothing more than fused attention does",
    """Selective checkpointing drops the matrix of attention scores and recomputes it in the backward pass. The fused
    attention kernels that every target uses never store that matrix, so that nothing is left to drop.""",
    wrong={"training": {"activation_checkpointing": "selective"}},
    right={"training": {"activation_checkpointing": "full"}},
    severity=Severity.INFO,
    sources=("arXiv 2205.05198, section 5", "arXiv 2205.14135"),
)
def selective_recomputes_nothing(spec: Resolution) -> Iterator[Finding]:
    """Fires for selective."""
    given = spec.get(*_PATH)
    if given == "selective" or (isinstance(given, list) and "selective" in given):
        yield Finding(
            "activation_checkpointing selective saves nothing: fused attention never stores the scores",
            _PATH,
            help="full saves memory, for about a third more computation",
        )


@rule(
    "R002",
    "DeepSpeed's activation checkpointing is not used",
    """The section activation_checkpointing of a DeepSpeed config sets up deepspeed.checkpointing, which a model has to
    call itself. The runtime recomputes layers through torch, as training.activation_checkpointing says.""",
    wrong={"deepspeed": {"activation_checkpointing": {"partition_activations": True}}},
    right={"training": {"activation_checkpointing": "full"}},
    severity=Severity.WARNING,
    sources=("DeepSpeed runtime/activation_checkpointing/checkpointing.py",),
    targets=("deepspeed",),
)
def deepspeed_checkpointing_is_unused(spec: Resolution) -> Iterator[Finding]:
    """Fires when the further DeepSpeed keys hold that section."""
    further = spec.get("deepspeed")
    path = ("deepspeed", "activation_checkpointing")
    if isinstance(further, Mapping) and spec.given(*path):
        yield Finding(
            "deepspeed.activation_checkpointing has no effect: training.activation_checkpointing decides",
            path,
            help='remove it, and set "activation_checkpointing": "full" under training',
            fixes=(Fix("remove activation_checkpointing", Safety.SAFE, (Edit(path, remove=True),)),),
        )


@rule(
    "R003",
    "recomputation is not given for each stage",
    """A list in activation_checkpointing has one word for each pipeline stage, the first stage first. In a 1F1B
    schedule the first stages hold activations of more micro-batches than the last, so that it often is enough when
    these recompute. A rank with virtual stages has layers from several places of the model, and takes one word for
    all.""",
    wrong={"parallelism": {"pp": 2}, "training": {**_FP32_SUMS, "activation_checkpointing": ["full", "none", "none"]}},
    right={"parallelism": {"pp": 2}, "training": {**_FP32_SUMS, "activation_checkpointing": ["full", "none"]}},
    sources=("arXiv 2104.04473, section 2.2",),
)
def one_word_for_each_stage(spec: Resolution) -> Iterator[Finding]:
    """Fires when the words are not as many as the stages, and beside virtual stages."""
    given = spec.get(*_PATH)
    if not isinstance(given, list):
        return
    words, pp, virtual = ", ".join(given), spec.axis(Axis.PP), spec.virtual_stages
    most = "full" if "full" in given else given[0]
    fixes = [Fix(f"set activation_checkpointing to {most}", Safety.CHANGES_COST, (Edit(_PATH, most),))]
    if len(given) != pp:
        longer = [*given, *[given[-1]] * (pp - len(given))][:pp]
        if pp > 1:
            fixes.append(Fix(f"one for each of {pp} stages", Safety.CHANGES_COST, (Edit(_PATH, longer),)))
        yield Finding(
            f"activation_checkpointing has {len(given)} words ({words}) for pp {pp}: {len(given)} ≠ {pp}",
            _PATH,
            help=f"write one word for each of {pp} stages, or one word for all" if pp > 1 else "write one word",
            fixes=tuple(fixes),
            related=also(spec, _PP),
        )
    elif virtual > 1:
        yield Finding(
            f"activation_checkpointing ({words}) for each stage with {virtual} virtual stages on each rank: "
            "a rank has layers from several places of the model",
            _PATH,
            help="write one word for all stages, or remove the virtual stages",
            fixes=tuple(fixes),
            related=also(spec, _VIRTUAL),
        )
