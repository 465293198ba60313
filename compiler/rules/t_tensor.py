"""What tensor parallelism cuts has to be divisible: heads, kv heads, MLP width."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Safety
from parcompile.layout.groups import Axis
from parcompile.model.blocks import Divided
from parcompile.model.derived_rows import parameter_table
from parcompile.model.families import FAMILIES, family_of
from parcompile.model.shape import ModelShape
from parcompile.spec.resolve import Resolution

from .arithmetic import also, layout_change, listed, model_path, nearest_divisors
from .registry import Finding, rule

_TP = ("parallelism", "tp")


def _legal_tp(spec: Resolution) -> tuple[int, ...]:
    """The tp sizes that cut heads, kv heads and MLP evenly, nearest to the spec's first."""
    shape = spec.shape
    sizes = [*shape.head_counts]
    sizes += [dealt.size for one in shape.parts if (dealt := one.dealt()) is not None]
    if shape.dense(range(shape.num_hidden_layers)):
        sizes.append(shape.intermediate_size)
    if shape.moe is not None:
        sizes.append(shape.moe.intermediate_size)
    sizes += [one.size for one in _of_parts(shape)]
    groups = _groups(spec)
    near = nearest_divisors(spec.axis(Axis.TP), *sizes, count=99)
    return tuple(
        tp for tp in near if all(heads % tp == 0 or tp % heads == 0 for heads in shape.kv_units) and groups % tp == 0
    )


def _of_parts(shape: ModelShape) -> list[Divided]:
    """What tp has to divide of parameters of the mechanisms that layers have."""
    rows = parameter_table(shape).layer if shape.parts else ()
    named = [(row.name.partition(".{layer}.")[2], row.shape) for row in rows]
    return [one for own, size in named for part in shape.parts for one in part.divided(own, size)]


def _groups(spec: Resolution) -> int:
    """Into how many pieces the projections of queries, keys and values can be cut."""
    shape = spec.shape
    family = family_of(shape.model_type)
    if family.fused_blocks:
        return family.fused_blocks
    if shape.heads.paired:
        return shape.num_attention_heads // 2
    if shape.heads.low_rank is not None:
        return shape.heads.low_rank.output_groups
    interleaved = family.heads_interleaved and shape.num_key_value_heads > 1
    return shape.num_key_value_heads if interleaved else shape.num_attention_heads


def _why(spec: Resolution) -> str:
    """What keeps the heads of a family together."""
    family = family_of(spec.shape.model_type)
    if family.fused_blocks:
        return f"holds queries, keys and values in {family.fused_blocks} blocks of heads in one projection"
    if spec.shape.heads.paired:
        return f"takes the difference of pairs of heads, {spec.shape.num_attention_heads // 2} of them"
    if spec.shape.heads.low_rank is not None:
        return f"projects what its heads give in {spec.shape.heads.low_rank.output_groups} groups (o_groups)"
    return "holds each key and value between its queries in one projection"


def _indivisible(spec: Resolution, message: str, help_text: str, *keys: str) -> Finding:
    near = _legal_tp(spec)
    return Finding(
        f"{message}; nearest tp: {listed(near[:2])}",
        _TP if spec.given(*_TP) else model_path(spec, *keys),
        help=help_text,
        fixes=tp_fixes(spec, near[:4]),
        related=also(spec, model_path(spec, *keys)),
    )


def tp_fixes(spec: Resolution, sizes: tuple[int, ...]) -> tuple[Fix, ...]:
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


@rule("T001")
def heads_divide(spec: Resolution) -> Iterator[Finding]:
    """Fires when num_attention_heads % tp is not 0."""
    tp = spec.axis(Axis.TP)
    heads = next((one for one in spec.shape.head_counts if one % tp), spec.shape.num_attention_heads)
    if heads % tp:
        yield _indivisible(
            spec,
            f"num_attention_heads {heads} on tp {tp}: {heads} / {tp} is not whole",
            f"choose a tp that divides the {heads} heads",
            "num_attention_heads",
        )


