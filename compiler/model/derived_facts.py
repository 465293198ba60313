"""What the rows of a derived table tell of a model: its biases, gates and norms, and whether its head is tied."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from .cutting.attention import OUTPUTS, PROJECTIONS
from .derived_rows import by_hand, derived_rows, of_one
from .families.added import BUILT_IN
from .family import Family
from .plug_in_traits import QkNorm
from .shape import ModelShape
from .table import Parameter
from .tables import table_of

_COMPRESSING = ("q_a_proj", "kv_a_proj_with_mqa")
"""What latent attention projects hidden states with, beside those projections."""
_NORMS_OF_QUERIES = ("q_norm", "q_layernorm", "query_layernorm")


def facts_of(shape: ModelShape) -> dict[str, Any]:
    """Fields of a shape that its rows tell."""
    family, table = BUILT_IN[shape.model_type], derived_rows(shape)
    layer = {of_one(one.name.partition("{layer}.")[2], family): one for one in table.layer}
    weights = {name.removesuffix(".weight"): one for name, one in layer.items() if name.endswith(".weight")}
    # Those of the residual stream, also where only some layers have them.
    norms = {
        name: one for name, one in weights.items() if one.sequence_parallel and "." not in name and len(one.shape) == 1
    }
    attending = {name for name, one in layer.items() if not set(shape.attention_layers).isdisjoint(one.layers or ())}
    mlps = _of_mlps(layer, shape, family)
    of_queries = [one for name, one in weights.items() if _norms_queries(f"{name}.weight", family)]
    found = {
        "qkv_bias": _biased(attending, family.attention, *PROJECTIONS, *_COMPRESSING),
        "attention_output_bias": _biased(attending, family.attention, *OUTPUTS),
        "gated_mlp": all(sum(sizes) != 2 * min(sizes) for sizes in _features(mlps)),
        "mlp_bias": any(name.endswith(".bias") for name in mlps),
        "head_bias": any(one.name == f"{family.head}.bias" for one in table.after),
        "tie_word_embeddings": all(one.name != f"{family.head}.weight" for one in table.after),
        "norm_bias": any(f"{name}.bias" in layer for name in norms),
        "qk_norm": bool(of_queries),
        "norm_over_heads": any(one.split is not None and len(one.shape) == 1 for one in of_queries),
    }
    if family.names_norms:
        return found
    by_layer = Counter(layer for one in norms.values() for layer in one.layers or ())
    return {**found, "norms_per_layer": max(by_layer.values(), default=0), "norm_names": tuple(norms)}


def _of_mlps(layer: Mapping[str, Parameter], shape: ModelShape, family: Family) -> dict[str, Parameter]:
    """What of MLPs and experts is cut by features."""
    shared = family.experts.shared if family.experts is not None else ""
    ends = (f".{family.mlp}", ".experts", *([f".{shared}"] if shared else []))
    # A block may be called as others are.
    layers = range(shape.num_hidden_layers) if shape.blocks is None else (*shape.blocks.mlp, *shape.blocks.experts)
    return {
        name: one
        for name, one in layer.items()
        if one.split is not None
        and set(layers).issuperset(one.layers or ())
        and (f".{_linear(name)}".rpartition(".")[0] or ".").endswith(ends)
    }


def _linear(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias")


def _features(mlps: Mapping[str, Parameter]) -> Iterable[list[int]]:
    """Of each MLP, and of experts together: the widths of what its linears give or take, each along the cut dim."""
    found = defaultdict[str, list[int]](list)
    for name, one in mlps.items():
        if one.split is not None and len(one.shape) > 1 and not name.endswith("bias"):
            found[_linear(name).rpartition(".")[0]].append(one.shape[one.split.dim])
    return found.values()


def norms_queries(model_type: str, family: Family) -> bool:
    """Whether models of a type may norm their queries and keys."""
    table = None if by_hand(model_type) else table_of(model_type)
    if table is None:
        return family.qk_norm is not QkNorm.NONE
    return any(_norms_queries(row.name, family) for row in table.rows)


def _norms_queries(name: str, family: Family) -> bool:
    return f".{name}".endswith(tuple(f".{family.attention}.{norm}.weight" for norm in _NORMS_OF_QUERIES))


def _biased(layer: Iterable[str], module: str, *names: str) -> bool:
    """Whether one of the linears of a module has a bias, also where the module stands in another."""
    ends = tuple(f".{module}.{name}.bias" if module else f".{name}.bias" for name in names)
    return any(f".{name}".endswith(ends) for name in layer)
