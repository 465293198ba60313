"""Expressions over the keys of a configuration, as the derived tables hold them.

They are a small part of Python: keys by name (`hidden_size`, `text_config.hidden_size`), numbers, text, `None`,
arithmetic, comparisons, `and`, `or`, `not`, `x if condition else y`, entries (`layer_types[layer]`), lists, list
comprehensions over `range`, and the functions `ceil`, `int`, `is_count` (of a whole number of 1 or more), `len` and
`sum_of_primes`. Nothing else is taken, and nothing is executed.

A key that a configuration does not have is None. A comparison that cannot be made (`None > 0`, an entry beyond the
end of a list) is false: the code of the model would not have come there.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any

from parcompile.model import ModelConfigError

# Primes: tables of hashed n-grams have as many rows as a prime says, one of its own for each head (Qwen4-Exp).

_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""These bases tell primes from other numbers below 3.3e24 (Sorenson and Webster, arXiv 1509.00864)."""
MOST = 100_000
"""So many primes are counted at most."""


@functools.lru_cache(maxsize=256)
def sum_of_primes(start: int, before: int, count: int) -> int:
    """The sum of `count` primes that follow one another: of those that are `start` or more, behind the first `before`.

    Raises:
        ValueError: they are more than anybody has tables for.
    """
    if before < 0 or count < 0 or before + count > MOST:
        raise ValueError(f"{before} + {count} primes are not counted: at most {MOST} are")
    number, found, total = max(start, 2), 0, 0
    while found < before + count:
        if is_prime(number):
            total += number if found >= before else 0
            found += 1
        number += 1
    return total


def is_prime(number: int) -> bool:
    """Whether a number has no divisor but 1 and itself (Miller and Rabin's test)."""
    if number < 2 or any(number % one == 0 for one in _WITNESSES):
        return number in _WITNESSES
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(number, pow(one, odd, number), twos) for one in _WITNESSES)


def _passes(number: int, power: int, twos: int) -> bool:
    if power in (1, number - 1):
        return True
    return any((power := power * power % number) == number - 1 for _ in range(twos - 1))


Scope = Mapping[str, Any]
"""Values under flat names: those of a nested configuration stand under `text_config.hidden_size`."""

Compiled = Callable[[Scope], Any]


class TableError(ModelConfigError):
    """A configuration that the table of its type does not tell the parameters of, or text that is no expression."""


NULL = "{} is null, and parameters follow from it: write a number"
"""Of a key that has no value: a configuration leaves it out, or says null, and its class has none for it."""

_CANNOT = (TypeError, IndexError, KeyError, ValueError, ZeroDivisionError)

_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: Mapping[type[ast.AST], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "ceil": math.ceil,
    "int": int,
    "is_count": lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0,
    "len": len,
    "range": range,
    "sum_of_primes": sum_of_primes,
}


def evaluate(text: str, scope: Scope) -> Any:
    """The value of an expression for a configuration.

    Raises:
        TableError: the text is no expression, or it cannot be computed for this configuration.
    """
    try:
        return compiled(text)(scope)
    except _CANNOT as error:
        if not isinstance(error, TableError):
            for key in sorted(names(text)):
                if scope.get(key) is None:
                    raise TableError(NULL.format(key), key) from None
        raise TableError(f"{text} cannot be computed: {error}") from None


@functools.cache
def compiled(text: str) -> Compiled:
    """The function from a configuration to the value of an expression.

    Raises:
        TableError: the text is no expression.
    """
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        raise TableError(f"{text!r} is no expression") from None
    return _compile(tree.body)


@functools.cache
def names(text: str) -> frozenset[str]:
    """The keys that an expression reads, `layer` and its like among them; no name that a comprehension gives."""

    def read(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Name | ast.Attribute):
            return {_dotted(node)}
        found = {name for child in ast.iter_child_nodes(node) for name in read(child)}
        given = {ast.unparse(loop.target) for loop in node.generators} if isinstance(node, ast.ListComp) else set()
        return found - given

    return frozenset(read(ast.parse(text, mode="eval")) - _FUNCTIONS.keys())


