"""How layers that carry a state are cut: by groups of heads, or by channels."""

from __future__ import annotations

from parcompile.model.recurrent.shape import RecurrentKind, RecurrentShape
from parcompile.model.table import Part, Split

from .cut import PARTIAL, STREAM, Cut, rows

_SCALARS = ("A_log", "D", "dt_bias")


def recurrent_cut(module: str, dims: int, shape: RecurrentShape) -> Cut:
    """The cut of `module` (`in_proj.weight`), a parameter of that many dims, in a layer with a state of this shape."""
    name, _, kind = module.rpartition(".")
    own = (name if kind in ("weight", "bias") else module).rpartition(".")[2]
    if own in ("out_proj", "o_proj"):
        return STREAM if kind == "bias" else rows(Part(shape.values, _units(shape)), transposed=False)
    if own == "x_proj":
        return rows(Part(shape.values, shape.values), transposed=False)
    parts = _OF_KIND.get(shape.kind, _of_heads)(shape).get(own)
    if parts is None:
        return PARTIAL  # one for all heads, or few features of which every rank makes those of its own heads
    return Cut(Split(dims // 2 if own in _SCALARS and dims > len(_SCALARS) else 0, parts))


def _units(shape: RecurrentShape) -> int:
    """The pieces of what the output projection takes that are never cut."""
    if shape.kind in (RecurrentKind.MAMBA1, RecurrentKind.SHORT_CONVOLUTION):
        return shape.values
    return shape.heads if shape.kind is RecurrentKind.MAMBA2 else shape.groups


_Parts = dict[str, tuple[Part, ...]]


def _of_channels(shape: RecurrentShape) -> _Parts:
    channels = (Part(shape.values, shape.values),)
    return {**dict.fromkeys(("A_log", "D", "conv1d", "dt_proj"), channels), "in_proj": channels * 2}


def _of_state_space(shape: RecurrentShape) -> _Parts:
    fused = input_parts(shape)
    return {
        **dict.fromkeys(_SCALARS, fused[4:]),
        "conv1d": fused[1:4],
        "in_proj": fused,
        "norm": fused[:1],
    }


def input_parts(shape: RecurrentShape) -> tuple[Part, ...]:
    """What the input projection of a Mamba-2 layer gives.

    Gate, channels of the convolution (x, B, C), and a step size of each head. Tensor parallelism cuts heads, and groups
    with them; ranks that have heads of one group hold its rows each.
    """
    values, groups = Part(shape.values, shape.heads), Part(shape.keys, shape.groups)
    return values, values, groups, groups, Part(shape.heads, shape.heads)


def _of_convolution(shape: RecurrentShape) -> _Parts:
    channels = (Part(shape.values, shape.values),)
    return {"conv": channels, "in_proj": channels * 3}  # two gates and the values


def _of_heads(shape: RecurrentShape) -> _Parts:
    """Of layers whose heads have a matrix each."""
    groups = shape.groups
    keys, values, heads = (Part(size, groups) for size in (shape.keys, shape.values, shape.heads))
    found: _Parts = {
        # A group has its query, its key, its values and their gates one after the other.
        "in_proj_qkvz": (Part(2 * (shape.keys + shape.values), groups),),
        "in_proj_ba": (Part(2 * shape.heads, groups),),
        # A head has its query, its key and its value one after the other.
        "qkv_proj": (Part(shape.channels, groups),),
        **dict.fromkeys(("in_proj_qkv", "conv1d"), (keys, keys, values)),
        **dict.fromkeys(("q_proj", "k_proj"), (keys,)),
        **dict.fromkeys(("in_proj_z", "v_proj", "g_proj", "f_proj", "output_gate", "f_b_proj", "g_b_proj"), (values,)),
        **dict.fromkeys(("in_proj_b", "in_proj_a", "b_proj", "a_proj", "dt_bias", "A_log"), (heads,)),
    }
    if shape.kind is RecurrentKind.KIMI_DELTA_ATTENTION:
        found["dt_bias"] = (values,)  # a decay for each channel
    if shape.kind is RecurrentKind.LIGHTNING_ATTENTION:
        found["norm"] = (values,)  # over all heads together
    return found


_OF_KIND = {
    RecurrentKind.MAMBA1: _of_channels,
    RecurrentKind.MAMBA2: _of_state_space,
    RecurrentKind.SHORT_CONVOLUTION: _of_convolution,
}
