"""What the rows of a derived table tell of a model: where it has biases, and which norms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from .derived_rows import by_hand, derived_rows, of_one
from .families.added import BUILT_IN
from .family import Family, QkNorm
from .shape import ModelShape
from .tables import table_of

_COMPRESSING = ("q_a_proj", "kv_a_proj_with_mqa")
"""What latent attention projects hidden states with, beside the names of its family."""
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
    shared = family.experts.shared if family.experts is not None else ""
    of_queries = [one for name, one in weights.items() if _norms_queries(f"{name}.weight", family)]
    found = {
        "qkv_bias": _biased(layer, family.attention, *family.qkv, *_COMPRESSING),
        "attention_output_bias": _biased(layer, family.attention, family.output),
        "mlp_bias": _biased(layer, family.mlp, family.down) or bool(shared and _biased(layer, shared, family.down)),
        "head_bias": any(one.name == f"{family.head}.bias" for one in table.after),
        "norm_bias": any(f"{name}.bias" in layer for name in norms),
        "qk_norm": bool(of_queries),
        "norm_over_heads": any(one.split is not None and len(one.shape) == 1 for one in of_queries),
    }
    if family.names_norms:
        return found
    by_layer = Counter(layer for one in norms.values() for layer in one.layers or ())
    return {**found, "norms_per_layer": max(by_layer.values(), default=0), "norm_names": tuple(norms)}


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
