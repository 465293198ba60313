"""Every model type that the installed transformers may name: what works, and why the others do not.

A type works when it has a row in `families/` that the runtime injects. The others stand in `model_types.json`, which
`.ci/generate/model_types.py` writes, with the key of their reason.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parcompile.user_files import shipped

from .families import BUILT_IN, FAMILIES
from .family import Family, by_type, types_with
from .tables import counts_of, table_of

# Why the runtime refuses a model type, in words, by the key that `model_types.json` names.


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


# Every model type that the installed transformers may name: what works, and why the others are refused.

TEXT_PARTS = types_with("text_part")
"""Multimodal types whose text part, given text alone, computes what a model of its type does."""

TEXT_ALIKE: Mapping[str, str] = by_type("text_alike")
"""Types of text parts that are no causal language models of their own, and the type that computes the same of text
alone: where they rotate each feature by one of three positions, those of a token of text are one."""

RUNTIME_FAMILIES = tuple(BUILT_IN)
"""Model types that the runtime injects."""


CORRECTED = types_with("corrected_routers")
"""Model types whose routers have such scores."""

_ROUTER_SCORES = by_type("router_scores")


def router_scores(model_type: str) -> str | None:
    """What makes scores of a router's logits: "softmax" or "sigmoid"; None: its class has no logits of these."""
    found: str | None = _ROUTER_SCORES.get(model_type, "sigmoid" if model_type in CORRECTED else "softmax")
    return found


SCALED_INPUTS = types_with("scaled_inputs")
"""Model types of which the router's scores scale what experts take, not what they give."""

WEIGHTED_IN_TYPE = types_with("weighted_in_type")
"""Model types whose routers weight experts in the type of the weights; others do in fp32."""


LOGIT_CAP = "final_logit_softcapping"
CAPPED_LOGITS = by_type("logit_cap")
"""Model types that keep logits within a cap (`LOGIT_CAP`), and what their classes have for it."""

SCORE_CAP = "attn_logit_softcapping"
CAPPED_SCORES = by_type("score_cap")
"""Model types whose classes keep scores of attention within a cap where nobody says another (`SCORE_CAP`)."""
SCORE_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
DROPPED_SCORES = by_type("score_dropout")
"""Model types whose classes drop weights of attention where nobody says how many."""

_NEAREST = by_type("nearest")
ALIKE: Mapping[str, str] = by_type("alike")
"""Types of code that comes with the weights, or of a tokenizer, and the type that has their layers."""


TYING: Mapping[str, Callable[[bool | None, bool | None], bool]] = {
    "": lambda whole, _: bool(whole),
    "yes": lambda whole, _: whole is None or whole,
    "either": lambda whole, text: bool(whole or text),
    "either or yes": lambda whole, text: bool(whole) or text is None or text,
    "unless both": lambda whole, text: whole is not False or text is not False,
    "text": lambda whole, text: bool(text if whole is None else whole),
}
"""Whether a multimodal model ties its head, from what the whole and its text part say (None: nothing)."""


@dataclass(frozen=True, slots=True)
class ModelType:
    """A model type."""

    name: str
    works: bool
    planned: bool
    """The compiler knows the names and shapes of its parameters."""
    reason: Reason | None = None
    text: str | None = None
    """The type as which the text part of a multimodal model is trained, where the file says nothing."""
    text_kind: str | None = None
    """The type that transformers gives it; `TEXT_ALIKE` has that of the layers."""
    nearest: str | None = None
    note: str = ""
    causal: bool = True
    """transformers builds it as a causal language model, and not only as a multimodal one."""
    tied: str = ""
    """Of a multimodal model, who says whether the head is tied to the embedding: a key of `TYING`."""

    @property
    def text_works(self) -> bool:
        """Whether the text part can be trained alone."""
        return self.name in TEXT_PARTS and self.text in RUNTIME_FAMILIES

    @property
    def family(self) -> Family | None:
        """Its row."""
        return FAMILIES.get(ALIKE.get(self.name, self.name))


@functools.cache
def _stored() -> Mapping[str, Any]:
    found: Mapping[str, Any] = shipped("parcompile.model", "model_types.json")
    return found


def transformers_version() -> str:
    """The version that the list was read from."""
    return str(_stored()["transformers"])


