"""Attention that transformers computes by itself, put behind its attention interface, where the ring takes its place.

Shapes: B rows, S tokens, H query and K kv heads of this rank, D features of a head.

Source: the attention modules of transformers 5.23, whose results these give; each takes what its original takes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parcompile.model.family import Family
from parcompile.runtime.errors import everywhere

from .attention import biased, slopes_of
from .positions import write_to_copies


def put_on_interface(model: Any, family: Family) -> bool:
    """Lets the attention modules of a model that has its own attention call what is registered for the model.

    Returns whether the model is one of those: its windows are told to the attention then, whatever its mask is.

    Raises:
        RunError: the model has positions biases and an attention that is not known here.
    """
    replace = REPLACED.get(getattr(model.config, "model_type", ""))
    if replace is None:
        if family.alibi:
            raise everywhere(f"{type(model).__name__} has ALiBi biases, which are not injected")
        return False
    attentions = [module for name, module in model.named_modules() if name.endswith(f".{family.attention}")]
    for number, module in enumerate(attentions):
        vars(module).setdefault("layer_idx", number)  # dropout is drawn by it
        replace(model, module)
    if (prepare := PREPARED.get(model.config.model_type)) is not None:
        prepare(model, family.base)
    return True


def _attend(
    model: Any,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    dropout: float = 0.0,
    cache: Any = None,
    slopes: Callable[[], Tensor] | None = None,
    **options: Any,
) -> Tensor:
    """Query [B, H, S, D], key and value [B, K, S, D], behind those of a cache, to [B, S, H, D].

    `slopes` gives those of ALiBi, of all heads.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    if cache is not None:
        key, value = cache.update(key, value, module.layer_idx)
    if slopes is not None:
        query, key = biased(query, key, slopes_of(module, slopes, query.device), scaling)
    query, key, dropout = query.to(value.dtype), key.to(value.dtype), dropout * module.training
    out: Tensor = function(module, query, key, value, None, scaling=scaling, dropout=dropout, **options)[0]
    return out


def _projected(module: Any, hidden: Tensor, *names: str) -> Iterator[Tensor]:
    """Hidden states [B, S, …] by each of these projections, as heads [B, H, S, D]."""
    return (getattr(module, name)(hidden).unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for name in names)


