"""The peers of ring attention's benchmark: rings of others, on the same CPU kernels, with zigzag tokens.

`rings` gives those that are there: torch's private context-parallel engine, which gathers keys and values or exchanges
them, and the zigzag ring of `ring_flash_attn` where it can be imported, with the CPU's kernel in the place of
flash_attn.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp

Method = Callable[[Tensor, Tensor, Tensor], Tensor]


def rings() -> dict[str, Method]:
    """By name, functions of the local query, key and value [1, heads, tokens of the rank, D]."""
    found = {
        "torch all-gather": _torch_ring(torch_cp._RotateMethod.ALL_GATHER),
        "torch all-to-all": _torch_ring(torch_cp._RotateMethod.ALL_TO_ALL),
    }
    peer = _ring_flash_attn()
    return found if peer is None else {**found, "ring-flash-attn": peer}


class _TorchRing(torch.autograd.Function):
    """torch's templated ring attention around the CPU's flash attention."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, lse, *_ = torch_cp._templated_ring_attention(
            dist.group.WORLD,
            2,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
            query,
            key,
            value,
            is_causal=True,
        )
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        return torch_cp._templated_ring_attention_backward(
            dist.group.WORLD,
            2,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            grad_out=grad.contiguous(),
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=lse,
            is_causal=True,
            dropout_p=0.0,
        )[:3]


def _torch_ring(rotation: torch_cp._RotateMethod) -> Method:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        torch_cp._cp_options.rotate_method = rotation
        return _TorchRing.apply(query, key, value)

    return attend


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, **_: Any
) -> tuple[Tensor, Tensor, None, None]:
    """The function of flash_attn, on the CPU's kernel; the ring passes all arguments by name."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, scale=softmax_scale
    )
    return out.transpose(1, 2), lse, None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    softmax_scale: float,
    causal: bool,
    **_: Any,
) -> None:
    """The function of flash_attn, on the CPU's kernel; the ring passes all arguments by name."""
    tensors = (tensor.transpose(1, 2) for tensor in (dout, q, k, v, out))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, softmax_lse, 0.0, causal, scale=softmax_scale
    )
    for target, grad in zip((dq, dk, dv), grads, strict=True):
        target.copy_(grad.transpose(1, 2))


@functools.cache
def _ring_flash_attn() -> Method | None:
    """The peer, if it can be imported."""
    found = importlib.util.find_spec("ring_flash_attn")
    if found is None:
        return None
    package, functions = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    functions._flash_attn_forward = _flash_attn_forward
    functions._flash_attn_backward = _flash_attn_backward
    functions._flash_attn_varlen_forward = functions._flash_attn_varlen_backward = None
    package.flash_attn_interface = functions
    # Its module alone: the package also imports adapters that not every version of transformers bears.
    bare = types.ModuleType("ring_flash_attn")
    bare.__path__ = list(found.submodule_search_locations or ())
    sys.modules.update({"ring_flash_attn": bare, "flash_attn": package, functions.__name__: functions})
    zigzag = importlib.import_module("ring_flash_attn.zigzag_ring_flash_attn")

    def attend(*qkv: Tensor) -> Tensor:
        token_major = (tensor.transpose(1, 2) for tensor in qkv)
        return zigzag.zigzag_ring_flash_attn_func(*token_major, causal=True).transpose(1, 2)

    return attend
