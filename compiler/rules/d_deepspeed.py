"""The further DeepSpeed keys of a spec: nothing in them may fight the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from parcompile.backends.deepspeed.facts import DECIDED_BY, FORBIDDEN, FORBIDDEN_ZERO, refusal
from parcompile.diagnostics import Edit, Fix, Path, Related, Safety
from parcompile.spec.resolve import Resolution

from .places import also
from .registry import Finding, rule

_STAGE_3 = frozenset({"offload_param", "zero_hpz_partition_size", "zero_quantized_gradients", "mics_shard_size"})
"""Those that DeepSpeed ignores below stage 3: there they only have no effect (Z003)."""


@rule(
    "D003",
    "a DeepSpeed key fights the plan",
    """The plan decides batch sizes, precision, optimizer, clipping and groups: set them in their own sections of the
    spec. Other keys are refused because they replace the plan's groups or make its checkpoints unusable.""",
    wrong={"deepspeed": {"train_batch_size": 32}},
    right={"training": {"global_batch_size": 32}},
    sources=("DeepSpeed runtime/config.py, utils/groups.py; DeepSpeed#6868",),
    targets=("deepspeed",),
)
def deepspeed_keys_do_not_fight(spec: Resolution) -> Iterator[Finding]:
    """Fires for every such key."""
    given = spec.get("deepspeed")
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
    zero = spec.get("deepspeed", "zero_optimization")
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
                '"auto" would be passed to DeepSpeed unchanged',
                path,
                help="write a value, or remove the key",
                fixes=(Fix(f"remove {path[-1]}", Safety.CHANGES_COST, (Edit(path, remove=True),)),),
            )
        elif isinstance(node, Mapping):
            for key, value in node.items():
                if refusal((*path[1:], key)) is None:
                    yield from search(value, (*path, key))
        elif isinstance(node, list):
            for index, value in enumerate(node):
                yield from search(value, (*path, index))

    yield from search(spec.get("deepspeed"), ("deepspeed",))


def _refused(path: Path, message: str, hint: str, related: tuple[Related, ...] = ()) -> Finding:
    fixes = (Fix(f"remove {path[-1]}", Safety.CHANGES_COST, (Edit(path, remove=True),)),)
    return Finding(message, path, help=hint, fixes=fixes, related=related)