def _core(
    model: nn.Module, module: Any, *, scaling: float, window: int | None = None, dropout_name: str = "attn_dropout"
) -> None:
    """Replaces `_attn`, which computes attention and nothing else, of GPT-J, GPT-Neo and their relatives."""

    def attend(query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:  # noqa: ARG001
        dropout = getattr(module, dropout_name).p
        out = _attend(model, module, query, key, value, scaling=scaling, dropout=dropout, sliding_window=window)
        return out.transpose(1, 2), None

    module._attn = attend


def _gpt_neo(model: nn.Module, module: Any) -> None:
    module.layer_idx = module.layer_id
    window = module.config.window_size if module.attention_type == "local" else None
    _core(model, module, scaling=1.0, window=window)


def _openai_gpt(model: nn.Module, module: Any) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> list[Tensor]:
        scaling = 1.0 / math.sqrt(value.shape[-1]) if module.scale else 1.0
        # Its keys come transposed, [B, H, D, S].
        keys, dropout = key.transpose(-1, -2), module.attn_dropout.p
        out = _attend(model, module, query, keys, value, scaling=scaling, dropout=dropout)
        return [out.transpose(1, 2)]

    module._attn = attend


def _forward(core: Callable[..., tuple[Tensor, None]]) -> Callable[[nn.Module, Any], None]:
    """Replaces the forward of an attention module by a function of the model, the module and what it is called with."""

    def replace(model: nn.Module, module: Any) -> None:
        module.forward = functools.partial(core, model, module)

    return replace


def _xglm(
    model: nn.Module, module: Any, hidden_states: Tensor, past_key_values: Any = None, **_: Any
) -> tuple[Tensor, None]:
    heads = _projected(module, hidden_states, "q_proj", "k_proj", "v_proj")
    out = _attend(model, module, *heads, scaling=module.scaling, dropout=module.dropout, cache=past_key_values)
    return module.out_proj(out.flatten(-2)), None


def _ctrl(
    model: nn.Module, module: Any, values: Tensor, *_: Tensor, layer_past: Any = None, **__: Any
) -> tuple[Tensor, None]:
    """Called with the same hidden states three times, of which those of the first argument are whole."""
    out = _attend(
        model, module, *_projected(module, values, "Wq", "Wk", "Wv"), scaling=module.scaling, cache=layer_past
    )
    return module.dense(out.flatten(-2)), None


def _codegen(
    model: Any, module: Any, hidden_states: Tensor, layer_past: Any = None, position_ids: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Its projection holds queries, values and keys of a quarter of all heads after the other."""
    heads = model.config.num_attention_heads // 4
    blocks = module.qkv_proj(hidden_states).unflatten(-1, (-1, 3, heads, module.head_dim))
    query, value, key = (blocks[..., part, :, :].flatten(2, 3) for part in range(3))
    module.embed_positions = module.embed_positions.to(query.device)
    sin, cos = module.embed_positions[position_ids].chunk(2, dim=-1)
    rotate, width = function_of(module, "apply_rotary_pos_emb"), module.rotary_dim or module.head_dim
    query, key = (
        torch.cat((rotate(part[..., :width], sin, cos), part[..., width:]), -1).transpose(1, 2) for part in (query, key)
    )
    key, value = key.to(hidden_states.dtype), value.transpose(1, 2)
    options = {"scaling": 1.0 / module.scale_attn, "dropout": module.attn_dropout.p, "cache": layer_past}
    out = _attend(model, module, query, key, value, **options)
    return module.resid_dropout(module.out_proj(out.flatten(-2))), None


def _bloom(
    model: Any, module: Any, hidden_states: Tensor, residual: Tensor, layer_past: Any = None, **_: Any
) -> tuple[Tensor, None]:
    heads = module._reshape(module.query_key_value(hidden_states))
    out = _attend(
        model,
        module,
        *heads,
        scaling=module.inv_norm_factor,
        dropout=module.attention_dropout.p,
        cache=layer_past,
        slopes=lambda: _slopes(model.transformer.build_alibi_tensor, model.config.n_head),
    )
    out = module.dense(out.flatten(-2))
    return residual + nn.functional.dropout(out, module.hidden_dropout, module.training), None


def _slopes(build: Callable[..., Tensor], heads: int) -> Tensor:
    """[H], by a function that makes biases of two positions."""
    return _difference(build(torch.ones(1, 2, dtype=torch.int64), heads, torch.float32))


def _difference(biases: Tensor) -> Tensor:
    return biases[:, 0, 1] - biases[:, 0, 0]


def _mpt(model: Any, module: Any, hidden_states: Tensor, past_key_values: Any = None, **_: Any) -> tuple[Tensor, None]:
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    heads = (part.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for part in fused.chunk(3, dim=-1))
    out = _attend(
        model,
        module,
        *heads,
        scaling=module.softmax_scale,
        dropout=module.attn_dropout_p,
        cache=past_key_values,
        slopes=lambda: _difference(model.transformer.build_mpt_alibi_tensor(model.config.n_heads, 2)),
    )
    return module.out_proj(out.flatten(-2)), None


def _falcon(
    model: Any,
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    layer_past: Any = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    query, key, value = (part.transpose(1, 2) for part in _falcon_heads(module, module.query_key_value(hidden_states)))
    options: dict[str, Any] = {}
    if alibi is None:
        assert position_embeddings is not None
        query, key = function_of(module, "apply_rotary_pos_emb")(query, key, *position_embeddings)
    else:
        # Unlike others, it scales the biases as it scales the scores; only with them it drops any.
        build, heads = function_of(module, "build_alibi_tensor"), model.config.num_attention_heads
        options["slopes"] = lambda: _slopes(build, heads) * module.inv_norm_factor
        options["dropout"] = module.attention_dropout.p
    out = _attend(model, module, query, key, value, scaling=module.inv_norm_factor, cache=layer_past, **options)
    return module.dense(out.flatten(-2)), None


def _falcon_heads(module: Any, fused: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, S, H, D], keys and values [B, S, K, D], which its own function repeats for each query."""
    if not module.new_decoder_architecture:
        parts: tuple[Tensor, Tensor, Tensor] = module._split_heads(fused)
        return parts
    grouped = fused.unflatten(-1, (-1, module.num_heads // module.num_kv_heads + 2, module.head_dim))
    return grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]


def function_of(module: nn.Module, name: str) -> Callable[..., Any]:
    """A function of the file of transformers that a module is from."""
    import sys

    found: Callable[..., Any] = getattr(sys.modules[type(module).__module__], name)
    return found


def _refuse_prefixes(model: Any, base: str) -> None:
    """HRM's tokens of a prefix see one another, which only a mask of transformers tells."""

    def look(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("token_type_ids") is not None:
            raise everywhere(
                "token_type_ids mark a prefix whose tokens see one another; the ring masks by position, window and "
                "document only: leave them out"
            )

    model.get_submodule(base).register_forward_pre_hook(look, with_kwargs=True)


PREPARED: Mapping[str, Callable[[Any, str], None]] = {"ctrl": write_to_copies, "hrm_text": _refuse_prefixes}
"""What is done to a model and its base model beside."""

REPLACED: Mapping[str, Callable[[nn.Module, Any], None]] = {
    "gptj": lambda model, module: _core(model, module, scaling=1.0 / math.sqrt(module.head_dim)),
    "gpt_neo": _gpt_neo,
    "gpt_neox_japanese": lambda model, module: _core(
        model, module, scaling=1.0 / module.norm_factor, dropout_name="attention_dropout"
    ),
    "openai-gpt": _openai_gpt,
    "codegen": _forward(_codegen),
    "ctrl": _forward(_ctrl),
    # It calls what is registered: its stacks are no list of layers that calls could be looked at of.
    "hrm_text": lambda *_: None,
    "xglm": _forward(_xglm),
    "bloom": _forward(_bloom),
    "mpt": _forward(_mpt),
    "falcon": _forward(_falcon),
}
