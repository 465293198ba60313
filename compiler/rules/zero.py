"""ZeRO and what it does not go with."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.resolve import Resolution

from .registry import Finding, rule

_STAGE = ("zero", "stage")


@rule(
    "Z001",
    "ZeRO stage 2 or 3 with pipeline stages",
    """A pipeline stage keeps gradients of several micro-batches and runs its layers on demand; DeepSpeed's pipeline engine refuses to have
    gradients or weights sharded as well.""",
    sources=("DeepSpeed runtime/pipe/engine.py",),
    targets=("deepspeed",),
)
def zero_2_excludes_pipelines(spec: Resolution) -> Iterator[Finding]:
    """Fires for stage ≥ 2 and pp > 1."""
    stage, pp = spec.zero_stage, spec.axis("pp")
    if stage >= 2 and pp > 1:
        yield Finding(f"zero.stage {stage} with pp {pp}", _STAGE, help="use stage 1, or pp 1")


@rule(
    "Z002",
    "ZeRO stage 2 or 3 with a mixture of experts",
    """DeepSpeed shards experts and dense parameters over different groups only at stage 1.""",
    sources=("gpt-neox arguments.py",),
    targets=("deepspeed",),
)
def zero_2_excludes_experts(spec: Resolution) -> Iterator[Finding]:
    """Fires for stage ≥ 2 with experts."""
    if spec.zero_stage >= 2 and spec.shape.has_moe:
        yield Finding(f"zero.stage {spec.zero_stage} with a mixture of experts", _STAGE, help="use stage 1")
