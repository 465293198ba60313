"""What tensor parallelism divides: heads, kv heads, MLP width; and what it changes without being told."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Severity
from parcompile.layout.groups import Axis
from parcompile.model.blocks import Divided
from parcompile.model.catalogue import SCORE_CAP, SCORE_DROPOUTS
from parcompile.model.derived_rows import parameter_table
from parcompile.model.families import family_of
from parcompile.model.shape import ModelShape
from parcompile.spec.resolve import Resolution, Unavailable

from . import Finding, also, layout_change, listed, model_path, nearest_divisors, rule

_TP = ("parallelism", "tp")


def legal_tp(spec: Resolution) -> tuple[int, ...]:
    """The tp sizes that cut heads, kv heads and MLP evenly, nearest to the spec's first."""
    shape = spec.shape
    sizes = [*shape.head_counts]
    sizes += [dealt.size for one in shape.parts if (dealt := one.dealt()) is not None]
    if shape.dense(range(shape.num_hidden_layers)):
        sizes.append(shape.intermediate_size)
    if shape.moe is not None:
        sizes.append(shape.moe.intermediate_size)
    sizes += [one.size for one in parts_that_tp_divides(shape)]
    groups, _ = groups_of_heads(spec)
    near = nearest_divisors(spec.axis(Axis.TP), *sizes, count=99)
    return tuple(
        tp for tp in near if all(heads % tp == 0 or tp % heads == 0 for heads in shape.kv_units) and groups % tp == 0
    )


def parts_that_tp_divides(shape: ModelShape) -> list[Divided]:
    """What tp has to divide of parameters of the mechanisms that layers have."""
    rows = parameter_table(shape).layer if shape.parts else ()
    named = [(row.name.partition(".{layer}.")[2], row.shape) for row in rows]
    return [one for own, size in named for part in shape.parts for one in part.divided(own, size)]


def groups_of_heads(spec: Resolution) -> tuple[int, str]:
    """Into how many pieces the projections of queries, keys and values can be cut, and what keeps heads together."""
    shape, family = spec.shape, family_of(spec.shape.model_type)
    if blocks := family.fused_blocks:
        return blocks, f"holds queries, keys and values in {blocks} blocks of heads in one projection"
    if shape.heads.paired:
        pairs = shape.num_attention_heads // 2
        return pairs, f"takes the difference of pairs of heads, {pairs} of them"
    if shape.heads.low_rank is not None:
        groups = shape.heads.low_rank.output_groups
        return groups, f"projects what its heads give in {groups} groups (o_groups)"
    interleaved = family.heads_interleaved and shape.num_key_value_heads > 1
    heads = shape.num_key_value_heads if interleaved else shape.num_attention_heads
    return heads, "holds each key and value between its queries in one projection"


def fixes_of_tp(spec: Resolution, sizes: tuple[int, ...]) -> tuple[Fix, ...]:
    """Other sizes of tp; where dp is given, it takes up the difference."""
    fixes = []
    dp_path = ("parallelism", "dp")
    for tp in sizes:
        edits = [Edit(_TP, tp)]
        title = f"set tp to {tp}"
        if spec.given(*dp_path) and Axis.DP not in spec.auto_axes:
            ranks = spec.axis(Axis.TP) * spec.axis(Axis.DP)
            if ranks % tp == 0:
                edits.append(Edit(dp_path, ranks // tp))
                title += f" and dp to {ranks // tp}"
        fixes.append(Fix(title, layout_change(spec), tuple(edits)))
    return tuple(fixes)


# What tensor parallelism changes without being told: replicated heads, a padded vocabulary, keys without effect.


@rule("T013", severity=Severity.WARNING, targets=("runtime",))
def attention_is_fused(spec: Resolution) -> Iterator[Finding]:
    if spec.cluster.accelerator == "cpu":
        return
    # Only here: a check of a spec for CPUs needs neither.
    from parcompile.cost.attention_kernels import attention_kernels
    from parcompile.cost.step import plain_slowdown
    from parcompile.machines.attention_kernels import PLAIN

    try:
        work = spec.work
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
                fixes=fixes_of_tp(spec, near),
                related=also(spec, _TP),
            )
