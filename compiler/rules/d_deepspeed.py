"""The further DeepSpeed keys of a spec: nothing in them may fight the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from parcompile.diagnostics import Edit, Fix, Path, Related, Safety
from parcompile.spec.resolve import Resolution

from .places import also
from .registry import Finding, rule

DECIDED_BY = {
    "train_batch_size": "training.global_batch_size",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "optimizer": "training.optimizer",
    "gradient_clipping": "training.gradient_clipping",
    "bf16": "training.precision",
    "bfloat16": "training.precision",
    "fp16": "training.precision",
    "amp": "training.precision",
    "torch_autocast": "training.precision",
    "data_types": "training.gradient_accumulation_dtype",
}
"""DeepSpeed keys that the plan writes itself, and where the spec says so."""

FORBIDDEN = {
    "tensor_parallel": "AutoTP installs its own groups and discards the plan's",
    "sequence_parallel_size": "without the plan's groups ZeRO shards over dp only, and sequence ranks diverge",
    "data_parallel_size": "the plan's groups decide it",
    "mesh_param": "without the plan's groups ZeRO shards over dp only, and sequence ranks diverge",
    "elasticity": "elastic training was removed from DeepSpeed, and the plan's world size is fixed",
    "elastic_checkpoint": "its checkpoints cannot be converted to another layout",
    "pipeline": "the plan decides the stages",
}
"""DeepSpeed keys that break a plan, and why."""

FORBIDDEN_ZERO = {
    "stage": "zero.stage decides it",
    "round_robin_gradients": "it writes wrong slice mappings, so that checkpoints cannot be converted",
    "elastic_checkpoint": "its checkpoints cannot be converted to another layout",
    "offload_param": "the plan counts the weights on the accelerator",
    "offload_optimizer": "the plan counts the optimizer state on the accelerator",
    "cpu_offload": "the plan counts the optimizer state on the accelerator",
    "cpu_offload_param": "the plan counts the weights on the accelerator",
    "zero_hpz_partition_size": "the plan's groups decide the shards",
    "zero_quantized_gradients": "it changes the numbers of every step",
    "mics_shard_size": "the plan's groups decide the shards",
}
"""Keys of zero_optimization that break a plan, and why."""

_STAGE_3 = frozenset({"offload_param", "zero_hpz_partition_size", "zero_quantized_gradients", "mics_shard_size"})
"""Those that DeepSpeed ignores below stage 3: there they only have no effect (Z003)."""


def refused(path: Path) -> bool:
    """Whether D003 speaks of a DeepSpeed key, whatever stands under it."""
    if path[0] == "zero_optimization":
        return len(path) > 1 and path[1] in FORBIDDEN_ZERO
    return path[0] in DECIDED_BY or path[0] in FORBIDDEN


@rule(
    "D003",
    "a DeepSpeed key fights the plan",
    """The plan decides batch sizes, precision, optimizer, clipping and groups; each stands at one place in the spec.
    Other keys are refused because they replace the plan's groups or make its checkpoints unusable.""",
    wrong={"deepspeed": {"train_batch_size": 32}},
    right={"training": {"global_batch_size": 32}},
    sources=("DeepSpeed runtime/config.py, utils/groups.py; DeepSpeed#6868",),
    targets=("deepspeed",),
)
def deepspeed_keys_do_not_fight(spec: Resolution) -> Iterator[Finding]:
    """Fires for every such key."""
    given = spec.get("deepspeed", default={})
    for key in given:
        path: Path = ("deepspeed", key)
        if not spec.given("deepspeed", key):
            continue
        if key in DECIDED_BY:
            place = tuple(DECIDED_BY[key].split("."))
            message = f"{key} is decided by {DECIDED_BY[key]}"
            yield _refused(path, message, f"set {DECIDED_BY[key]} instead", also(spec, place))
        elif key in FORBIDDEN:
            yield _refused(path, f"{key}: {FORBIDDEN[key]}", "remove it")
    zero = spec.get("deepspeed", "zero_optimization", default={})
    for key in zero if isinstance(zero, Mapping) else ():
        if (
            key in FORBIDDEN_ZERO
            and spec.given("deepspeed", "zero_optimization", key)
            and not (key in _STAGE_3 and spec.zero_stage < 3)
        ):
            path = ("deepspeed", "zero_optimization", key)
            place = ("zero", "stage")
            related = also(spec, place) if key == "stage" else ()
            yield _refused(path, f"{key}: {FORBIDDEN_ZERO[key]}", "remove it", related)


@rule(
    "D004",
    '"auto" in the DeepSpeed keys',
    """Only Hugging Face's Trainer replaces "auto" in a DeepSpeed config. DeepSpeed itself takes it for a value:
    "stage": "auto" is stage 0.""",
    wrong={"deepspeed": {"zero_optimization": {"reduce_bucket_size": "auto"}}},
    right={"deepspeed": {"zero_optimization": {"reduce_bucket_size": 50000000}}},
    sources=("DeepSpeed#1270; accelerate#3152",),
    targets=("deepspeed",),
)
def no_auto_reaches_deepspeed(spec: Resolution) -> Iterator[Finding]:
    """Fires for every "auto", at any depth, except where another rule refuses the key as such."""

    def search(node: object, path: Path) -> Iterator[Finding]:
        if node == "auto":
            yield Finding(
                '"auto" would reach DeepSpeed as it stands',
                path,
                help="write a value, or remove the key",
                fixes=(Fix(f"remove {path[-1]}", Safety.CHANGES_COST, (Edit(path, remove=True),)),),
            )
        elif isinstance(node, Mapping):
            for key, value in node.items():
                if not refused((*path[1:], key)):
                    yield from search(value, (*path, key))
        elif isinstance(node, list):
            for index, value in enumerate(node):
                yield from search(value, (*path, index))

    yield from search(spec.get("deepspeed", default={}), ("deepspeed",))


def _refused(path: Path, message: str, hint: str, related: tuple[Related, ...] = ()) -> Finding:
    fixes = (Fix(f"remove {path[-1]}", Safety.CHANGES_COST, (Edit(path, remove=True),)),)
    return Finding(message, path, help=hint, fixes=fixes, related=related)
