"""FlashAttention's windows say the same as the ring's bands. The CUDA functions themselves are stood in for."""

from __future__ import annotations

import math
import typing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from closeness import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parcompile.runtime.ring_attention.kernels import CAUSAL, Band, Tile, packs, selection
from parcompile.runtime.ring_attention.kernels.kernel import Gradients, Kernel, Queries
from parcompile.runtime.ring_attention.kernels.plain import PlainKernel
from parcompile.runtime.ring_attention.kernels.selection import (
    CudaFlashKernel,
    FlashAttn3Kernel,
    FlashAttnKernel,
    installed_flash_attn,
    installed_flash_attn_3,
    select_kernel,
)


def _weights(
    query: Tensor, key: Tensor, scale: float, causal: bool, left: int, right: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """Scores [B, H, Q, S] from [B, Q, H, D] as FlashAttention-2 defines them, and the slopes of soft-capping."""
    share = query.shape[2] // key.shape[2]
    scores = query.transpose(1, 2) @ key.repeat_interleave(share, 2).transpose(1, 2).mT * scale
    slopes = torch.ones_like(scores)
    if softcap:
        slopes = 1 - torch.tanh(scores / softcap).square()
        scores = softcap * torch.tanh(scores / softcap)
    rows, columns = scores.shape[-2:]
    distance = torch.arange(columns) - torch.arange(rows).unsqueeze(-1) - (columns - rows)
    if causal:
        right = 0
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return scores.masked_fill(hidden, -math.inf), slopes


def _forward(query: Tensor, key: Tensor, value: Tensor, scale: float, *window: Any) -> tuple[Tensor, Tensor]:
    scores, _ = _weights(query, key, scale, *window)
    value = value.repeat_interleave(query.shape[2] // value.shape[2], 2).transpose(1, 2)
    return (scores.softmax(-1) @ value).transpose(1, 2), scores.logsumexp(-1)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float, *window: Any
) -> tuple[Tensor, Tensor, Tensor]:
    scores, slopes = _weights(query, key, scale, *window)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    share = query.shape[2] // key.shape[2]
    keys, values = (tensor.repeat_interleave(share, 2).transpose(1, 2) for tensor in (key, value))
    grad, query, out = (tensor.transpose(1, 2) for tensor in (grad, query, out))
    grad_scores = weights * (grad @ values.mT - (grad * out).sum(-1, keepdim=True)) * scale * slopes

    def shared(of_heads: Tensor) -> Tensor:
        return of_heads.unflatten(1, (-1, share)).sum(2).transpose(1, 2)

    return (grad_scores @ keys).transpose(1, 2), shared(grad_scores.mT @ query), shared(weights.mT @ grad)


def _written(targets: tuple[Tensor | None, ...], tensors: tuple[Tensor, ...], scale: float, *window: Any) -> Tensor:
    """Puts the gradients where the packages put theirs."""
    dout, q, k, v, out, lse = tensors
    for target, grad in zip(targets, _backward(dout, q, k, v, out, lse, scale, *window), strict=True):
        assert target is not None
        assert target.is_contiguous()
        target.copy_(grad)
    return lse


def _package_forward(  # The arguments of flash_attn 2.7.
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:
    out, lse = _forward(q, k, v, softmax_scale, causal, window_size_left, window_size_right, softcap)
    return out, lse, None, None


def _package_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    window = causal, window_size_left, window_size_right, softcap
    return _written((dq, dk, dv), (dout, q, k, v, out, softmax_lse), softmax_scale, *window)


def _torch_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_q: None,
    cum_k: None,
    max_q: int,
    max_k: int,
    *rest: Any,
    **named: Any,
) -> tuple[Any, ...]:
    dropout, causal, debug = rest
    assert (max_q, max_k, dropout, debug) == (query.shape[1], key.shape[1], 0.0, False)
    window = causal, named["window_size_left"], named["window_size_right"], 0.0
    return (*_forward(query, key, value, named["scale"], *window), None, None, None)


def _torch_backward(*tensors: Any, scale: float, window_size_left: int, window_size_right: int) -> tuple[Tensor, ...]:
    *inputs, _, _, max_q, max_k, dropout, causal, _, _ = tensors
    assert (max_q, max_k, dropout) == (inputs[1].shape[1], inputs[2].shape[1], 0.0)
    return _backward(*inputs, scale, causal, window_size_left, window_size_right, 0.0)


PACKAGE = SimpleNamespace(
    _flash_attn_forward=_package_forward,
    _flash_attn_backward=_package_backward,
    _flash_attn_varlen_backward=None,
)


def _third_forward(  # The arguments of FlashAttention-3, of 2026, that are not for inference.
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert softmax_scale is not None
    out, lse = _forward(q, k, v, softmax_scale, causal, window_size_left, window_size_right, softcap)
    return out, lse, out.new_empty(0), out.new_empty(0)


def _third_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    assert softmax_scale is not None
    window = is_causal, window_size_left, window_size_right, softcap
    return _written((dq, dk, dv), (dout, q, k, v, out, softmax_lse), softmax_scale, *window)


THIRD = SimpleNamespace(_flash_attn_forward=_third_forward, _flash_attn_backward=_third_backward)
TORCH = SimpleNamespace(_flash_attention_forward=_torch_forward, _flash_attention_backward=_torch_backward)


def _gradients(kernel: Kernel, read: Queries, key: Tensor, value: Tensor, band: Band) -> tuple[Tensor, ...]:
    """Of query, key and value."""
    into = Gradients(*map(torch.zeros_like, (read.query, key, value)))
    kernel.backward(read, key, value, band=band, terms=None, into=into)
    return into.query, into.key, into.value


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.none() | st.integers(-20, 20), st.none() | st.integers(-20, 20))
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_every_trimmed_tile_is_a_window_of_flash_attention(
    softcap: float | None, rows: int, columns: int, lower: int | None, upper: int | None
) -> None:
    tile = Tile(slice(0, rows), slice(0, columns), Band(lower, upper)).trimmed()
    if tile is None:
        return
    rows, columns = tile.queries.stop - tile.queries.start, tile.keys.stop - tile.keys.start
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    query, grad = (torch.randn(2, 4, rows, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    key, value = (torch.randn(2, 2, columns, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    plain = PlainKernel(softcap)
    wanted, lse = plain.forward(query, key, value, band=tile.band, scale=0.3)
    wanted_grads = _gradients(plain, Queries(query, grad, wanted, lse, 0.3), key, value, tile.band)
    under_test: list[Kernel] = [FlashAttnKernel(PACKAGE, softcap), FlashAttn3Kernel(THIRD, softcap)]
    under_test += [CudaFlashKernel()] if softcap is None else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_aten", TORCH)
        for kernel in under_test:
            out, got_lse = kernel.forward(query, key, value, band=tile.band, scale=0.3, terms=None)
            grads = _gradients(kernel, Queries(query, grad, out, got_lse, 0.3), key, value, tile.band)
            for got, tensor in zip((out, got_lse, *grads), (wanted, lse, *wanted_grads), strict=True):
                assert_close(got, tensor, limit=1e-11, least=tensor.numel() ** 0.5)


def test_torch_has_the_operators_with_these_arguments() -> None:
    for name, wanted in (("forward", ["scale", "window_size_left"]), ("backward", ["rng_state", "window_size_right"])):
        schema = getattr(torch.ops.aten, f"_flash_attention_{name}").default._schema
        names = [argument.name for argument in schema.arguments]
        assert set(wanted) <= set(names)
        assert names.index("max_q") == (5 if name == "forward" else 8)


def test_flash_attn_is_taken_where_it_is_installed_and_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    query = SimpleNamespace(shape=(1, 2, 64, 64), device=torch.device("cuda"), dtype=torch.bfloat16)
    for functions, softcap, name in (
        (None, None, "cuda-flash"),
        (PACKAGE, None, "flash_attn"),
        (PACKAGE, 30.0, "flash_attn"),
    ):
        monkeypatch.setattr(selection, "installed_flash_attn", lambda functions=functions: functions)
        assert select_kernel(query, query, banded=True, softcap=softcap).name == name  # type: ignore[arg-type]
    query.dtype = torch.float32
    assert select_kernel(query, query).name == "cuda-efficient"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "asked", "name"),
    [
        ((9, 0), {"banded": True}, "flash_attn_3"),
        ((9, 0), {"packed": True}, "flash_attn_3"),
        ((9, 0), {"softcap": 30.0}, "flash_attn_3"),
        ((9, 0), {}, "cuda-cudnn"),
        ((8, 0), {"banded": True}, "flash_attn"),
        ((10, 0), {"banded": True}, "flash_attn"),
    ],
)
def test_the_third_serves_hopper_where_cudnn_does_not(
    capability: tuple[int, int], asked: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(selection, "installed_flash_attn", lambda: PACKAGE)
    monkeypatch.setattr(selection, "installed_flash_attn_3", lambda: THIRD)
    query: Any = SimpleNamespace(shape=(1, 2, 64, 64), device=torch.device("cuda"), dtype=torch.bfloat16)
    assert select_kernel(query, query, **asked).name == name
    torch.use_deterministic_algorithms(True)
    try:  # neither cuDNN's nor the third
        assert select_kernel(query, query, **asked).name == "flash_attn"
    finally:
        torch.use_deterministic_algorithms(False)


def _operators(module: SimpleNamespace, name: str) -> SimpleNamespace:
    """The functions as the packages have them since torch 2.4: operators, of which Python tells no arguments."""
    for function in vars(module).values():
        function.__annotations__ = typing.get_type_hints(function)
    forward = torch.library.custom_op(f"parcompile_{name}::forward", module._flash_attn_forward, mutates_args=())
    changed = ("dq", "dk", "dv")
    backward = torch.library.custom_op(
        f"parcompile_{name}::backward", module._flash_attn_backward, mutates_args=changed
    )
    return SimpleNamespace(_flash_attn_forward=forward, _flash_attn_backward=backward, _flash_attn_varlen_backward=None)


def _second_forward(
    q: Tensor, k: Tensor, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0
) -> Tensor:
    return q.clone()


def _second_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, window_size_left: int, window_size_right: int, softcap: float
) -> Tensor:
    return dq.clone()


SECOND = SimpleNamespace(_flash_attn_forward=_second_forward, _flash_attn_backward=_second_backward)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("installed", "module", "name"),
    [
        (installed_flash_attn, PACKAGE, ""),
        (installed_flash_attn, SECOND, "second"),
        (installed_flash_attn_3, THIRD, ""),
        (installed_flash_attn_3, THIRD, "third"),
    ],
    ids=["flash_attn", "flash_attn, operators", "flash_attn_3", "flash_attn_3, operators"],
)
def test_an_unknown_version_of_a_package_is_left_alone(
    known: bool, installed: Any, module: SimpleNamespace, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = SimpleNamespace(_flash_attn_forward=lambda q, k, v, window_size: None)
    found = _operators(module, f"{name}_{known}") if name else module
    monkeypatch.setattr(selection.importlib, "import_module", lambda _: found if known else old)
    installed.cache_clear()
    assert installed() is (found if known else None)
    installed.cache_clear()


def test_a_tile_that_is_not_trimmed_is_refused() -> None:
    assert packs.window_of(CAUSAL, 5, 5) == (-1, 0)
    with pytest.raises(AssertionError, match="hides every key"):
        packs.window_of(Band(None, -1), 5, 5)
