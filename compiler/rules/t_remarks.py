"""What tensor parallelism changes without being told, and modules of the user that it divides.

And that it divides a sequence under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Fix, Safety, Severity
from parcompile.layout.groups import Axis
from parcompile.machines.accelerator import accelerators
from parcompile.model.catalogue import SCORE_CAP, SCORE_DROPOUTS
from parcompile.spec.resolve import Resolution, Unavailable
from parcompile.spec.values import workload_of

from .arithmetic import also, listed, model_path, nearest_divisors
from .c_sequence import length_finding
from .registry import Finding, rule
from .t_tensor import tp_fixes

# What tensor parallelism changes without being told: replicated heads, a padded vocabulary, keys without effect.

_TP = ("parallelism", "tp")


@rule("T003", severity=Severity.INFO)
def replicated_kv_heads_are_shown(spec: Resolution) -> Iterator[Finding]:
    """Says how many ranks share a head."""
    tp = spec.axis(Axis.TP)
    for heads in spec.shape.kv_head_counts:
        if tp <= heads or tp % heads:
            continue
        yield Finding(
            f"num_key_value_heads {heads} < tp {tp}: each kv head is held by {tp // heads} ranks",
            _TP,
            related=also(spec, model_path(spec, "num_key_value_heads")),
        )


@rule("T005", severity=Severity.INFO)
def padded_vocabulary_is_shown(spec: Resolution) -> Iterator[Finding]:
    """Says the padded size."""
    vocab, padded, tp = spec.shape.vocab_size, spec.padded_vocab_size, spec.axis(Axis.TP)
    if padded != vocab:
        yield Finding(
            f"vocab_size {vocab} is padded to {padded}, a multiple of {spec.make_vocab_size_divisible_by} · tp {tp}",
            ("parallelism", "make_vocab_size_divisible_by"),
            help=f"another tp pads to another size; {padded - vocab} rows are never used",
        )


@rule("T006", severity=Severity.WARNING)
def sequence_parallel_needs_tp(spec: Resolution) -> Iterator[Finding]:
    """Fires when sequence_parallel is on at tp 1."""
    path = ("parallelism", "sequence_parallel")
    if spec.sequence_parallel and spec.axis(Axis.TP) == 1:
        yield Finding(
            "sequence_parallel has no effect with tp 1: the plan switches it off",
            path,
            help="remove it, or set tp to 2 or more",
            fixes=(Fix.removing(path, Safety.SAFE),),
            related=also(spec, _TP),
        )


@rule("T010", severity=Severity.INFO, targets=("megatron",))
def megatron_needs_one_connection(spec: Resolution) -> Iterator[Finding]:
    """Says what has to be exported before Megatron-LM starts."""
    tp, cp, accelerator = spec.axis(Axis.TP), spec.axis(Axis.CP), spec.cluster.accelerator
    machine = accelerators().get(accelerator)  # none, where a file that cannot be used is named
    if (tp > 1 or cp > 1) and machine is not None and machine.starts_kernels_in_turn:
        yield Finding(
            f"tp {tp}, cp {cp} on {accelerator}: export CUDA_DEVICE_MAX_CONNECTIONS=1 for Megatron-LM",
            _TP if tp > 1 else ("parallelism", "cp"),
        )


@rule("T007", severity=Severity.WARNING)
def sequence_divides_over_tp(spec: Resolution) -> Iterator[Finding]:
    """Fires when the local sequence cannot be split over tp."""
    length, cp, tp = spec.sequence_length, spec.axis(Axis.CP), spec.axis(Axis.TP)
    if spec.sequence_parallel and length % cp == 0 and (length // cp) % tp:
        local = length // cp
        yield length_finding(
            spec,
            f"(sequence_length {length} / cp {cp}) % tp {tp} = {local % tp}: with sequence_parallel the ranks hold "
            f"{-(-local // tp)} tokens each, {-local % tp} of them padding",
            also(spec, ("parallelism", "tp"), ("parallelism", "sequence_parallel")),
        )


@rule("T013", severity=Severity.WARNING, targets=("runtime",))
def attention_is_fused(spec: Resolution) -> Iterator[Finding]:
    """Fires for plans on GPUs of which some layers have no fused kernel."""
    if spec.cluster.accelerator == "cpu":
        return
    # Only here: a check of a spec for CPUs needs neither.
    from parcompile.cost.attention_kernels import attention_kernels
    from parcompile.cost.step import plain_slowdown
    from parcompile.machines.attention_kernels import PLAIN

    try:
        work = workload_of(spec.spec())
        plain = [one for one in attention_kernels(work) if one.choice.kernel == PLAIN]
        times = plain_slowdown(work) if plain else 1.0
    except ValueError:
        raise Unavailable("layout") from None  # another rule says why there is none
    for reason in dict.fromkeys(one.choice.reason for one in plain):
        layers = sum(one.layers for one in plain if one.choice.reason == reason)
        yield Finding(
            f"the attention of {layers} of {spec.shape.num_hidden_layers} layers takes the plain kernel on "
            f"{spec.cluster.accelerator}: {reason}. A step takes about {times:.1f} times as long as with fused kernels",
            model_path(spec, SCORE_CAP, *SCORE_DROPOUTS),
            help=next((way for word, way in _FUSED_WAYS.items() if word in reason), None),
        )


_FUSED_WAYS = {
    "soft-capping": "install the package flash_attn, 2.7 or later, on the GPUs: its kernel has soft-capping",
    "dropout": "set the attention dropout of the model to 0",
    "adds nothing": "shorter sequences, of which each query sees every key, take a fused kernel",
    "sliding window": "train in bf16: FlashAttention has windows",
    "no fused kernel": "train in bf16, on a GPU of compute capability 8.0 or later",
}
"""What to change, by a word of the reason."""


# A module of the user: tp divides what its rules cut.


@rule("T011")
def module_divides(spec: Resolution) -> Iterator[Finding]:
    """Fires for each rule whose parts tp does not divide."""
    shape, tp = spec.shape, spec.axis(Axis.TP)
    if shape.user_module is None:
        return
    splits = [parameter.split for parameter in spec.parameters if parameter.split]
    cut = [part.units for split in splits for part in split.parts if not split.pads_vocabulary]
    near = nearest_divisors(tp, shape.num_attention_heads, *cut, count=4)
    reported = set()
    for parameter in spec.parameters:
        if parameter.split is None or parameter.split.pads_vocabulary:
            continue
        row = parameter.name.replace("{layer}", "*")
        name = row if row in dict(shape.user_module.injection) else row.rpartition(".")[0]
        # What rules T001 and T002 say of the heads is not said again.
        heads = (shape.num_attention_heads, shape.num_key_value_heads)
        for part in parameter.split.parts:
            if part.units % tp == 0 or name in reported or (part.units != part.size and part.units in heads):
                continue
            reported.add(name)
            what = f"{part.size}" if part.units == part.size else f"{part.units} heads"
            yield Finding(
                f"{row} is split along {what} on tp {tp}: {part.units} / {tp} is not whole; "
                f"nearest tp: {listed(near[:2])}",
                ("model", "injection", name),
                help="choose another tp, or remove the rules of the row and its columns to hold them whole",
                fixes=tp_fixes(spec, near),
                related=also(spec, _TP),
            )
