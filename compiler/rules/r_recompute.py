"""Activation checkpointing: what is recomputed, and by whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.spec.resolve import Resolution

from .registry import Finding, rule

_PATH = ("training", "activation_checkpointing")


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
    if spec.get(*_PATH) == "selective":
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
