"""How the MLP of a layer and its experts are cut: by the features between their projections."""

from __future__ import annotations

from parcompile.model.catalogue import CORRECTION_BIASES
from parcompile.model.family import Experts, Family
from parcompile.model.table import Part, Split
from parcompile.model.tables import Repeated

from .cut import FROZEN, PARTIAL, STREAM, Cut, columns, rows
from .keys import leading_key, own_key


def mlp_cut(module: str, one: Repeated, family: Family, *, inside: bool = False) -> Cut:
    """The cut of `module` (`gate_proj.weight`); `inside` a block of experts its sum is the block's."""
    hidden, dims = own_key(family, "hidden_size"), len(one.shape)
    features = one.row.shape[-1 if family.transposed else 0]
    if module.rpartition(".")[2] not in ("weight", "bias"):
        return PARTIAL  # a number of the activation
    if features == hidden and dims == 1:
        return PARTIAL if inside else STREAM
    if features == hidden:
        width = one.shape[0 if family.transposed else -1]
        return rows(Part(width, width), transposed=family.transposed)
    size = one.shape[-1 if family.transposed else 0]
    count = 2 if features.startswith("2 * ") and leading_key(features) != hidden else 1  # all gates, then all others
    return columns((Part(size // count, size // count),) * count, dims, transposed=family.transposed)


def block_cut(module: str, one: Repeated, family: Family, names: Experts) -> Cut:
    """The cut of `module` of a block of experts."""
    first, _, rest = module.partition(".")
    if first == "experts":
        return _expert_cut(rest, one, family, names)
    if names.shared and first == names.shared:
        return mlp_cut(rest, one, family, inside=True)
    if one.row.shape == (own_key(family, "hidden_size"),):
        return STREAM  # a norm of what the block gives
    if module.rpartition(".")[2] in CORRECTION_BIASES:
        return FROZEN
    # The tokens of the whole sequence pass the router on every rank, and come back from the rank's slice of the
    # experts: the gradient is a part.
    return PARTIAL


def _expert_cut(name: str, one: Repeated, family: Family, names: Experts) -> Cut:
    if name == "down_proj_bias":
        # Whole on every rank, and added by the first: the gradient of the others is zero.
        return Cut(None, 0, partial=True)
    if len(one.shape) == 1:
        return PARTIAL  # a norm of what experts give, of all ranks' tokens
    hidden = own_key(family, "hidden_size") if names.taken is None else names.taken[0]
    dim = next(dim for dim, text in enumerate(one.row.shape) if dim and leading_key(text) != hidden)
    size = one.shape[dim]
    if not name.startswith("gate_up"):
        return Cut(Split(dim, (Part(size, size),)), 0)
    # Pairs of a gate and an up column stay together where they alternate.
    return Cut(Split(dim, (Part(size, size // 2),) if names.interleaved else (Part(size // 2, size // 2),) * 2), 0)
