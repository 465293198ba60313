"""Configurations that are written as Python functions: read with `ast`, never run.

A configuration is a function without required arguments that returns what it has built by calls and assignments.
Functions of other files are followed where the file is found above the first one or on the module path. What cannot be
told from the text (a call of something else, a branch that hangs on it) stays open, with what decides it.
"""

from __future__ import annotations

import ast
import copy
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parcompile.user_files import read_bytes

from .document import SourceError, SourceText

LARGEST_BYTES = 1 << 20
MOST_STEPS, MOST_VALUES, MOST_CALLS, PARENTS = 20_000, 5_000, 40, 6
_LENGTH = 80
"""Characters of an expression that a message shows."""


class Open(str):
    """The text of a value that the file does not decide; `by` is what does."""

    __slots__ = ("by",)
    by: str

    def __new__(cls, text: str, by: str) -> Open:
        """A text with what decides its value."""
        made = super().__new__(cls, text if len(text) <= _LENGTH else f"{text[:_LENGTH]}…")
        made.by = by
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """How it is copied."""
        return Open, (str(self), self.by)


@dataclass
class Made:
    """What a call has made: the dotted name of what was called, its only positional text, and its attributes."""

    name: str
    said: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def is_left(self) -> bool:
        """Whether a function made it that is not followed, and what it sets is not known."""
        return self.name.rpartition(".")[2].lstrip("_")[:1].islower()


@dataclass(frozen=True)
class _Name:
    """Something of a file that is not read."""

    dotted: str


@dataclass(frozen=True)
class _Function:
    node: ast.FunctionDef
    module: _Module


@dataclass(frozen=True)
class _Method:
    owner: Made


class _Return(Exception):  # noqa: N818 - no error: how a function ends
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


@dataclass(eq=False)
class _Module:
    file: Path
    names: dict[str, ast.AST]


@dataclass(frozen=True)
class Configuration:
    """What a function builds: the whole, and every part of it by its path.

    A part that a call has made stands beside its attributes. `unread` are calls and other statements that may change
    something and are not followed.
    """

    built: Made
    parts: Mapping[tuple[str, ...], Any]
    unread: tuple[str, ...]


def parsed_python(source: SourceText) -> ast.Module:
    """The syntax of a file.

    Raises:
        SourceError: it is no Python.
    """
    try:
        return ast.parse(source.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        raise SourceError(f"{source.file}{f':{line}' if line else ''}: this is no Python: {error}") from None


def functions(tree: ast.Module) -> list[str]:
    """Functions of a file that may be configurations: public, and without required arguments."""
    return [
        one.name
        for one in tree.body
        if isinstance(one, ast.FunctionDef)
        and not one.name.startswith("_")
        and len(one.args.args) == len(one.args.defaults)
        and any(isinstance(part, ast.Return) and part.value is not None for part in ast.walk(one))
    ]


def configuration(source: SourceText, function: str, kept: re.Pattern[str]) -> Configuration:
    """What a function of a file builds.

    Args:
        source: the file.
        function: its name; required arguments are objects of which nothing is known.
        kept: names of functions whose calls are taken as they are written.

    Raises:
        SourceError: it builds nothing, or takes too long to follow.
    """
    reader = _Reader(source, kept)
    module = reader.module(Path(source.file), parsed_python(source))
    node = module.names.get(function)
    if not isinstance(node, ast.FunctionDef):
        raise SourceError(f"{source.file} has no function {function}")
    required = node.args.args[: len(node.args.args) - len(node.args.defaults)]
    given = [Made(f"{function}.{one.arg}") for one in required]
    try:
        built = reader.called(_Function(node, module), given, {})
    except RecursionError:
        raise SourceError(f"{source.file}: {function} is nested too deeply") from None
    if not isinstance(built, Made):
        raise SourceError(f"{source.file}:{node.lineno}: {function} returns no configuration that can be read")
    parts = _parts(built)
    if parts is None:
        raise SourceError(f"{source.file}:{node.lineno}: what {function} returns holds itself, or too much")
    return Configuration(built, parts, tuple(dict.fromkeys(reader.unread)))


def _parts(made: Made) -> dict[tuple[str, ...], Any] | None:
    """Everything that was built, by its path; None where it has no end."""
    found: dict[tuple[str, ...], Any] = {}
    waiting: list[tuple[tuple[str, ...], Made]] = [((), made)]
    for path, one in waiting:
        for name, value in one.fields.items():
            where = (*path, name)
            if len(found) > MOST_VALUES or len(where) > MOST_CALLS:
                return None
            found[where] = value.dotted if isinstance(value, _Name) else value
            if isinstance(value, Made):
                waiting.append((where, value))
            elif isinstance(value, (list, dict)) and not _is_small(value):
                found[where] = Open(name, "Python, which is not run")
    return found


def _is_small(value: list[Any] | dict[Any, Any]) -> bool:
    """Whether lists in lists hold no more than a message could show."""
    waiting: list[Any] = [value]
    for one in waiting:
        waiting += one if isinstance(one, list) else one.values() if isinstance(one, dict) else ()
        if len(waiting) > MOST_VALUES:
            return False
    return True


_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.eq,
    ast.IsNot: operator.ne,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}


