"""Decoders with state-space layers (Mamba), beside attention or alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from parcompile.model.blocks.mamba1 import Mamba1Traits
from parcompile.model.blocks.mamba2 import Mamba2Keys, Mamba2Traits
from parcompile.model.blocks.recurrent import RecurrentTraits
from parcompile.model.family import Experts, Family, Refusal
from parcompile.model.layers import STATE, LayerPeriod, nemotron_kinds
from parcompile.model.shared_blocks import INNER, zamba2_kinds

# Decoders with state-space layers (Mamba).


def _other_head_dim(config: Mapping[str, Any]) -> bool:
    return "head_dim" in config and config["head_dim"] != config["hidden_size"] // config["num_attention_heads"]


_NO_WINDOW = Refusal(
    "sliding_window",
    lambda config: config.get("sliding_window") is not None,
    "transformers' layers have no window: remove it",
)


def _states(key: str, config: Mapping[str, Any]) -> bool:
    """Whether a configuration has a key, with or without a value."""
    return key in config


def _states_of_nemotron(config: Mapping[str, Any], _: int) -> tuple[int, ...]:
    return tuple(number for number, kind in enumerate(nemotron_kinds(config)) if kind == STATE)


BAMBA = Family(
    mlp="feed_forward",
    parts=(Mamba2Traits(attending_key="attn_layer_indices"),),
    refusals=(
        Refusal(
            "z_loss_coefficient",
            lambda config: bool(config.get("z_loss_coefficient")),
            "it adds a loss of the logits themselves, which are spread over ranks: it has to be 0",
        ),
    ),
)
FALCON_H1 = Family(
    mlp="feed_forward",
    parts=(
        Mamba2Traits(
            where="beside attention",
            beside_attention=True,
            keys=Mamba2Keys(width=("mamba_d_ssm", 1024), norm=("mamba_rms_norm", False)),
        ),
    ),
)
NEMOTRON_H = Family(
    embedding="embeddings",
    attention="mixer",
    mlp="mixer",
    layer_blocks=nemotron_kinds,
    parts=(
        Mamba2Traits(
            module="mixer",
            by_default=_states_of_nemotron,
            keys=Mamba2Keys(
                heads=("mamba_num_heads", 128),
                head_dim=("mamba_head_dim", 64),
                groups=("n_groups", 8),
                state=("ssm_state_size", 128),
                kernel=("conv_kernel", 4),
                chunk=("chunk_size", 128),
                expand=None,
            ),
        ),
    ),
    experts=Experts(
        block="mixer",
        shared="shared_experts",
        count=("n_routed_experts", 8),
        per_token=("num_experts_per_tok", 2),
        width=("moe_intermediate_size", 7688),
        shared_width=("moe_shared_expert_intermediate_size", 7688),
        dense_width=("intermediate_size", 21504),
    ),
    refusals=(
        Refusal(
            "moe_latent_size",
            lambda config: config.get("moe_latent_size") is not None and "moe" in nemotron_kinds(config),
            "experts of a projection of the hidden states are not described: it has to be null",
        ),
        _NO_WINDOW,
    ),
)
JAMBA = Family(
    mlp="feed_forward",
    parts=(
        Mamba1Traits(
            module="mamba",
            attending_period=LayerPeriod(("attn_layer_period", 8), ("attn_layer_offset", 4)),
        ),
    ),
    experts=Experts(
        block="feed_forward",
        count=("num_experts", 16),
        per_token=("num_experts_per_tok", 2),
        width=("intermediate_size", 14336),
        dense_width=("intermediate_size", 14336),
        period=LayerPeriod(("expert_layer_period", 2), ("expert_layer_offset", 1)),
        one_is_dense=True,
    ),
    refusals=(
        *(
            Refusal(key, functools.partial(_states, key), f"transformers computes it from {told}: remove it")
            for key, told in (
                ("layer_types", "attn_layer_period and attn_layer_offset"),
                ("layers_block_type", "attn_layer_period and attn_layer_offset"),
                ("layers_num_experts", "num_experts, expert_layer_period and expert_layer_offset"),
            )
        ),
        Refusal(
            "head_dim",
            _other_head_dim,
            "heads of another width than hidden_size / num_attention_heads are not described: remove it",
        ),
        Refusal(
            "mamba_inner_layernorms",
            lambda config: config.get("mamba_inner_layernorms") is False,
            "transformers builds the norms of step sizes, B and C whatever it says: remove it",
        ),
        Refusal(
            "use_mambapy",
            lambda config: bool(config.get("use_mambapy")),
            "the scan of mamba.py has not been compared: it has to be false",
        ),
        _NO_WINDOW,
    ),
)
ZAMBA2 = Family(
    mlp="feed_forward",
    mlp_ratio=4,
    shared_blocks=True,
    layer_blocks=zamba2_kinds,
    parts=(
        Mamba2Traits(
            where="in every layer, behind attention and MLPs that layers share",
            inside=INNER,
            by_default=lambda config, _: tuple(range(len(zamba2_kinds(config)))),
            keys=Mamba2Keys(
                heads=("n_mamba_heads", 8),
                head_dim=("mamba_headdim", None),
                groups=("mamba_ngroups", 1),
                state=("mamba_d_state", 64),
                chunk=("chunk_size", 256),
            ),
        ),
    ),
    refusals=(
        Refusal(
            "tie_word_embeddings",
            lambda config: config.get("tie_word_embeddings") is False,
            "transformers then ties no shared block either: each hybrid layer has a block of its own, with "
            "adapters of other layers that nothing trains. It has to be true",
        ),
        Refusal(
            "attention_dropout",
            lambda config: bool(config.get("attention_dropout")),
            "masks are drawn by the number of the layer, and the uses of a shared block have none: it has to be 0",
        ),
    ),
    refused_axes={
        "pp": "layers of all stages would share a transformer block, and every stage would need the embeddings of "
        "the tokens"
    },
)
GRANITEMOEHYBRID = Family(
    mlp="shared_mlp",
    parts=(Mamba2Traits(layers_key="layer_types", layers_alias="layers_block_type"),),
    experts=Experts(
        block="block_sparse_moe",
        switch="num_local_experts",
        beside="shared_mlp",
        shared_width=("shared_intermediate_size", 1024),
        dense_width=("shared_intermediate_size", 1024),
    ),
    defaults={"num_local_experts": 8},
)


# Decoders none of whose layers attends: each is one state-space block (Mamba), without an MLP.

_NO_ATTENTION: Mapping[str, None] = {
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "max_position_embeddings": None,
}
_WIDE = {"residual_in_fp32": True}
_ALONE = "alone, without attention and MLP"


def _is_on(key: str, config: Mapping[str, Any]) -> bool:
    return bool(config.get(key))


_LAYERS_AND_STATE = (
    Refusal(
        "layer_types",
        functools.partial(_states, "layer_types"),
        "transformers computes it from num_hidden_layers, and takes no other: remove it",
    ),
    Refusal(
        "ssm_state_size",
        functools.partial(_states, "ssm_state_size"),
        "transformers reads state_size in this model type: write that",
    ),
)
_NO_WIDTH = Refusal(
    "intermediate_size",
    lambda config: "intermediate_size" in config and config["intermediate_size"] is None,
    "transformers builds no layer with null: write the number of channels, or leave it out for expand x hidden_size",
)


def _not_compared(key: str) -> Refusal:
    return Refusal(
        key, functools.partial(_is_on, key), "the scan of mamba.py has not been compared: it has to be false"
    )


def _family(refusals: tuple[Refusal, ...], states: RecurrentTraits) -> Family:
    return Family(
        base="backbone",
        keys=_NO_ATTENTION,
        embedding="embeddings",
        attends=False,
        fp32_residual="residual_in_fp32",
        parts=(states,),
        refusals=(*_LAYERS_AND_STATE, *refusals),
        defaults=_WIDE,
    )


def _mamba1(*refusals: Refusal) -> Family:
    """Mamba-1 layers, whose channels `intermediate_size` may count in the place of `expand`."""
    states = Mamba1Traits(
        module="mixer",
        where=_ALONE,
        every_key=None,
        expand=("expand", 2),
        state=("state_size", 16),
        convolution=("conv_kernel", 4),
        step_rank="time_step_rank",
        width="intermediate_size",
    )
    return _family((_NO_WIDTH, *refusals), states)


MAMBA = _mamba1(_not_compared("use_mambapy"))
FALCON_MAMBA = _mamba1(
    _not_compared("use_falcon_mambapy"),
    Refusal(
        "use_mambapy",
        functools.partial(_is_on, "use_mambapy"),
        "transformers reads use_falcon_mambapy in its place: remove it",
    ),
)
MAMBA2 = _family(
    (
        Refusal(
            "rms_norm",
            lambda config: config.get("rms_norm") is False,
            "transformers builds the gated norm whatever it says: remove it",
        ),
    ),
    Mamba2Traits(
        module="mixer",
        where=_ALONE,
        keys=Mamba2Keys(
            heads=("num_heads", 128),
            head_dim=("head_dim", 64),
            groups=("n_groups", 8),
            state=("state_size", 128),
            kernel=("conv_kernel", 4),
            chunk=("chunk_size", 256),
            expand=("expand", 2),
        ),
    ),
)
