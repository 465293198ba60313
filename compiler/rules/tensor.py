"""What tensor parallelism cuts has to be divisible: heads, kv heads, MLP width, vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.resolve import Resolution

from .arithmetic import listed, nearest_divisors
from .registry import Finding, rule

_TP = ("parallelism", "tp")


def _legal_tp(spec: Resolution) -> tuple[int, ...]:
    """The tp sizes nearest to the spec's that cut heads, kv heads and MLP evenly."""
    shape = spec.shape
    divisors = nearest_divisors(spec.axis("tp"), shape.num_attention_heads, shape.intermediate_size, count=99)
    kv_heads = shape.num_key_value_heads
    return tuple(tp for tp in divisors if kv_heads % tp == 0 or tp % kv_heads == 0)[:2]


def _indivisible(spec: Resolution, name: str, size: int) -> Finding:
    tp = spec.axis("tp")
    near = _legal_tp(spec)
    return Finding(
        f"{name} {size} on tp {tp}: {size} / {tp} is not whole; nearest tp: {listed(near)}",
        _TP,
        help=f"choose a tp that divides {name} {size}",
    )


@rule(
    "T001",
    "attention heads do not divide over tp",
    """Each tensor-parallel rank computes whole attention heads: num_attention_heads % tp = 0.""",
    sources=("Megatron-Core transformer_config.py",),
)
def heads_divide(spec: Resolution) -> Iterator[Finding]:
    """Fires when num_attention_heads % tp is not 0."""
    heads = spec.shape.num_attention_heads
    if heads % spec.axis("tp"):
        yield _indivisible(spec, "num_attention_heads", heads)


@rule(
    "T002",
    "kv heads neither divide over tp nor replicate",
    """Key and value heads are divided over tp when num_key_value_heads % tp = 0, and replicated when tp % num_key_value_heads = 0:
    consecutive ranks then hold the same head.""",
    sources=("Megatron-Core attention.py",),
    targets=("runtime", "megatron"),
)
def kv_heads_divide_or_replicate(spec: Resolution) -> Iterator[Finding]:
    """Fires when neither way divides."""
    heads, tp = spec.shape.num_key_value_heads, spec.axis("tp")
    if heads % tp and tp % heads and spec.shape.num_attention_heads % tp == 0:
        yield Finding(
            f"num_key_value_heads {heads} on tp {tp}: neither {heads} / {tp} nor {tp} / {heads} is whole; "
            f"nearest tp: {listed(_legal_tp(spec))}",
            _TP,
            help="choose a tp that divides the kv heads, or a multiple of them",
        )


@rule(
    "T003",
    "kv heads are replicated",
    """With fewer kv heads than tensor-parallel ranks, several ranks hold the same head: its weights take memory on each of them and their
    gradients are summed.""",
    severity=Severity.INFO,
)
def replicated_kv_heads_are_shown(spec: Resolution) -> Iterator[Finding]:
    """Says how many ranks share a head."""
    heads, tp = spec.shape.num_key_value_heads, spec.axis("tp")
    if tp > heads and tp % heads == 0:
        yield Finding(f"num_key_value_heads {heads} < tp {tp}: each kv head is held by {tp // heads} ranks", _TP)


@rule(
    "T004",
    "the MLP does not divide over tp",
    """The hidden width of the MLP (of each expert, in a mixture of experts) is cut over tp: intermediate_size % tp = 0.""",
)
def mlp_divides(spec: Resolution) -> Iterator[Finding]:
    """Fires when intermediate_size % tp, or an expert's width % tp, is not 0."""
    shape, tp = spec.shape, spec.axis("tp")
    if shape.intermediate_size % tp and (shape.moe is None or shape.moe.first_moe_layer):
        yield _indivisible(spec, "intermediate_size", shape.intermediate_size)
    if shape.moe is not None and shape.moe.intermediate_size % tp:
        yield _indivisible(spec, "the experts' intermediate size", shape.moe.intermediate_size)


@rule(
    "T005",
    "the vocabulary is padded",
    """Embedding and head are cut over tp after padding the vocabulary to a multiple of make_vocab_size_divisible_by · tp. Padded rows
    never receive a token or a gradient; a checkpoint is exported without them.""",
    severity=Severity.INFO,
    sources=("Megatron-LM vocab_utils.py; Megatron-LM#1754",),
)
def padded_vocabulary_is_shown(spec: Resolution) -> Iterator[Finding]:
    """Says the padded size."""
    vocab, padded, tp = spec.shape.vocab_size, spec.padded_vocab_size, spec.axis("tp")
    if padded != vocab:
        yield Finding(
            f"vocab_size {vocab} is padded to {padded}, a multiple of {spec.make_vocab_size_divisible_by} · tp {tp}",
            ("parallelism", "make_vocab_size_divisible_by"),
        )


@rule(
    "T006",
    "sequence parallelism has no effect",
    """Sequence parallelism splits activations over the tensor-parallel ranks; with tp 1 there is nothing to split, and it is switched off.""",
    severity=Severity.WARNING,
    sources=("Megatron-LM arguments.py",),
)
def sequence_parallel_needs_tp(spec: Resolution) -> Iterator[Finding]:
    """Fires when sequence_parallel is on at tp 1."""
    path = ("parallelism", "sequence_parallel")
    if spec.sequence_parallel and spec.axis("tp") == 1:
        yield Finding(
            "sequence_parallel has no effect with tp 1: it is switched off",
            path,
            help="remove it, or set tp to 2 or more",
            fixes=(Fix("remove sequence_parallel", Safety.SAFE, (Edit(path, remove=True),)),),
        )
