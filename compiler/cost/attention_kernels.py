"""Which kernel the runtime's attention takes on the GPUs of a layout, and how much longer the plain one takes.

The plain kernel multiplies in fp32 without TF32 and writes each tile of scores to memory several times: per score
2 (D + E) operations at the rate of fp32 and `PASSES` times 4 bytes at that of memory, where a fused kernel has the
operations at its share of the peak alone. An estimate: no GPU has measured it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from parcompile.machines.attention_kernels import PLAIN, Attention, Choice, choose_kernel
from parcompile.model.shape import ModelShape

from .coefficients import TIME
from .context_exchanges import AttentionSizes
from .flops import attention_flops_per_token
from .workload import Workload

PASSES = 11
"""How often a score is read or written in a forward tile: product, two bounds, log-sum-exp, weights and their use."""
_NAMES = {4: "fp32", 2: "bf16"}


class AttentionKernel(NamedTuple):
    """The kernel of some layers, and its time as a multiple of a fused kernel's."""

    layers: int
    shape: ModelShape
    choice: Choice
    factor: float


def attention_kernels(work: Workload) -> Iterator[AttentionKernel]:
    """For each kind of layers that attends; none on CPUs, in other frameworks, and where nobody knows the device."""
    capability = _capability(work)
    if capability is None or work.framework != "deepspeed":
        return
    for layers, shape in work.shape.by_kind:
        if not layers or not shape.num_attention_heads:
            continue
        choice = choose_kernel(_asked(shape, work), capability)
        yield AttentionKernel(len(layers), shape, choice, _factor(shape, work) if choice.kernel == PLAIN else 1.0)


def attention_factor(work: Workload) -> float:
    """How much longer the attention of all layers takes than with fused kernels."""
    found = list(attention_kernels(work))
    shares = [one.layers * attention_flops_per_token(one.shape, work.attended_length) for one in found]
    weighed = sum(one.factor * share for one, share in zip(found, shares, strict=True))
    return weighed / sum(shares) if sum(shares) else 1.0


def _capability(work: Workload) -> tuple[int, int] | None:
    machine = work.machine
    if machine.vendor == "amd":
        return 8, 0  # ROCm's kernels serve what those do
    if machine.compute_capability is None:
        return None
    major, minor = map(int, machine.compute_capability.split("."))
    return major, minor


def _asked(shape: ModelShape, work: Workload) -> Attention:
    window = shape.attention.sliding_window
    return Attention(
        _NAMES[work.element_bytes],
        *_widths(shape),
        bands=window is not None and window < work.attended_length,
        softcap=shape.caps.scores,
        added=any(part.hides_keys(work.sequence_length) for part in shape.parts),  # a bias hides them
        dropout=shape.caps.dropout,
    )


def _widths(shape: ModelShape) -> tuple[int, int]:
    sizes = AttentionSizes.of(shape, 1, 1, 1)
    return sizes.key_dim, sizes.value_dim


def _factor(shape: ModelShape, work: Workload) -> float:
    machine, operations = work.machine, 2.0 * sum(_widths(shape))
    plain = operations / machine.fp32_flops_per_s + PASSES * 4 / machine.memory_bytes_per_s
    return plain * machine.matmul_flops_per_s(work.element_bytes) * TIME["attention"].start / operations