_SAYS_NOTHING = (
    *(ast.Expr, ast.Pass, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assert, ast.Raise),
    *(ast.Global, ast.Nonlocal, ast.AnnAssign, ast.Break, ast.Continue),
)
"""Statements that give no value to a part of a configuration, where they are no calls and no assignments."""


class _Reader:
    def __init__(self, source: SourceText, kept: re.Pattern[str]) -> None:
        self.source = source
        self.kept = kept
        self.unread: list[str] = []
        self._modules: dict[Path, _Module | None] = {}
        self._steps = self._depth = 0
        self._condition: str | None = None

    # Files.

    def module(self, file: Path, tree: ast.Module) -> _Module:
        names: dict[str, ast.AST] = {}
        for one in ast.walk(tree):
            if isinstance(one, (ast.Import, ast.ImportFrom)):
                names |= dict(_imported(one))
        for one in tree.body:
            if isinstance(one, (ast.FunctionDef, ast.ClassDef)):
                names[one.name] = one
            elif isinstance(one, (ast.Assign, ast.AnnAssign)) and one.value is not None:
                targets = one.targets if isinstance(one, ast.Assign) else [one.target]
                names |= {target.id: one.value for target in targets if isinstance(target, ast.Name)}
        return _Module(file, names)

    def _found(self, module: _Module, one: ast.ImportFrom) -> _Module | None:
        """The file that a name is imported from."""
        parts = (one.module or "").split(".") if one.module else []
        near = list(module.file.absolute().parents)
        if one.level:
            folders = near[one.level - 1 : one.level]
        else:
            folders = [*near[:PARENTS], *(Path(entry) for entry in sys.path if entry)]
        for folder in folders:
            for file in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
                if file not in self._modules:
                    self._modules[file] = self._read(file)
                if (found := self._modules[file]) is not None:
                    return found
        return None

    def _read(self, file: Path) -> _Module | None:
        with suppress(OSError, ValueError, SourceError):
            if file.is_file():
                text = read_bytes(file, LARGEST_BYTES).decode("utf-8", errors="replace")
                return self.module(file, parsed_python(SourceText(str(file), text)))
        return None

    def _looked_up(self, name: str, module: _Module, chain: tuple[str, ...] = ()) -> Any:
        node = module.names.get(name)
        if node is None:
            return _Name(name)
        if isinstance(node, ast.FunctionDef):
            return _Name(name) if self.kept.fullmatch(name) else _Function(node, module)
        if isinstance(node, ast.ImportFrom):
            own = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            package = node.module or ""
            if node.level:
                package = ".".join(filter(None, (module.file.absolute().parents[node.level - 1].name, package)))
            dotted = f"{package}.{own}"
            found = None if self.kept.fullmatch(own) or dotted in chain else self._found(module, node)
            if found is None:
                return _Name(dotted)
            value = self._looked_up(own, found, (*chain, dotted))
            return _Name(dotted) if isinstance(value, _Name) else value
        if isinstance(node, (ast.Import, ast.ClassDef)):
            return _Name(name)
        return self.value(node, {}, module)

    # Calls and statements.

    def called(self, function: _Function, given: list[Any], named: dict[str, Any]) -> Any:
        self._depth += 1
        if self._depth > MOST_CALLS:
            raise SourceError(f"{self.source.file}: {function.node.name} calls itself, or too many others")
        arguments = function.node.args
        every = [*arguments.posonlyargs, *arguments.args]
        defaults = dict(zip([one.arg for one in every][::-1], arguments.defaults[::-1], strict=False))
        defaults |= {
            one.arg: default
            for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            if default
        }
        local = {name: self.value(default, {}, function.module) for name, default in defaults.items()}
        local |= dict(zip((one.arg for one in every), given, strict=False)) | named
        for one in (*every, *arguments.kwonlyargs):
            local.setdefault(one.arg, Open(one.arg, f"the argument {one.arg}"))
        outer, self._condition = self._condition, self._condition
        try:
            self._run(function.node.body, local, function.module)
        except _Return as end:
            return end.value
        finally:
            self._condition = outer
            self._depth -= 1
        return None

    def _run(self, body: list[ast.stmt], local: dict[str, Any], module: _Module) -> None:
        for one in body:
            self._steps += 1
            if self._steps > MOST_STEPS:
                raise SourceError(f"{self.source.file}:{one.lineno}: this is not followed to its end: it is too long")
            self._step(one, local, module)

    def _step(self, one: ast.stmt, local: dict[str, Any], module: _Module) -> None:
        if isinstance(one, ast.Return):
            value = None if one.value is None else self.value(one.value, local, module)
            raise _Return(Open(_text(one), self._condition) if self._condition else value)
        if isinstance(one, (ast.Assign, ast.AnnAssign)) and one.value is not None:
            value = self.value(one.value, local, module)
            for target in one.targets if isinstance(one, ast.Assign) else [one.target]:
                self._assign(target, value, local, module)
        elif isinstance(one, ast.AugAssign):
            self._assign(one.target, self._combined(one.op, one.target, one.value, local, module), local, module)
        elif isinstance(one, ast.Expr) and isinstance(one.value, ast.Call):
            self._statement(one.value, local, module)
        elif isinstance(one, (ast.If, ast.While, ast.For)):
            self._branch(one, local, module)
        elif isinstance(one, ast.With):
            self._run(one.body, local, module)
        elif isinstance(one, ast.Try):
            self._run([*one.body, *one.orelse, *one.finalbody], local, module)
        elif not isinstance(one, _SAYS_NOTHING):
            self.unread.append(_text(one).partition("\n")[0])

    def _branch(self, one: ast.If | ast.While | ast.For, local: dict[str, Any], module: _Module) -> None:
        test = self.value(one.test, local, module) if isinstance(one, ast.If) else Open("", "")
        if not isinstance(test, (Open, Made, _Name, _Function, _Method)):
            self._run(one.body if test else one.orelse, local, module)
            return
        outer = self._condition
        self._condition = outer or f"line {one.lineno}: {_text(one).partition(chr(10))[0].rstrip(':')}"
        self._run([*one.body, *one.orelse], local, module)
        self._condition = outer

    def _statement(self, call: ast.Call, local: dict[str, Any], module: _Module) -> None:
        """A call for what it changes: followed, or noted where it is given a part of the configuration."""
        result = self.value(call, local, module)
        touched = [self.value(one, local, module) for one in (*call.args, *(word.value for word in call.keywords))]
        if isinstance(call.func, ast.Attribute):
            touched.append(self.value(call.func.value, local, module))
        if isinstance(result, Made) and result.is_left and any(isinstance(one, (Made, list, dict)) for one in touched):
            self.unread.append(f"{_text(call.func)}()")

    def _assign(self, target: ast.expr, value: Any, local: dict[str, Any], module: _Module) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            parts = value if isinstance(value, list) and len(value) == len(target.elts) else None
            for number, one in enumerate(target.elts):
                part = parts[number] if parts else _part(value, number)
                self._assign(one, part, local, module)
            return
        if self._condition is not None:
            value = Open(_text(target), self._condition)
        if isinstance(target, ast.Name):
            local[target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value, local, module)
            if not isinstance(owner, Made):
                if not isinstance(target.value, (ast.Attribute, ast.Name)) or not isinstance(owner, (Open, type(None))):
                    self.unread.append(_text(target))
                    return
                owner = Made("")
                self._assign(target.value, owner, local, module)
            owner.fields[target.attr] = value
        elif isinstance(target, ast.Subscript):
            owner, key = self.value(target.value, local, module), self.value(target.slice, local, module)
            with suppress(TypeError, IndexError, KeyError):
                if isinstance(owner, (dict, list)):
                    owner[key] = value
                    return
            self.unread.append(_text(target))

    # Expressions.

    def value(self, node: ast.AST, local: dict[str, Any], module: _Module) -> Any:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise SourceError(f"{self.source.file}: this is not followed to its end: it is too long")
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return local[node.id] if node.id in local else self._looked_up(node.id, module)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, local, module)
        if isinstance(node, ast.Call):
            return self._call(node, local, module)
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return [self.value(one, local, module) for one in node.elts]
        if isinstance(node, ast.Dict):
            return self._mapping(node, local, module)
        return self._operation(node, local, module)

    def _operation(self, node: ast.AST, local: dict[str, Any], module: _Module) -> Any:
        if isinstance(node, ast.BinOp):
            return self._combined(node.op, node.left, node.right, local, module)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._combined(node.ops[0], node.left, node.comparators[0], local, module)
        if isinstance(node, ast.UnaryOp):
            value = self.value(node.operand, local, module)
            if isinstance(node.op, ast.Not) and not isinstance(value, (Open, Made, _Name)):
                return not value
            if isinstance(node.op, ast.USub) and _is_number(value):
                return -value
        if isinstance(node, ast.BoolOp):
            parts = [self.value(one, local, module) for one in node.values]
            if not any(isinstance(one, (Open, Made, _Name)) for one in parts):
                ends = isinstance(node.op, ast.Or)
                return next((one for one in parts if bool(one) is ends), parts[-1])
        if isinstance(node, ast.IfExp):
            test = self.value(node.test, local, module)
            if not isinstance(test, (Open, Made, _Name)):
                return self.value(node.body if test else node.orelse, local, module)
        if isinstance(node, ast.JoinedStr):
            parts = [
                self.value(one.value if isinstance(one, ast.FormattedValue) else one, local, module)
                for one in node.values
            ]
            if all(isinstance(one, (str, int, float)) and not isinstance(one, Open) for one in parts):
                text = "".join(str(one)[:MOST_VALUES] for one in parts)
                return text if len(text) < MOST_VALUES else Open(_text(node), "Python, which is not run")
        if isinstance(node, ast.Subscript):
            owner, key = self.value(node.value, local, module), self.value(node.slice, local, module)
            with suppress(TypeError, IndexError, KeyError):
                if isinstance(owner, (dict, list)):
                    return owner[key]
        return Open(_text(node), "Python, which is not run")

    def _combined(self, how: ast.AST, left: ast.AST, right: ast.AST, local: dict[str, Any], module: _Module) -> Any:
        both = [self.value(one, local, module) for one in (left, right)]
        plain = not any(isinstance(one, (Open, Made, _Name, _Function, _Method)) for one in both)
        is_sum = isinstance(how, ast.operator)
        if plain and type(how) in _OPERATORS and (not is_sum or all(map(_is_number, both))):
            with suppress(TypeError, ArithmeticError):
                return _OPERATORS[type(how)](*both)
        return Open(f"{_text(left)} … {_text(right)}", "Python, which is not run")

    def _attribute(self, node: ast.Attribute, local: dict[str, Any], module: _Module) -> Any:
        owner = self.value(node.value, local, module)
        if isinstance(owner, _Name):
            return _Name(f"{owner.dotted}.{node.attr}")
        if isinstance(owner, Made):
            if node.attr in owner.fields:
                return owner.fields[node.attr]
            return Open(_text(node), f"{owner.name or _text(node.value)}()") if not owner.said else _Method(owner)
        return Open(_text(node), getattr(owner, "by", "Python, which is not run"))

    def _call(self, node: ast.Call, local: dict[str, Any], module: _Module) -> Any:
        function = self.value(node.func, local, module)
        given = [self.value(one, local, module) for one in node.args if not isinstance(one, ast.Starred)]
        named: dict[str, Any] = {}
        for word in node.keywords:
            value = self.value(word.value, local, module)
            if word.arg is not None:
                named[word.arg] = value
            elif isinstance(value, dict):
                named |= {str(key): one for key, one in value.items()}
        if isinstance(function, _Function):
            return self.called(function, given, named)
        if isinstance(function, _Method):
            return function.owner  # AutoBridge.from_hf_pretrained("…").to_megatron_provider(…)
        name = function.dotted if isinstance(function, _Name) else _text(node.func)
        last = name.rpartition(".")[2]
        if last in ("deepcopy", "copy", "replace") and given and isinstance(given[0], Made):
            again = copy.deepcopy(given[0])
            again.fields |= named if last == "replace" else {}
            return again
        texts = [one for one in given if isinstance(one, str) and not isinstance(one, Open)]
        if name == "float" and texts == given:
            with suppress(ValueError):
                return float(texts[0])  # "inf"
        return Made(name, texts[0] if len(given) == 1 and texts else None, named)

    def _mapping(self, node: ast.Dict, local: dict[str, Any], module: _Module) -> Any:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            one = self.value(value, local, module)
            if key is not None:
                named = self.value(key, local, module)
                found[named if isinstance(named, (str, int)) else _text(key)] = one
            elif isinstance(one, dict):
                found |= one
        return found


def _imported(one: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, ast.AST]]:
    for alias in one.names:
        yield alias.asname or (alias.name if isinstance(one, ast.ImportFrom) else alias.name.partition(".")[0]), one


def _part(value: Any, number: int) -> Any:
    return Made(f"{value.name}", None) if isinstance(value, Made) else Open(f"[{number}]", getattr(value, "by", ""))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18


_text = ast.unparse
