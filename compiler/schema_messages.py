"""What a violated schema means for the person who wrote the file.

A validator says "is not valid under any of the given schemas"; this module finds the alternative that was meant, names
the key or value that is wrong in it, says what was found and what to write instead, and keeps consequences of one
mistake quiet.

Codes: K001 unknown key · K002 missing key · K003 wrong type · K004 not one of the allowed values · K005 number out of
range · K006 text of the wrong form · K007 wrong number of entries or characters · K008 keys that exclude each other ·
K009 a key that needs another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .diagnostics import Diagnostic, Edit, Fix, Path, Related, Safety, Severity, format_path
from .schema_branches import Branch, branches_of, chosen
from .schema_values import (
    as_number,
    as_truth,
    describe_expected,
    describe_found,
    fitting,
    is_type,
    listed,
    quoted,
)
from .suggest import closest
from .synonyms import bare, is_exact, known_key, known_value, near_key

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from referencing import Registry

_FEW = 12
_MISSING = object()


class Translator:
    """Turns a validator's errors on one tree into diagnostics.

    After `translate`, `poisoned` holds the paths whose values must not be used, and `at_key` the (code, path) of the
    findings that are about a key rather than its value.
    """

    def __init__(
        self, schema: dict[str, Any], name: str, tree: object, skipped: frozenset[Path], registry: Registry[Any]
    ) -> None:
        self.schema = schema
        self.name = name
        self.tree = tree
        self.skipped = skipped
        self.registry = registry
        self.poisoned: set[Path] = set()
        self.at_key: set[tuple[str, Path]] = set()
        self._found: dict[tuple[str, Path], Diagnostic] = {}
        self._meant: set[Path] = set()

    def translate(self, errors: Iterable[ValidationError]) -> list[Diagnostic]:
        """One diagnostic per mistake."""
        for error in errors:
            self._one(error)
        # A key that is missing because it is misspelt is one mistake, said where the misspelling is.
        return [
            diagnostic
            for (code, path), diagnostic in self._found.items()
            if not (code in ("K002", "K009") and path in self._meant)
            and not (code > "K003" and ("K003", path) in self._found)
        ]

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def _say(
        self,
        code: str,
        path: Path,
        message: str,
        advice: str | None = None,
        *,
        at_key: bool = False,
        fixes: tuple[Fix, ...] = (),
        related: tuple[Related, ...] = (),
    ) -> None:
        if any(path[:length] in self.skipped for length in range(len(path) + 1)):
            return
        if at_key:
            self.at_key.add((code, path))
        diagnostic = Diagnostic(code, Severity.ERROR, message, path=path, help=advice, fixes=fixes, related=related)
        self._found.setdefault((code, path), diagnostic)
        self.poisoned.add(path)

    def _one(self, error: ValidationError) -> None:
        path: Path = tuple(error.absolute_path)
        keyword = str(error.validator)
        if "propertyNames" in error.relative_schema_path and isinstance(error.instance, str):
            path = (*path, error.instance)
            self._say("K001", path, f"{quoted(error.instance)} cannot be a key here", _form(error.schema), at_key=True)
            return
        handler = {
            "additionalProperties": self._unknown_keys,
            "unevaluatedProperties": self._unknown_keys,
            "required": self._missing_keys,
            "dependentRequired": self._needed_keys,
            "type": self._wrong_type,
            "enum": self._not_allowed,
            "const": self._not_allowed,
            "oneOf": self._alternatives,
            "anyOf": self._alternatives,
            "not": self._forbidden,
            "pattern": self._wrong_form,
            "format": self._wrong_form,
        }.get(keyword)
        if handler is not None:
            handler(error, path)
        elif keyword in _RANGES:
            self._out_of_range(error, path)
        elif keyword in _COUNTS:
            self._wrong_count(error, path)
        else:
            self._say("K008", path, f"{_name(path)}: {quoted(error.instance)} may not stand here", _about(error.schema))

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _unknown_keys(self, error: ValidationError, path: Path) -> None:
        value = error.validator_value
        known: dict[str, Any] = error.schema.get("properties", {})
        if isinstance(value, dict) and not value.get("const") and value is not False:
            # Here the keyword gave the schema of further keys, and the error is about one of their values.
            self._say("K003", path, f"{_name(path)}: {error.message}")
            return
        patterns = error.schema.get("patternProperties", {})
        if error.validator == "unevaluatedProperties":
            known = {
                **known,
                **{key: {} for branch in self._parts(error.schema) for key in branch.get("properties", {})},
            }
        for key in error.instance:
            if key not in known and not _matches(key, patterns):
                self._unknown_key(key, (*path, key), known, error.instance)

    def _unknown_key(
        self, key: str, path: Path, known: dict[str, Any], instance: dict[str, Any], starts: Sequence[str] = ()
    ) -> None:
        parent = path[:-1]
        where = f" in {format_path(parent)}" if parent else ""
        message = f"unknown key {quoted(key)}{where}"
        free = [name for name in known if name not in instance]
        target = self._target(key, parent, known, free)
        if target is None:
            advice = f"known keys are {listed(known)}" if 0 < len(known) <= _FEW else "remove it"
            if not known:
                advice = "no keys may stand here: remove it"
            if starts:
                advice = f"write one of {listed(starts)}"
            self._say("K001", path, message, advice, at_key=True)
            return
        self._meant.add(target)
        self.poisoned.add(target)
        name = str(target[-1])
        same = bare(name) == bare(key) or known_key(self.name, key) is not None
        safety = Safety.SAFE if same else Safety.CHANGES_NUMERICS
        taken = self._value(target) is not _MISSING
        related: tuple[Related, ...] = ()
        fixes: tuple[Fix, ...] = ()
        if taken:
            advice = f"this is {format_path(target)}, which is given already: remove one of the two"
            related = (Related("given here", target),)
        elif target[:-1] == parent:
            advice = f"did you mean {quoted(name)}?"
            fixes = (Fix(f"rename {key} to {name}", safety, (Edit(path, rename_to=name),)),)
        else:
            section = format_path(target[:-1])
            place = f"under {quoted(section)}" if section else "at the top level"
            advice = f"write it {place} as {quoted(name)}"
        self._say("K001", path, message, advice, at_key=True, fixes=fixes, related=related)

    def _target(self, key: str, parent: Path, known: dict[str, Any], free: Sequence[str]) -> Path | None:
        """The path that the unknown `key` under `parent` was meant to be."""
        for name in known:
            if bare(name) == bare(key):
                return (*parent, name)
        synonym = known_key(self.name, key)
        if synonym is not None:
            return tuple(synonym.split("."))
        sibling = closest(key, free) or closest(key, known)
        if sibling is None and (near := near_key(self.name, key)) is not None:
            return tuple(near.split("."))
        elsewhere = [path for path in self._places() if path[-1] == key and path[:-1] != parent]
        if len(elsewhere) == 1 and parent == tuple(step for step in parent if isinstance(step, str)):
            return elsewhere[0]
        return (*parent, sibling) if sibling is not None else None

    def _missing_keys(self, error: ValidationError, path: Path) -> None:
        for key in error.validator_value:
            if key not in error.instance:
                self._missing_key(key, path, error.schema)

    def _missing_key(self, key: str, path: Path, schema: dict[str, Any], code: str = "K002", why: str = "") -> None:
        where = f" in {format_path(path)}" if path else ""
        entry = self._resolved(schema.get("properties", {}).get(key, {}))
        example = next(iter(entry.get("examples", [])), entry.get("const", entry.get("default", _MISSING)))
        advice = (
            f"add {quoted(key)}" if example is _MISSING else f"add {quoted(key)}: {quoted(example)}, or what you need"
        )
        if "const" in entry:
            advice = f"add {quoted(key)}: {quoted(entry['const'])}"
        if about := _about(entry):
            advice += f" ({about})"
        self._say(code, (*path, key), f"the key {quoted(key)} is missing{where}{why}", advice)

    def _needed_keys(self, error: ValidationError, path: Path) -> None:
        for key, needed in error.validator_value.items():
            if key not in error.instance:
                continue
            for other in needed:
                if other not in error.instance:
                    self._missing_key(other, path, error.schema, "K009", f": {quoted(key)} needs it")

    # -- values -------------------------------------------------------------------------------------------------------

    def _wrong_type(self, error: ValidationError, path: Path) -> None:
        self._mismatch(path, error.instance, [error.schema])

    def _mismatch(self, path: Path, value: object, schemas: Sequence[dict[str, Any]], hint: str | None = None) -> None:
        """`value` has no type that any of `schemas` takes."""
        expected = " or ".join(dict.fromkeys(describe_expected(schema) for schema in schemas))
        advice, better = self._conversion(value, schemas)
        advice = hint or advice
        fixes: tuple[Fix, ...] = ()
        if better is not _MISSING:
            fixes = (Fix(f"write {quoted(better)}", Safety.SAFE, (Edit(path, better),)),)
        self._say(
            "K003", path, f"{_name(path)}: expected {expected}, found {describe_found(value)}", advice, fixes=fixes
        )

    def _conversion(self, value: object, schemas: Sequence[dict[str, Any]]) -> tuple[str | None, object]:
        """What to write instead of a value of the wrong type, and that value when nothing else can be meant."""
        for schema in schemas:
            if isinstance(value, str):
                number, truth = as_number(value), as_truth(value)
                if number is not None and fitting(number, schema):
                    return f"write {quoted(number)} without quotes", number
                if truth is not None and is_type(truth, schema):
                    return f"write {quoted(truth)} without quotes", truth
            if type(value) in (int, float) and is_type("", schema) and fitting(str(value), schema):
                return f"write {quoted(str(value))} in quotes", str(value)
            if value in (0, 1) and type(value) is int and is_type(True, schema):
                return f"write {quoted(bool(value))}", bool(value)
            if isinstance(value, float) and value != int(value) and is_type(1, schema):
                return f"write {int(value)} or {int(value) + 1}", _MISSING
            if value is None and "default" in schema:
                return f"remove the key: the default is {quoted(schema['default'])}", _MISSING
            if is_type([], schema) and not isinstance(value, (list, dict)) and is_type(value, schema.get("items", {})):
                if schema.get("minItems", 1) > 1:
                    continue
                return f"write [{quoted(value)}]", _MISSING
            if isinstance(value, list) and len(value) == 1 and is_type(value[0], schema):
                return f"write {quoted(value[0])} without the brackets", _MISSING
        example = next((schema["examples"][0] for schema in schemas if schema.get("examples")), _MISSING)
        return (None if example is _MISSING else f"write it like {quoted(example)}"), _MISSING

    def _not_allowed(self, error: ValidationError, path: Path) -> None:
        allowed = error.validator_value if error.validator == "enum" else [error.validator_value]
        self._choice(path, error.instance, allowed, [error.schema])

    def _choice(self, path: Path, value: object, allowed: Sequence[object], schemas: Sequence[dict[str, Any]]) -> None:
        """`value` is none of the `allowed` ones."""
        texts = [choice for choice in allowed if isinstance(choice, str)]
        message = f"{_name(path)}: {quoted(value)} is not allowed"
        choices = f"write {listed(allowed)}" if len(allowed) <= _FEW else None
        near: object = None
        safety = Safety.CHANGES_NUMERICS
        if isinstance(value, str):
            known = known_value(value)
            near = next((choice for choice in texts if bare(choice) == bare(value)), None)
            near = near or (known if known in texts else None)
            if near is not None:
                safety = Safety.SAFE if bare(str(near)) == bare(value) or is_exact(value) else Safety.CHANGES_COST
            near = near or closest(value, texts)
        if near is None:
            # "1" for 1, "True" for true: the value is right, its type is not.
            for other in (as_number(value), as_truth(value)) if isinstance(value, str) else (str(value),):
                if other is not None and any(other == choice and type(other) is type(choice) for choice in allowed):
                    self._mismatch(path, value, schemas)
                    return
        fixes: tuple[Fix, ...] = ()
        advice = choices
        if near is not None:
            fixes = (Fix(f"write {quoted(near)}", safety, (Edit(path, near),)),)
            others = (
                f" (or {listed([choice for choice in allowed if choice != near])})" if 1 < len(allowed) <= _FEW else ""
            )
            advice = f"did you mean {quoted(near)}?{others}"
        elif (
            not isinstance(value, str)
            and len({type(choice) for choice in allowed}) == 1
            and type(value) is not type(allowed[0])
        ):
            message = f"{_name(path)}: expected {listed(allowed)}, found {describe_found(value)}"
        self._say("K004", path, message, advice, fixes=fixes)

    def _out_of_range(self, error: ValidationError, path: Path) -> None:
        problem, advice = _RANGES[str(error.validator)]
        limit = quoted(error.validator_value)
        self._say(
            "K005", path, f"{_name(path)}: {quoted(error.instance)} {problem.format(limit)}", advice.format(limit)
        )

    def _wrong_count(self, error: ValidationError, path: Path) -> None:
        if error.validator == "uniqueItems":
            seen: list[object] = []
            again = None
            for entry in error.instance:
                again = entry if entry in seen else again
                seen.append(entry)
            self._say("K007", path, f"{_name(path)}: {quoted(again)} is listed twice", "keep one")
            return
        unit = {"Length": "character", "Items": "entry", "Properties": "key"}[str(error.validator)[3:]]
        count, limit = len(error.instance), error.validator_value
        low, high = (error.schema.get(side + str(error.validator)[3:]) for side in ("min", "max"))
        needed = (
            f"exactly {limit}"
            if low == high
            else f"at {'least' if str(error.validator)[:3] == 'min' else 'most'} {limit}"
        )
        plural = {"character": "characters", "entry": "entries", "key": "keys"}
        found = f"{count} {unit if count == 1 else plural[unit]}"
        example = next(iter(error.schema.get("examples", [])), _MISSING)
        advice = f"write {needed}" if example is _MISSING else f"write it like {quoted(example)}"
        self._say("K007", path, f"{_name(path)}: {found}, but {needed} {'is' if limit == 1 else 'are'} needed", advice)

    def _wrong_form(self, error: ValidationError, path: Path) -> None:
        self._say(
            "K006", path, f"{_name(path)}: {quoted(error.instance)} is not of the expected form", _form(error.schema)
        )

    # -- alternatives -------------------------------------------------------------------------------------------------

    def _alternatives(self, error: ValidationError, path: Path) -> None:
        if not error.context:
            self._say(
                "K008", path, f"{_name(path)}: fits several alternatives that exclude each other", _about(error.schema)
            )
            return
        branches = branches_of(error, self._resolved)
        value = error.instance
        roots = [branch for branch in branches if branch.refuses_type]
        if len(roots) == len(branches) or not any(branch.takes_type for branch in branches):
            self._no_alternative(path, value, branches)
            return
        branch = chosen(branches, value, self.name)
        if isinstance(value, dict):
            if branch is None:
                self._no_start(path, value, branches)
                return
            if self._excluded(path, value, branch, branches):
                return
        elif branch is None:
            self._no_alternative(path, value, branches)
            return
        assert branch is not None
        for inner in branch.errors:
            self._one(inner)

    def _no_alternative(self, path: Path, value: object, branches: Sequence[Branch]) -> None:
        """A scalar (or a whole list or object) that no alternative takes."""
        allowed = [choice for branch in branches for choice in branch.allowed]
        if isinstance(value, str) and any(isinstance(choice, str) for choice in allowed):
            number = as_number(value)
            if number is None or not any(fitting(number, branch.schema) for branch in branches):
                others = [describe_expected(branch.schema) for branch in branches if not branch.allowed]
                self._choice(path, value, allowed, [branch.schema for branch in branches])
                found = self._found.get(("K004", path))
                if found is not None and others:
                    either = " or ".join(others)
                    advice = f"{found.help} Or write {either}" if found.help and "did you mean" in found.help else None
                    advice = advice or f"write {listed(allowed)} or {either}"
                    self._found["K004", path] = replace(found, help=advice)
                return
        for branch in branches:
            # A bare value where an object with one key is meant: "llama-3-8b" for {"preset": "llama-3-8b"}.
            if len(branch.required) == 1 and is_type(value, self._resolved(branch.known.get(branch.required[0], {}))):
                self._mismatch(path, value, [branch.schema], f"write {quoted({branch.required[0]: value})}")
                return
        self._mismatch(path, value, [branch.schema for branch in branches])

    def _no_start(self, path: Path, value: dict[str, Any], branches: Sequence[Branch]) -> None:
        """An object that begins none of the alternatives: say how each starts."""
        starts = list(dict.fromkeys(branch.required[0] for branch in branches if branch.required))
        known = {name: {} for branch in branches for name in branch.known}
        for key in value:
            self._unknown_key(key, (*path, key), known, value, starts)
        if not value:
            self._say("K002", path, f"{_name(path)} needs one of the keys {listed(starts)}", "add one of them")
        self.poisoned.add(path)

    def _excluded(self, path: Path, value: dict[str, Any], branch: Branch, branches: Sequence[Branch]) -> bool:
        """Whether keys of several alternatives stand side by side."""
        others = {
            key: other for other in branches if other is not branch for key in other.known if key not in branch.known
        }
        foreign = [key for key in value if key in others]
        own = [key for key in value if key in branch.known]
        if not foreign or not own:
            return False
        message = f"{_name(path)}: {quoted(own[0])} and {listed(foreign)} exclude each other"
        related = (Related("the other one", (*path, own[0])),)
        self._say(
            "K008",
            (*path, foreign[0]),
            message,
            f"keep {quoted(own[0])} or {listed(foreign)}",
            at_key=True,
            related=related,
        )
        self.poisoned.add(path)
        for inner in branch.errors:
            if inner.validator not in ("additionalProperties", "unevaluatedProperties", "required"):
                self._one(inner)
        return True

    def _forbidden(self, error: ValidationError, path: Path) -> None:
        keys = error.validator_value.get("required", [])
        if len(keys) > 1 and isinstance(error.instance, dict):
            related = tuple(Related("and this", (*path, key)) for key in keys[:-1])
            message = f"{' and '.join(quoted(key) for key in keys)} exclude each other"
            self._say("K008", (*path, keys[-1]), message, f"keep {listed(keys)}", at_key=True, related=related)
            return
        self._say("K008", path, f"{_name(path)}: {quoted(error.instance)} is not allowed", _about(error.schema))

    # -- the schema ---------------------------------------------------------------------------------------------------

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """`schema` with its `$ref` followed, its own keywords on top."""
        for _ in range(20):
            if not isinstance(schema, dict):
                return {}
            if "$ref" not in schema:
                return schema
            own = {key: value for key, value in schema.items() if key != "$ref"}
            schema = {**self._referenced(schema["$ref"]), **own}
        return {}

    def _referenced(self, reference: str) -> dict[str, Any]:
        from referencing.exceptions import Unresolvable
        from referencing.jsonschema import DRAFT202012

        resource = DRAFT202012.create_resource(self.schema)
        resolver = self.registry.with_resource(self.schema.get("$id", ""), resource).resolver(
            self.schema.get("$id", "")
        )
        try:
            contents = resolver.lookup(reference).contents
        except Unresolvable:
            return {}
        return contents if isinstance(contents, dict) else {}

    def _parts(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """`schema` and everything that it combines."""
        parts = [self._resolved(schema)]
        for keyword in ("allOf", "anyOf", "oneOf"):
            for part in schema.get(keyword, []):
                parts.extend(self._parts(self._resolved(part)))
        for keyword in ("if", "then", "else"):
            if keyword in schema:
                parts.extend(self._parts(self._resolved(schema[keyword])))
        return parts

    def _places(self) -> list[tuple[str, ...]]:
        """The paths of all keys that the schema knows, to the depth of three."""
        found: dict[tuple[str, ...], None] = {}
        level: list[tuple[tuple[str, ...], dict[str, Any]]] = [((), self.schema)]
        for _ in range(3):
            following = []
            for path, schema in level:
                for part in self._parts(schema):
                    for key, entry in part.get("properties", {}).items():
                        found[(*path, key)] = None
                        following.append(((*path, key), self._resolved(entry)))
            level = following
        return list(found)

    def _value(self, path: Path) -> object:
        value: Any = self.tree
        for step in path:
            if (isinstance(value, dict) and step in value) or (
                isinstance(value, list) and isinstance(step, int) and step < len(value)
            ):
                value = value[step]
            else:
                return _MISSING
        return value


_RANGES = {
    "minimum": ("is too small", "write at least {0}"),
    "maximum": ("is too large", "write at most {0}"),
    "exclusiveMinimum": ("is too small: it must be above {0}", "write more than {0}"),
    "exclusiveMaximum": ("is too large: it must be below {0}", "write less than {0}"),
    "multipleOf": ("is not a multiple of {0}", "write a multiple of {0}"),
}
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "uniqueItems"})


def _name(path: Path) -> str:
    return format_path(path) or "the document"


def _matches(key: str, patterns: dict[str, Any]) -> bool:
    import re

    return any(re.search(pattern, key) for pattern in patterns)


def _about(schema: Any) -> str | None:
    """What the schema says the value is for, as a part of a sentence."""
    text = schema.get("description") if isinstance(schema, dict) else None
    return str(text).rstrip(".") if text else None


def _form(schema: Any) -> str | None:
    examples = schema.get("examples") if isinstance(schema, dict) else None
    about = _about(schema)
    if examples:
        return f"write it like {quoted(examples[0])}" + (f" ({about})" if about else "")
    if about:
        return about
    pattern = schema.get("pattern") if isinstance(schema, dict) else None
    return f"it must match {pattern}" if pattern else None