@rule("T002")
def kv_heads_divide_or_replicate(spec: Resolution) -> Iterator[Finding]:
    """Fires when neither way divides."""
    tp, paired = spec.axis(Axis.TP), spec.shape.heads.paired
    if not spec.shape.attends:
        return
    indivisible = [heads for heads in spec.shape.kv_units if heads % tp and tp % heads]
    units = indivisible[0] if indivisible else spec.shape.kv_units[0]
    heads = units * (2 if paired else 1)
    pairs = f" in {units} pairs" if paired else ""
    if indivisible and spec.shape.num_attention_heads % tp == 0:
        yield _indivisible(
            spec,
            f"num_key_value_heads {heads}{pairs} on tp {tp}: neither {units} / {tp} nor {tp} / {units} is whole",
            "choose a tp that divides the kv heads, or a multiple of them",
            "num_key_value_heads",
        )
    elif spec.shape.num_attention_heads % tp == 0 and (groups := _groups(spec)) % tp:
        yield _indivisible(
            spec,
            f"num_key_value_heads {heads} on tp {tp}: {spec.shape.model_type} {_why(spec)}, and {groups} / {tp} is not "
            "whole",
            f"choose a tp that divides {groups}"
            if groups != heads or pairs
            else "choose a tp that divides the kv heads",
            "num_key_value_heads",
        )


@rule("T004")
def mlp_divides(spec: Resolution) -> Iterator[Finding]:
    """Fires when intermediate_size % tp, an expert's width % tp, or the rows of a table % tp, is not 0."""
    shape, tp = spec.shape, spec.axis(Axis.TP)
    if shape.user_module is not None:
        return  # rule T011 looks at the module's own weights
    widths = []
    if shape.dense(range(shape.num_hidden_layers)):
        experts = FAMILIES[shape.model_type].experts
        widths.append((experts.dense_width[0] if experts else "intermediate_size", shape.intermediate_size))
    if shape.moe is not None:
        experts = FAMILIES[shape.model_type].experts
        name = experts.width[0] if experts else "moe_intermediate_size"
        if spec.expert_tp is None:  # rule M005 looks at others
            widths.append((name, shape.moe.intermediate_size))
    for name, width in widths:
        if width % tp:
            message = f"{name} {width} on tp {tp}: {width} / {tp} is not whole"
            yield _indivisible(spec, message, f"choose a tp that divides {name} {width}", name)
    for one in _of_parts(shape):
        if one.size % tp:
            message = f"{one.told} on tp {tp}: {one.size} / {tp} is not whole"
            yield _indivisible(spec, message, f"choose a tp that divides {one.size}", one.key)
            return


@rule("T012")
def groups_divide(spec: Resolution) -> Iterator[Finding]:
    """Fires when the groups of a layer with a state do not divide."""
    tp = spec.axis(Axis.TP)
    for one in filter(None, (part.dealt() for part in spec.shape.parts)):
        if one.size % tp:
            message = f"{one.told} on tp {tp}: {one.size} / {tp} is not whole"
            yield _indivisible(spec, message, f"choose a tp that divides the {one.size} {one.each}", one.key)


@rule("T009", targets=("megatron",))
def megatron_experts_need_sequence_parallelism(spec: Resolution) -> Iterator[Finding]:
    """Fires for experts with tp > 1 and no sequence parallelism."""
    path, tp = ("parallelism", "sequence_parallel"), spec.axis(Axis.TP)
    if spec.shape.has_moe and tp > 1 and not spec.sequence_parallel:
        yield Finding(
            f"a mixture of experts with tp {tp} and sequence_parallel false",
            path if spec.given(*path) else _TP,
            help='set "sequence_parallel": true',
            fixes=(Fix.setting(path, True, Safety.CHANGES_COST),),
            related=also(spec, _TP),
        )
