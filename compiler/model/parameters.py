"""Every parameter of a model, in the order in which it registers them, with how tensor parallelism cuts each.

Rows come from the derived table of the type, which a plug-in's family brings itself; those of a user module as the spec
lists them, cut by its rules.
"""

from __future__ import annotations

from .derived_rows import derived_rows
from .shape import ModelShape
from .table import Parameter, ParameterTable, Part, Split, vocabulary
from .user_module import LAYER, InjectionRule, UserModule


def parameter_table(shape: ModelShape) -> ParameterTable:
    """The parameters of a model of this shape."""
    return derived_rows(shape) if shape.user_module is None else _user_module_table(shape, shape.user_module)


def _user_module_table(shape: ModelShape, module: UserModule) -> ParameterTable:
    """The rows before, in and after the layers."""
    found = [_row(shape, module, name, size) for name, size in module.parameters]
    inside = [place for place, row in enumerate(found) if row.layers is not None]
    first, last = inside[0], inside[-1] + 1
    return ParameterTable(tuple(found[:first]), tuple(found[first:last]), tuple(found[last:]), shape.num_hidden_layers)


def _row(shape: ModelShape, module: UserModule, name: str, size: tuple[int, ...]) -> Parameter:
    rule = module.rule_of(name)
    kind = None if rule is None else rule.kind
    split: Split | None = None
    if kind == "vocab":
        split = vocabulary(size[0])
    elif rule is not None and (kind == "column" or (kind == "row" and not name.endswith(".bias"))):
        dim = 0 if kind == "column" else 1
        split = Split(dim, _parts(shape, module, name, size[dim], rule))
    return Parameter(
        name.replace(LAYER, "{layer}"),
        size,
        split,
        layers=range(shape.num_hidden_layers) if LAYER in name else None,
        sequence_parallel=split is None and kind != "partial",
        partial=kind == "partial",
    )


def _parts(shape: ModelShape, module: UserModule, name: str, size: int, rule: InjectionRule) -> tuple[Part, ...]:
    """A linear of an attention module that is as wide as the heads is cut by heads; others are by elements."""
    if rule.units:
        return tuple(Part(size // sum(rule.units) * units, units) for units in rule.units)
    if any(name.startswith(f"{attention}.") for attention in module.attentions):
        for heads in (shape.num_attention_heads, shape.num_key_value_heads):
            if size == heads * shape.head_dim:
                return (Part(size, heads),)
    return (Part(size, size),)
