"""Why the runtime refuses a model type, in words, by the key that `model_types.json` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a type is refused."""

    title: str
    why: str
    """After "NAME is refused: "."""
    instead: str = ""
    """What would run."""


_CARRIED = (
    "of linear-attention/SSM layers, the runtime splits over tp and passes on over cp gated delta nets, state-space "
    "layers, lightning attention and short convolutions"
)

REASONS: Mapping[str, Reason] = {
    "multimodal": Reason(
        "multimodal models",
        "it is more than a causal language model (a vision or audio tower beside one)",
        "the text part alone, where its type works",
    ),
    "unscaled_head": Reason(
        "multimodal models",
        "its head gives logits as they are, where that of its text part multiplies them by logit_scale: with text "
        "alone the two do not compute the same",
        "its text_config as the configuration of a model of its own, whose head scales them",
    ),
    "seen_prompts": Reason(
        "multimodal models",
        "tokens of a prompt (token_type_ids 0) see one another, later ones too, also where no image is among them: the "
        "ring masks by position, window and document",
        "its text_config as the configuration of a causal model of its own",
    ),
    "always_images": Reason(
        "multimodal models",
        "it computes nothing without images: its class takes no batch without pixel_values",
        "its text_config as the configuration of a model of its own",
    ),
    "latents_of_earlier_layers": Reason(
        "multimodal models",
        "layers of its text part take latent keys of earlier layers (kv_source_layers), learned numbers scale queries "
        "by the log of their position, and numbers in the files scale the frequencies of positions: "
        "the compiler describes none of these",
    ),
    "limits_of_layers": Reason(
        "multimodal models",
        "each layer of its text part clamps its MLP, its experts and the shared one at limits of its own "
        "(swiglu_limits, swiglu_limits_shared), beside heads that differ by layer (num_sliding_attention_heads): the "
        "compiler describes one limit for all layers",
    ),
    "wide_embedding": Reason(
        "multimodal models",
        "its embedding has additional_vocab_size more rows than its head, for tokens that stand for images: the "
        "compiler describes one vocabulary for both",
    ),
    "experts_of_images": Reason(
        "multimodal models",
        "its files keep the experts of text and those of images in one list, and their routers transposed: the runtime "
        "does not read them apart",
        "ernie4_5_moe, which has the layers that text takes",
    ),
    "gated_units": Reason(
        "RG-LRU layers",
        "in its recurrent layers each channel decays by a gate of its own, which a matrix for each head's channels "
        f"computes (RG-LRU), token by token: {_CARRIED}",
    ),
    "weighted_means": Reason(
        "RWKV layers",
        "its layers keep a decaying mean of all earlier values of each channel (WKV), and mix each token with the one "
        f"before (time_mix): {_CARRIED}",
    ),
    "matrix_memory": Reason(
        "mLSTM layers",
        "its layers write to a matrix of each head through exponential gates, and keep a running maximum beside it "
        f"(mLSTM): {_CARRIED}",
    ),
    "encoder_decoder": Reason(
        "encoder-decoders", "it is an encoder-decoder, or the decoder of one: only decoders that stand alone are split"
    ),
    "whole_context": Reason(
        "models that see later tokens",
        "transformers puts prompt_length learned tokens before each sequence and lets every token see all others, "
        "later ones too: only decoders are split",
    ),
    "encoder": Reason(
        "encoders",
        "it is an encoder, which attends in both directions unless it is told otherwise: only decoders are split",
    ),
    "own_mask": Reason(
        "masks that a model learns",
        "it learns a score of each key from its value, adds it to those of the attention, and beyond keep_window_size "
        "lets queries see the highest only: the ring masks by position, window and document",
    ),
    "learned_bias": Reason(
        "learned biases of distances",
        "each query mixes learned profiles into a bias of its own for every distance of a key: what the ring adds to "
        "scores gets no gradient",
    ),
    "hashed_keys": Reason(
        "keys chosen by hashes",
        "queries see the keys of their hash bucket, and layers are reversible: the ring masks by position only",
    ),
    "mixed_tokens": Reason(
        "projections of neighbouring tokens",
        "convolutions along the sequence make its queries and keys, half of each value is that of the token before, "
        "and a router takes what the router of the layer before computed: ranks exchange none of these",
    ),
    "attention_of_experts": Reason(
        "attention heads chosen by a router",
        "a router chooses for each token which projections of queries and outputs an attention uses: the compiler "
        "describes one projection for all tokens, and no experts inside of attention",
    ),
    "shared_blocks": Reason(
        "blocks that several layers share",
        "its hybrid layers use the same transformer blocks in turn (shared_transformer, shared_transf), whose weights "
        "are tied over layers. A block takes the hidden states and the embeddings of the tokens side by side, 2 x "
        "hidden_size features. What it gives goes through a projection of the layer into the layer's Mamba block. The "
        "compiler describes such blocks in front of Mamba-2 layers only",
        "zamba2, whose shared blocks stand in front of Mamba-2 layers",
    ),
    "byte_patches": Reason("patches of bytes", "its layers work on patches of bytes whose lengths it learns"),
    "rows_of_experts": Reason(
        "experts in one matrix",
        "its experts are stored as rows of one matrix, [experts x width, hidden], where those of others are a "
        "dimension of their own, and its sizes stand in attn_config and ffn_config: the compiler "
        "describes neither",
        "a type whose experts are a dimension: mixtral or qwen3_moe",
    ),
    "cross_attention": Reason(
        "layers that attend to images",
        "layers of its text part (cross_attention_layers) attend to images. With text alone transformers leaves them "
        "out, and nothing trains their parameters: the compiler describes no layers that a model has and does not run",
        "the language model that it was made from, as llama",
    ),
    "draft_model": Reason("draft models", "it drafts tokens for another model, whose keys and values it reads"),
    "no_table": Reason("no rules for its layers", "nobody has told the runtime yet how its layers are split"),
    "unknown": Reason("unknown to transformers", "transformers does not know it as a causal language model"),
}
