"""Decoders with state-space layers (Mamba)."""

from __future__ import annotations

from collections.abc import Mapping

from parcompile.model.family import Experts, Family, Refusal
from parcompile.model.recurrent import Recurrent, RecurrentKind, StateSpaceKeys

from .traits import defaults_of

_MAMBA2 = Recurrent(
    RecurrentKind.MAMBA2,
    module="mamba",
    layers_alias="layers_block_type",
    every_key=None,
    state_space=StateSpaceKeys(),
)

STATE_SPACE: Mapping[str, Family] = {
    "bamba": Family(
        final_norm="final_layernorm",
        order=("mlp", "norms", "attention"),
        mlp="feed_forward",
        norms=("input_layernorm", "pre_ff_layernorm"),
        mlp_bias="mlp_bias",
        recurrent=Recurrent(
            RecurrentKind.MAMBA2,
            module="mamba",
            layers_key="",
            attending_key="attn_layer_indices",
            every_key=None,
            state_space=StateSpaceKeys(),
        ),
        refusals=(
            Refusal(
                "z_loss_coefficient",
                lambda config: bool(config.get("z_loss_coefficient")),
                "it adds a loss of the logits themselves, which are spread over ranks: it has to be 0",
            ),
        ),
        defaults=defaults_of(8),
    ),
    "falcon_h1": Family(
        final_norm="final_layernorm",
        order=("mlp", "recurrent", "attention", "norms"),
        mlp="feed_forward",
        norms=("input_layernorm", "pre_ff_layernorm"),
        mlp_bias="mlp_bias",
        recurrent=Recurrent(
            RecurrentKind.MAMBA2,
            module="mamba",
            layers_key="",
            every_key=None,
            beside_attention=True,
            state_space=StateSpaceKeys(
                width=("mamba_d_ssm", 1024),
                output_bias=("projectors_bias", False),
                norm=("mamba_rms_norm", False),
            ),
        ),
        defaults=defaults_of(8),
    ),
    "granitemoehybrid": Family(
        order=("norms", "mlp", "attention"),
        mlp="shared_mlp",
        up=("input_linear",),
        down="output_linear",
        recurrent=_MAMBA2,
        experts=Experts(
            block="block_sparse_moe",
            router="router",
            switch="num_local_experts",
            beside="shared_mlp",
            shared_width=("shared_intermediate_size", 1024),
            dense_width=("shared_intermediate_size", 1024),
        ),
        defaults={"num_local_experts": 8},
    ),
}