def _dotted(node: ast.expr) -> str:
    """The text of a node; that of a name, of which every expression has some, in a sixth of the time."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ast.unparse(node)


def _compile(node: ast.expr) -> Compiled:
    make = _MAKERS.get(type(node))
    if make is None:
        raise TableError(f"{ast.unparse(node)}: {type(node).__name__} is not part of the language")
    return make(node)


def _constant(node: ast.Constant) -> Compiled:
    value = node.value
    return lambda _: value


def _key(node: ast.Name | ast.Attribute) -> Compiled:
    name = _dotted(node)
    return lambda scope: scope.get(name)


def _binary(node: ast.BinOp) -> Compiled:
    left, right, apply = _compile(node.left), _compile(node.right), _OPERATORS.get(type(node.op))
    if apply is None:
        raise TableError(f"{ast.unparse(node)}: this operator is not part of the language")
    return lambda scope: apply(left(scope), right(scope))


def _unary(node: ast.UnaryOp) -> Compiled:
    operand = _compile(node.operand)
    if isinstance(node.op, ast.Not):
        return lambda scope: not operand(scope)
    if isinstance(node.op, ast.USub):
        return lambda scope: -operand(scope)
    raise TableError(f"{ast.unparse(node)}: this operator is not part of the language")


def _boolean(node: ast.BoolOp) -> Compiled:
    parts = [_compile(value) for value in node.values]
    if isinstance(node.op, ast.And):
        return lambda scope: all(part(scope) for part in parts)
    return lambda scope: any(part(scope) for part in parts)


def _comparison(node: ast.Compare) -> Compiled:
    if len(node.ops) != 1 or type(node.ops[0]) not in _COMPARISONS:
        raise TableError(f"{ast.unparse(node)}: this comparison is not part of the language")
    left, right, compare = _compile(node.left), _compile(node.comparators[0]), _COMPARISONS[type(node.ops[0])]
    if isinstance(node.ops[0], ast.In) and isinstance(node.comparators[0], ast.Name):
        right = _once_a_list(right, _as_set)

    def value(scope: Scope) -> bool:
        try:
            return bool(compare(left(scope), right(scope)))
        except _CANNOT:
            return False

    return value


def _as_set(listed: Any) -> Any:
    try:
        return frozenset(listed) if isinstance(listed, list) else listed
    except TypeError:  # it lists lists
        return listed


def _choice(node: ast.IfExp) -> Compiled:
    test, yes, no = _compile(node.test), _compile(node.body), _compile(node.orelse)
    return lambda scope: yes(scope) if test(scope) else no(scope)


def _entry(node: ast.Subscript) -> Compiled:
    owner, index = _compile(node.value), _compile(node.slice)

    def value(scope: Scope) -> Any:
        at = index(scope)
        if isinstance(at, int) and at < 0:
            raise IndexError(at)
        return owner(scope)[at]

    return value


def _list(node: ast.List) -> Compiled:
    parts = [_compile(value) for value in node.elts]
    return lambda scope: [part(scope) for part in parts]


def _comprehension(node: ast.ListComp) -> Compiled:
    (loop,) = node.generators
    if not isinstance(loop.target, ast.Name):
        raise TableError(f"{ast.unparse(node)}: a list comprehension has one name")
    name, source, element = loop.target.id, _compile(loop.iter), _compile(node.elt)
    tests = [_compile(test) for test in loop.ifs]

    def value(scope: Scope) -> list[Any]:
        inner = ({**scope, name: item} for item in source(scope))
        return [element(one) for one in inner if all(test(one) for test in tests)]

    return value


def _smaller(source: Compiled, limit: Compiled) -> Compiled:
    """`len([number for number in source if number < limit])`: asked of every layer, so a list is sorted once."""
    ascending = _once_a_list(source, lambda listed: sorted(one for one in listed if isinstance(one, int | float)))
    return lambda scope: bisect_left(ascending(scope), limit(scope))


def _once_a_list(source: Compiled, made: Callable[[Any], Any]) -> Compiled:
    """What is made of a list, which an expression may read once for every layer: made anew for another list only."""
    last: list[Any] = [None, None]

    def value(scope: Scope) -> Any:
        if (listed := source(scope)) is not last[0] or listed is None:
            last[:] = listed, made(listed)
        return last[1]

    return value


def _call(node: ast.Call) -> Compiled:
    if not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS or node.keywords:
        raise TableError(f"{ast.unparse(node)}: this function is not part of the language")
    match node:
        case ast.Call(
            func=ast.Name("len"),
            args=[
                ast.ListComp(
                    elt=ast.Name(name),
                    generators=[
                        ast.comprehension(
                            target=ast.Name(of_loop),
                            iter=source,
                            ifs=[ast.Compare(left=ast.Name(compared), ops=[ast.Lt()], comparators=[ast.Name(limit)])],
                        )
                    ],
                )
            ],
        ) if name == of_loop == compared != limit:
            return _smaller(_compile(source), _key(ast.Name(limit)))
    function, arguments = _FUNCTIONS[node.func.id], [_compile(argument) for argument in node.args]
    return lambda scope: function(*(argument(scope) for argument in arguments))


_MAKERS: Mapping[type[ast.AST], Callable[[Any], Compiled]] = {
    ast.Constant: _constant,
    ast.Name: _key,
    ast.Attribute: _key,
    ast.BinOp: _binary,
    ast.UnaryOp: _unary,
    ast.BoolOp: _boolean,
    ast.Compare: _comparison,
    ast.IfExp: _choice,
    ast.Subscript: _entry,
    ast.List: _list,
    ast.ListComp: _comprehension,
    ast.Call: _call,
}