@functools.cache
def model_types() -> Mapping[str, ModelType]:
    """Every known type by name, in alphabetical order."""
    refused = {name: _refused(name, entry) for name, entry in _stored()["types"].items()}
    works = {name: ModelType(name, works=True, planned=True) for name in RUNTIME_FAMILIES}
    alike = {
        name: ModelType(name, works=True, planned=True, note=refused[name].note)
        for name, other in ALIKE.items()
        if name in refused and other in RUNTIME_FAMILIES
    }
    both = {**refused, **works, **alike}
    return {name: both[name] for name in sorted(both)}


def model_type(name: str) -> ModelType:
    """What is known of a type; of a name that transformers does not know, the nearest type."""
    return model_types().get(name) or _refused(name, {"reason": "unknown"})


def _refused(name: str, entry: Mapping[str, str]) -> ModelType:
    nearest = _NEAREST.get(name)
    kind = entry.get("text")
    text = None if kind is None else TEXT_ALIKE.get(kind, kind)
    if nearest is None and text is not None:
        nearest = text if text in RUNTIME_FAMILIES else _NEAREST.get(text)
    if nearest is None:
        close = difflib.get_close_matches(name, RUNTIME_FAMILIES, 1, 0.7)
        nearest = close[0] if close else None
    reason = REASONS[entry["reason"]]
    note = f"its layers are those of {ALIKE[name]}, as which it is planned and trained" if name in ALIKE else ""
    described = name in FAMILIES or table_of(name) is not None
    causal, tied = "only" not in entry, entry.get("tied", "")
    return ModelType(name, False, described, reason, text, kind, nearest, note, causal, tied)


_KINDS = ("layer_types", "layers_block_type", "hybrid_override_pattern")


def refusal(name: Any, config: Mapping[str, Any]) -> tuple[str, str]:
    """Why a configuration of this type is refused, in a sentence, and what to do instead."""
    if not isinstance(name, str):
        return f"model_type is {name!r}: it has to be the name of a model type", "`parcompile models` lists them"
    known, whole = model_type(name), _whole_of(name)
    assert known.reason is not None
    if whole is not None:
        return _part_alone(name, whole)
    sentence = f"model_type {name!r} is refused: {known.reason.why}{_layers(config)}"
    inner = config.get("text_config")
    told = known.reason is not REASONS["multimodal"]
    if isinstance(inner, Mapping) and not told:
        part = inner.get("model_type") or known.text
        if not isinstance(part, str) or part not in FAMILIES:
            why = model_type(str(part)).reason
            sentence += f"; its text part is {part!r}, which is refused too: {why.why if why else ''}"
    elif known.text_works:
        sentence += f"; its text part is {known.text!r}, which works, but the configuration has no text_config"
    if (counts := counts_of(config)) is not None:
        sentence += f"; this configuration has {counts.total:,} parameters"
    found = [f"what runs: {known.reason.instead}"] if told and inner is not None and known.reason.instead else []
    if known.note:
        found.append(known.note)
    if known.nearest and not known.note:
        found.append(f"the nearest type that works is {known.nearest}")
    found.append(f"`parcompile models {name}` says more" if name in model_types() else "`parcompile models` lists all")
    return sentence, "; ".join(found)


def _whole_of(name: str) -> ModelType | None:
    """The multimodal type whose text part has this type, where the type is no model of its own."""
    if name in model_types():
        return None
    found = {one.name: one for one in model_types().values() if one.text_kind == name}
    near = difflib.get_close_matches(name, found, 1, 0.0)
    return found[near[0]] if near else None


def _part_alone(name: str, whole: ModelType) -> tuple[str, str]:
    why = f"it is the text part of {whole.name}, and no causal language model of transformers has its layers alone"
    assert whole.reason is not None
    if whole.text_works:
        instead = f"give the config.json of the whole model, whose model_type is {whole.name}: its text part is trained"
        return f"model_type {name!r} is refused: {why}", instead
    told = "" if whole.reason is REASONS["multimodal"] else f"; {whole.reason.why}"
    return f"model_type {name!r} is refused: {why}{told}", f"`parcompile models {whole.name}` says more"


def _layers(config: Mapping[str, Any]) -> str:
    """Which layers a configuration has, where it lists their kinds."""
    for key in _KINDS:
        kinds = config.get(key)
        if isinstance(kinds, list) and kinds and all(isinstance(kind, str) for kind in kinds):
            counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
            return f" ({key}: {', '.join(f'{count} {kind}' for kind, count in counts.items())})"
    return ""
