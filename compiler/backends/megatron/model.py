"""Megatron-LM's options of the model, with its words for norms, activations and biases.

What kind of layers there are decides the model type; see `architecture`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from parcompile.backends.architecture import (
    Architecture,
    InexpressibleError,
    architecture_of,
    config_of,
    facts_of,
    refuse,
)
from parcompile.backends.artefacts import Loss, losses_of, option_names, tree_of
from parcompile.backends.reading import (
    Arguments,
    Bundle,
    Draft,
    Entry,
    Row,
    Source,
    SpecPath,
    Undecided,
    UndecidedError,
)
from parcompile.model.blocks.latent import MlaShape
from parcompile.spec import Spec
from parcompile.spec.resolve.model import most
from parcompile.spec.values import router_scope
from parcompile.text.typed import WrongValueError, integer
from parcompile.user_files import shipped

from . import experts, positions


def read(source: Source) -> dict[str, Any]:
    """The same flags as switches of an `Architecture`.

    Raises:
        UndecidedError: the file does not say a value.
    """

    def on(name: str) -> bool:
        return source.value(name, ("model",)) is True

    biased, latent = not on("disable_bias_linear"), on("multi_latent_attention")
    biases = (True, True, True) if biased else (on("add_qkv_bias"), False, False)
    gated = {"swiglu": "silu", "quick_geglu": "quick_gelu"}
    flag = next((name for name in gated if on(name)), None)
    fused = not on("no_bias_gelu_fusion")
    activation = gated[flag] if flag else "squared_relu" if on("squared_relu") else "gelu"
    if activation == "gelu" and biased and fused:
        activation = "gelu_tanh"
    kind = str(source.value("normalization", ("model",)))
    return {
        "rms_norm": kind == "RMSNorm",
        "epsilon": float(source.value("norm_epsilon", ("model",))),
        "centered_norm": on("apply_layernorm_1p"),
        "activation": activation,
        "gated": flag is not None,
        "biases": biases,
        "qk_norm": on("qk_layernorm") and not latent,
    }


_MODEL: SpecPath = ("model",)
SIZES: Mapping[str, str] = shipped(__package__, "groups.json")["sizes"]
"""Sizes that every file has to say, and what Hugging Face calls them."""
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_DROPOUTS = ("attention_dropout", "hidden_dropout")
_PARTS = ("layers", "positions", "experts", "heads", "weights")
_ONLY_READ = ("use_rotary_position_embeddings", "rope_scaling_factor")
_FREE = frozenset({"no_rope_fusion"})
"""Written for latent attention, but a spec may say otherwise: it chooses between kernels."""
OPTIONS = (*(name for part in _PARTS for name in option_names(f"megatron.{part}") if name not in _FREE), *_ONLY_READ)

OTHER_MODELS: Mapping[str, str] = shipped(__package__, "other_models.json")
"""Options of models that a spec cannot express, and what those models are."""


def architecture(spec: Spec) -> Architecture:
    """The switches of the plan's model.

    Raises:
        InexpressibleError: they cannot be described.
    """
    return architecture_of(spec.model.hf_config, spec.model.shape)


def _write(spec: Spec) -> Arguments:
    found = architecture(spec)
    biased = [name for name, on in zip(("qkv", "attention output", "MLP"), found.biases, strict=True) if on]
    facts = {**facts_of(found), "biased": lambda _spec: biased}
    refuse("megatron.layers", spec, facts)
    return {
        **tree_of("megatron.layers", spec, facts),
        **positions.write(found, spec),
        **experts.write(found, spec),
        **tree_of("megatron.heads", spec, {"is_latent": _is_latent}),
        **tree_of("megatron.weights", spec, facts),
    }


def _is_latent(spec: Spec) -> bool:
    return isinstance(spec.model.shape.attention.projections, MlaShape)


def _losses(spec: Spec) -> Iterator[Loss]:
    try:
        found = architecture(spec)
        _write(spec)
    except InexpressibleError as error:
        yield Loss(error.what, error.why, "another target", fatal=True)
        return
    if found.embedding_dropout != found.hidden_dropout:
        yield Loss(
            f"dropout {found.embedding_dropout} of the embedding",
            f"--hidden-dropout {found.hidden_dropout} is used there too",
            "equal dropouts",
        )
    yield from losses_of("megatron.model", spec, {"scope": router_scope})


def _read(source: Source, draft: Draft) -> None:
    """The model, when the file describes one.

    Raises:
        InexpressibleError: a spec has no word for it.
    """
    refuse_other_models(source)
    if not described(source):
        source.note(OPTIONS, _MODEL)
        return
    sizes: dict[str, Any] = {}
    for name, key in SIZES.items():
        sizes[key] = draft.carry(source, name, (*_MODEL, key), _positive)
        if sizes[key] is None:
            draft.ask((*_MODEL, key), f"the file does not say --{name.replace('_', '-')}")
        elif sizes[key] > (limit := most(key) or sizes[key]):
            raise WrongValueError(name, sizes[key], f"at most {limit}, the limit of a spec")
    if draft.carry(source, "vocab_size", (*_MODEL, "vocab_size"), _positive) is None:
        draft.ask((*_MODEL, "vocab_size"), "the file does not say it: the tokenizer decides")
    try:
        _read_layers(source, draft, sizes)
    except UndecidedError as error:
        draft.leave_open(source, error, _MODEL)
    # What is left open elsewhere in the model still counts as part of it.
    source.use({*OPTIONS}.intersection(source.unread()), _MODEL)


def _positive(value: object, name: str) -> int:
    return integer(value, name, least=1)


def refuse_other_models(source: Source) -> None:
    """Refuses what is no decoder of a spec.

    Raises:
        InexpressibleError: with the option that says so.
    """
    for name, what in OTHER_MODELS.items():
        value = source.given.get(name)
        if name in source.given and value not in (None, False) and not isinstance(value, Undecided):
            raise InexpressibleError(f"--{name.replace('_', '-')}", what)
    vocabulary = source.given.get("vocab_file")
    if isinstance(vocabulary, (str, Undecided)) and not any(
        source.has(name) for name in ("merge_file", "tokenizer_type", "tokenizer_model")
    ):
        raise InexpressibleError("--vocab-file without --merge-file", "a vocabulary of word pieces: it is a BERT")


def described(source: Source) -> list[str]:
    """The options that give sizes of a model."""
    return [name for name in ("num_layers", "hidden_size", "num_attention_heads") if source.has(name)]


def _read_layers(source: Source, draft: Draft, sizes: dict[str, Any]) -> None:
    def value(name: str) -> Any:
        return source.value(name, _MODEL)

    hidden, heads, layers = sizes["hidden_size"], sizes["num_attention_heads"], sizes["num_hidden_layers"]
    latent = value("multi_latent_attention") is True
    switches = {**read(source), **positions.read(source, latent=latent)}
    ffn = value("ffn_hidden_size")
    if ffn is None and hidden is not None:
        ffn = default_ffn(hidden, swiglu=value("swiglu") is True)
    groups = value("num_query_groups") if value("group_query_attention") is True else heads
    if value("group_query_attention") is not True:
        source.ignore("num_query_groups", "without --group-query-attention every head has its own")
    width = value("kv_channels")
    untied = value("untie_embeddings_and_output_weights") is True
    dropouts = {name: float(value(name)) for name in _DROPOUTS}
    deviation = float(value("init_method_std"))
    latents = {name: value(name) for name in _LATENT} if latent else {}
    if None in (hidden, heads, layers, groups, ffn):
        return  # asked for already
    router, moe = experts.read(source, ffn=ffn, layers=layers)
    if router is not None:
        experts.read_training(source, draft, router)
    width = hidden // heads if width is None else width
    wanted = Architecture(
        **switches,
        tied=not untied,
        grouped=groups != heads,
        own_head_dim=width * heads != hidden,
        attention_dropout=dropouts["attention_dropout"],
        hidden_dropout=dropouts["hidden_dropout"],
        embedding_dropout=dropouts["hidden_dropout"],
        initializer_range=deviation,
        router=router,
        latent=latent,
    )
    own = {"intermediate_size": ffn, "num_key_value_heads": groups, "head_dim": width}
    if latent:
        names = {"qk_head_dim": "qk_nope_head_dim", "qk_pos_emb_head_dim": "qk_rope_head_dim"}
        own = {"intermediate_size": ffn, "num_key_value_heads": heads}
        own |= {names.get(name, name): size for name, size in latents.items()}
    draft.fill(_MODEL, config_of(wanted, own, moe))


def default_ffn(hidden: int, *, swiglu: bool) -> int:
    """The width of the MLP where a file does not say it (validate_args)."""
    return int((4 * hidden * 2 / 3) / 64) * 64 if swiglu else 4 * hidden


ROWS: tuple[Row, ...] = (
    Entry("make_vocab_size_divisible_by", ("parallelism", "make_vocab_size_divisible_by")),
    Bundle(OPTIONS, _read, _write, _losses),
)
"""The model, in the order in which it is written."""
