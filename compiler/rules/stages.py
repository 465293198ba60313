"""The layers divide into pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Severity
from parcompile.resolve import Resolution

from .arithmetic import divisors, listed, nearest_divisors
from .places import layout_change, model_path
from .registry import Finding, rule

_PP = ("parallelism", "pp")


@rule(
    "L001",
    "the layers do not divide into stages",
    """Every pipeline stage holds the same number of layers; a layer is never dropped.""",
    wrong={
        "model": {"preset": "qwen2.5-7b"},
        "parallelism": {"pp": 8},
        "training": {"gradient_accumulation_dtype": "fp32"},
    },
    right={
        "model": {"preset": "qwen2.5-7b"},
        "parallelism": {"pp": 4},
        "training": {"gradient_accumulation_dtype": "fp32"},
    },
    sources=("Megatron-LM arguments.py; Megatron-LM#1304",),
)
def layers_divide_into_stages(spec: Resolution) -> Iterator[Finding]:
    """Fires when num_hidden_layers % pp is not 0."""
    layers, pp = spec.shape.num_hidden_layers, spec.axis("pp")
    if layers % pp == 0:
        return
    hint = f"pp can be {listed(divisors(layers))}"
    if (layers + 2) % pp == 0:
        hint += (
            f"; with embedding and head counted as layers ({layers} + 2) / {pp} is whole, which only Megatron-LM runs "
            "(--account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split)"
        )
    near = nearest_divisors(pp, layers, count=4)
    yield Finding(
        f"{layers} layers on pp {pp}: {layers} / {pp} is not whole; nearest: {listed(near[:2])}",
        _PP,
        help=hint,
        fixes=tuple(Fix(f"set pp to {size}", layout_change(spec), (Edit(_PP, size),)) for size in near),
    )


@rule(
    "L002",
    "tied embeddings on two stages",
    """With tied embeddings the first and the last stage both hold the embedding. Its copy takes memory, and the
    gradients of both are summed in every step.""",
    wrong={
        "model": {"preset": "llama-3.2-1b"},
        "parallelism": {"pp": 2},
        "training": {"gradient_accumulation_dtype": "fp32"},
    },
    right={
        "model": {"preset": "llama-3-8b"},
        "parallelism": {"pp": 2},
        "training": {"gradient_accumulation_dtype": "fp32"},
    },
    severity=Severity.INFO,
    sources=("Megatron-LM parallel_state.py, embedding group",),
)
def tied_embeddings_are_shown(spec: Resolution) -> Iterator[Finding]:
    """Says the size of the copy."""
    pp, shape = spec.axis("pp"), spec.shape
    if pp > 1 and shape.tie_word_embeddings:
        rows, width, tp = spec.padded_vocab_size, shape.hidden_size, spec.axis("tp")
        yield Finding(
            f"tied embeddings with pp {pp}: the last stage holds a copy of {rows} · {width} / tp {tp} = "
            f"{rows * width // tp:,} parameters, whose gradient is summed with the first stage's",
            model_path(spec, "tie_word_embeddings"),
        )
