"""What a rank holds fits into its accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from parcompile.cost.memory import static_memory
from parcompile.layout.tensor import SplitError
from parcompile.resolve import Resolution, Unavailable

from .places import also, model_path
from .registry import Finding, rule

_MIB = 1024**2
DEVICE_BYTES = MappingProxyType(
    {
        "a100-40gb": 40_960 * _MIB,
        "a100-80gb": 81_920 * _MIB,
        "h100-sxm": 81_559 * _MIB,
        "h100-pcie": 81_559 * _MIB,
        "h200": 143_771 * _MIB,
        "b200": 183_359 * _MIB,
        "mi300x": 196_592 * _MIB,
        "l40s": 46_068 * _MIB,
    }
)
"""Memory of a device as nvidia-smi and rocm-smi report it; what the driver and the libraries take comes off that."""


@rule(
    "H001",
    "weights, gradients and optimizer do not fit",
    """What is held for the whole run (weights, gradients, fp32 master weights, optimizer state, the reduce bucket)
    has to be smaller than the accelerator's memory; activations come on top. Counted for ZeRO stage 0 and 1, where it
    is exact.""",
    wrong={"model": {"preset": "llama-3-70b"}},
    right={"model": {"preset": "llama-3-70b"}, "parallelism": {"tp": 8}, "cluster": {"nodes": 8}},
    sources=("DeepSpeed runtime/zero/stage_1_and_2.py",),
)
def static_memory_fits(spec: Resolution) -> Iterator[Finding]:
    """Fires when the static bytes of the fullest rank exceed the device's memory."""
    device, stage = DEVICE_BYTES.get(spec.cluster.accelerator), spec.zero_stage
    if device is None or stage > 1 or spec.shape.num_attention_heads % spec.axis("tp"):
        return
    try:
        memory = static_memory(spec.spec())
    except (SplitError, ValueError):
        # The layout cannot be cut as written, which other rules say.
        raise Unavailable("memory") from None
    parts = {
        "weights": memory.weight_bytes,
        "gradients": memory.gradient_bytes,
        "fp32 master weights": memory.master_bytes,
        "optimizer state": memory.optimizer_bytes,
        "reduce bucket": memory.bucket_bytes,
    }
    if memory.total_bytes <= device:
        return
    largest = max(parts, key=lambda name: parts[name])
    terms = " + ".join(f"{name} {_gib(size)}" for name, size in parts.items())
    shards = spec.axis("dp") * spec.axis("cp")
    yield Finding(
        f"{terms} = {_gib(memory.total_bytes)} GiB > {_gib(device)} GiB of {spec.cluster.accelerator}, without "
        f"activations; the largest part is {largest}",
        model_path(spec, "hidden_size"),
        help=f"tp {spec.axis('tp')} and pp {spec.axis('pp')} divide all of it; dp · cp {shards} divides the fp32 "
        "master weights and the optimizer state, at ZeRO stage 1",
        related=also(spec, ("cluster", "accelerator"), ("parallelism", "tp"), ("parallelism", "pp"), ("zero", "stage")),
    )


def _gib(size: int) -> str:
    return f"{size / 1024**3:.1f}"
