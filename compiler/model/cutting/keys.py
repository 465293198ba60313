"""Which key of a configuration the expression of a dim counts."""

from __future__ import annotations

import ast
import functools

from parcompile.model.family import Family


@functools.cache
def leading_key(text: str) -> str | None:
    """The key that a dim is a multiple of, as the expression writes it first: `heads` of `heads * width`."""
    return _leading(ast.parse(text, mode="eval").body)


def _leading(node: ast.expr) -> str | None:
    if isinstance(node, ast.IfExp):
        return _leading(node.body)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add):
        found = _leading(node.left)
        return found if found is not None or isinstance(node.op, ast.Add) else _leading(node.right)
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else None


def own_key(family: Family, name: str) -> str | None:
    """What the configurations of a family call a key; None where they have none."""
    return family.keys.get(name, name)
