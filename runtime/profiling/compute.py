"""Rates of one rank on its own device: matrix products, fused attention, memory, and how fast kernels are launched."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

MATMUL_SIZES = (256, 512, 1024, 2048, 4096, 8192)
FEWEST_SIZES = 2
BATCH_SECONDS = 0.005
"""Calls are timed in batches at least this long: below it the clock and the wait for the device show."""


@dataclass(frozen=True, slots=True)
class Rate:
    """One measurement: what ran, in which type, of which size (rows or bytes), and what it reached each second."""

    what: str
    dtype: str
    size: int
    seconds: float
    per_second: float


def compute_rates(device: torch.device, seconds: float) -> list[Rate]:
    """Everything that one rank measures by itself, in about that many seconds.

    Raises:
        RuntimeError: the device is too small or too slow for what is measured.
    """
    share = seconds / 6
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        found += matmul_rates(device, dtype, 2 * share)
    found.append(memory_rate(device, share / 2))
    found.append(attention_rate(device, share))
    found.append(layer_rate(device, share / 2))
    return found


def matmul_rates(device: torch.device, dtype: torch.dtype, seconds: float) -> list[Rate]:
    """Square products [n, n] · [n, n] by size, 2 n³ operations each; sizes end where one would take too long."""
    found: list[Rate] = []
    share = seconds / len(MATMUL_SIZES)
    for size in MATMUL_SIZES:
        if len(found) >= FEWEST_SIZES and 8 * found[-1].seconds > share:
            break
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        once = seconds_of_a_call(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device, share)  # type: ignore[misc]
        found.append(Rate("matmul", _name(dtype), size, once, 2 * size**3 / once))
    return found


def memory_rate(device: torch.device, seconds: float) -> Rate:
    """Sum of two arrays far larger than a cache: two are read, one is written."""
    elements = (256 if device.type != "cpu" else 32) * 2**20
    a, b = (torch.ones(elements, device=device) for _ in range(2))
    out = torch.empty_like(a)
    once = seconds_of_a_call(lambda: torch.add(a, b, out=out), device, seconds)
    return Rate("memory", "fp32", 3 * a.nbytes, once, 3 * a.nbytes / once)


def attention_rate(device: torch.device, seconds: float) -> Rate:
    """Causal attention, forward and backward; as `cost.flops` counts it, where the mask halves the keys."""
    heads, length, width = (16, 4096, 128) if device.type != "cpu" else (4, 512, 128)
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    q, k, v = (torch.randn(1, heads, length, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn(1, heads, length, width, device=device, dtype=dtype)

    def step() -> None:
        torch.autograd.backward(F.scaled_dot_product_attention(q, k, v, is_causal=True), gradient)

    once = seconds_of_a_call(step, device, seconds)
    return Rate("attention", _name(dtype), length, once, 3 * 2 * heads * width * length**2 / once)


def layer_rate(device: torch.device, seconds: float) -> Rate:
    """A decoder layer of almost no work, forward and backward: what is left is the time to launch its kernels."""
    width, tokens = 16, 8
    weights = [torch.randn(width, width, device=device, requires_grad=True) for _ in range(7)]
    scales = [torch.ones(width, device=device, requires_grad=True) for _ in range(2)]
    x, turn = torch.randn(1, tokens, width, device=device), torch.randn(tokens, width, device=device)

    def rotated(t: Tensor) -> Tensor:
        first, second = t.chunk(2, dim=-1)
        return (t * turn + torch.cat((-second, first), dim=-1) * turn).unsqueeze(1)

    def layer() -> None:
        query, key, value, out, gate, up, down = weights
        normed = F.rms_norm(x, (width,), scales[0])
        mixed = F.scaled_dot_product_attention(
            rotated(normed @ query), rotated(normed @ key), (normed @ value).unsqueeze(1), is_causal=True
        )
        stream = x + mixed.squeeze(1) @ out
        normed = F.rms_norm(stream, (width,), scales[1])
        torch.autograd.backward((stream + (F.silu(normed @ gate) * (normed @ up)) @ down).sum())

    once = seconds_of_a_call(layer, device, seconds)
    return Rate("layer launch", "fp32", tokens, once, 1 / once)


def seconds_of_a_call(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The median over batches of calls, after two that warm up; about `seconds` are spent."""
    call()
    once = max(_batch(call, device, 1), 1e-9)
    calls = max(1, int(BATCH_SECONDS / once))
    end = time.perf_counter() + seconds
    found = [_batch(call, device, calls) for _ in range(3)]
    while time.perf_counter() < end:
        found.append(_batch(call, device, calls))
    return statistics.median(found)


def _batch(call: Callable[[], object], device: torch.device, calls: int) -> float:
    synchronize(device)
    started = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - started) / calls


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
