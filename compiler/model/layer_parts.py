"""Parts of a layer that are recomputed on their own: attention, the MLP or the experts in its place, and norms."""

from __future__ import annotations

from .families import FAMILIES, family_of
from .family import Norm, types_with
from .layers import KeysAndValues
from .shape import ModelShape

ATTENTION, MLP, NORMS = PARTS = ("attention", "mlp", "norms")
"""Their names in `training.activation_checkpointing`, where "+" joins several."""

WORDS = (
    *("none", "selective", "norms", "attention", "mlp", "attention+norms", "mlp+norms", "attention+mlp"),
    *("attention+mlp+norms", "full"),
)
"""What `training.activation_checkpointing` may be, of one stage or of all."""


def parts_of(word: str) -> frozenset[str]:
    """The parts that a word of `training.activation_checkpointing` names; none of "none", "selective" and "full"."""
    return frozenset(word.split("+")).intersection(PARTS)


def modules_of(shape: ModelShape, part: str) -> tuple[str, ...]:
    """The names of a part's modules below the layers that have them, where `why_whole` says nothing of it."""
    family = family_of(shape.model_type)
    if part == ATTENTION:
        return (family.attention,)
    if part == NORMS:
        return shape.norms.names
    experts = None if shape.moe is None else family.experts
    return (family.mlp,) if experts is None or experts.block == family.mlp else (family.mlp, experts.block)


def why_whole(shape: ModelShape, parts: frozenset[str]) -> str | None:
    """Why layers of a model are recomputed whole or not at all, not in these parts; None where they may be."""
    family = FAMILIES.get(shape.model_type)
    if shape.user_module is not None or family is None:
        return "a module of your own does not say which of its modules are attention, MLPs and norms"
    stack = shape.stack
    if stack.blocks or stack.runs or stack.shared_blocks or stack.layers_per_module > 1:
        return "its layers are not an attention and an MLP each"
    if shape.parts:
        return "its layers have more than attention and an MLP, or attention chooses its keys"
    if shape.residual.streams or shape.layer_inputs is not None or shape.heads.low_rank is not None:
        return "its layers compute between attention and the MLP"
    kinds = {one.attention.keys_and_values for _, one in shape.by_kind}
    if ATTENTION in parts and KeysAndValues.OF_ANOTHER_LAYER in kinds:
        return "some of its layers attend to keys and values of others"
    if MLP in parts and not family.mlp:
        return "the linears of its MLPs stand in the layer itself"
    if MLP in parts and family.experts is not None and shape.moe is not None and family.experts.adds_mlp:
        return "an MLP stands beside its experts"
    if NORMS in parts and (not shape.norms.names or shape.norms.gate or shape.model_type in WEIGHTED_RESIDUALS):
        return "its norms have no weights, or gates"
    return None


def tiled_norms(shape: ModelShape) -> tuple[str, ...]:
    """The names of the norms, below the layers, that `training.tiled_mlp` computes in tiles: those in fp32."""
    is_rms = FAMILIES[shape.model_type].norm is Norm.WEIGHT and not shape.norms.bias
    return shape.norms.names if is_rms and why_whole(shape, frozenset({NORMS})) is None else ()


WEIGHTED_RESIDUALS = types_with("gated_residuals")
"""Model types whose layers weight both addends of a residual connection, and norm what attention gives."""
