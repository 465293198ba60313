"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), dense or with experts."""

from __future__ import annotations

from collections.abc import Mapping

from parcompile.model.family import Family, Latent, Refusal

from .traits import EVERY_LAYER, TIED, defaults_of, routed

LATENT: Mapping[str, Family] = {
    "deepseek_v2": Family(
        latent=Latent(),
        mlp_bias="mlp_bias",
        experts=routed(64, None, 1407, dense_layers=0, shared=2, count_alias="num_experts"),
    ),
    "deepseek_v3": Family(latent=Latent(), experts=routed(256, 8, 2048, dense_layers=3)),
    "youtu": Family(latent=Latent(), defaults=defaults_of(16, **TIED)),
    "minicpm3": Family(latent=Latent(768, 256, 64, 32, None), mlp_bias="mlp_bias", defaults=defaults_of(**TIED)),
    "glm4_moe_lite": Family(
        latent=Latent(768, 512, 192, 64, 256),
        experts=routed(64, 4, 1536, by_layer="mlp_layer_types", dense_by_default=1),
    ),
    "axk1": Family(
        latent=Latent(),
        experts=routed(192, 8, 2048, by_layer="mlp_layer_types", dense_layers=1, norm_after="post_mlp_layernorm"),
        refusals=(
            EVERY_LAYER,
            Refusal(
                "q_lora_rank",
                lambda config: config.get("q_lora_rank", 1) is None,
                "transformers compresses the queries of this model type always: it has to be a number",
            ),
        ),
    ),
}
