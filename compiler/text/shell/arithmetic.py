"""Whole-number arithmetic of the shell."""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Mapping

_NAME = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_OPERATORS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda left, right: _quotient(left, right),
    ast.Mod: lambda left, right: left - right * _quotient(left, right),
    ast.Pow: operator.pow,
    ast.Lt: lambda left, right: int(left < right),
    ast.Gt: lambda left, right: int(left > right),
    ast.LtE: lambda left, right: int(left <= right),
    ast.GtE: lambda left, right: int(left >= right),
    ast.Eq: lambda left, right: int(left == right),
    ast.NotEq: lambda left, right: int(left != right),
}
LARGEST = 2**63
LONGEST = 2000
"""Characters of an expression that is read."""


def _quotient(left: int, right: int) -> int:
    """Whole division that rounds to zero."""
    found = abs(left) // abs(right)
    return found if (left < 0) == (right < 0) else -found


class UnknownError(Exception):
    """An expression hangs on something that is not known, or cannot be read."""


def evaluate(expression: str, lookup: Callable[[str], int | None]) -> int:
    """The value of `$((expression))`.

    Raises:
        UnknownError: a name in it has no known value, or it is not plain arithmetic.
    """
    if len(expression) > LONGEST:
        raise UnknownError("a long expression")
    text = _NAME.sub(r"\1", expression).strip()
    text = re.sub(r"(?<!/)/(?!/)", "//", text).replace("&&", " and ").replace("||", " or ")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python's compiler, about what stands in the script
            tree = ast.parse(text.replace("\n", " "), mode="eval").body
        return _value(tree, lookup)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        raise UnknownError(expression) from error


def _value(node: ast.expr, lookup: Callable[[str], int | None]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.Name):
        found = lookup(node.id)
        if found is None:
            raise UnknownError(node.id)
        return found
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand, lookup)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, lookup), _value(node.right, lookup)
        if isinstance(node.op, ast.Pow) and not 0 <= right < 64:
            raise UnknownError("power")
        found = _OPERATORS[type(node.op)](left, right)
        if abs(found) > LARGEST:
            raise UnknownError("too large")
        return found
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
        return _OPERATORS[type(node.ops[0])](_value(node.left, lookup), _value(node.comparators[0], lookup))
    if isinstance(node, ast.BoolOp):
        values = [_value(one, lookup) != 0 for one in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.IfExp):
        return _value(node.body if _value(node.test, lookup) else node.orelse, lookup)
    raise UnknownError(ast.dump(node))
