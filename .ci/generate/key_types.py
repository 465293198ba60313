"""Which keys a configuration has and what values they take, by transformers' classes.

    python .ci/generate/key_types.py      # writes compiler/model/key_types.json

Most classes are strict: a value of another type, or null, is refused before a model is built. A key stands in the file
when its class declares what it takes and refuses something else. Of text that names an activation, or one of a few
words that the class compares, the words stand there too. The keys that a class has are its fields, their other names,
and those that its source names or writes itself.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import json
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    PreTrainedConfig,
)
from transformers.activations import ACT2FN
from transformers.modeling_layers import GenericForSequenceClassification

from parcompile.model.catalogue import model_types
from parcompile.model.tables import table_of

FILE = Path(__file__).parents[2] / "compiler" / "model" / "key_types.json"
_KNOWN = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_KINDS: Mapping[str, str] = _KNOWN["kinds"]
"""What a value of a JSON file is, of a type in Python."""
_VALUES: Mapping[str, Any] = {"null": None, "text": "much", "mapping": {}, "list": [], "switch": True}
_BRACKETS = re.compile(r"\[[^][]*\]")

_OF_BEFORE = frozenset(_KNOWN["of_before"])
"""Keys of every class of transformers 4, which files carry along."""
_RENAMED = ("rope_scaling",)
"""Keys of every class that give their value to another."""
_QUOTED = re.compile(r"""["']([a-z]\w+)["']""")
"""A key that a class takes out of its further arguments, or hands out under another name; other words do no harm."""
_WRITTEN = re.compile(r"\bself\.(\w+)(?:: [^=\n]+)? = ")
"""A key that a class writes itself."""
_ACTIVATED = re.compile(r"""(?:ACT2FN\[|ACT_FNS\[|get_activation\()(?:getattr\()?(?:self\.)?config(?:\.|, ')(\w+)""")
"""A key whose value a model looks up among activations."""
_IS_WORD = re.compile(r"self\.(?:config\.)?(\w+) == '(\w+)'")
_GROUPS = ("n_group", "topk_group", "topk_method")
_OTHER_PARTS = re.compile(
    "Vision|Audio|Speech|Projector|Classification|Summary|QuestionAnswering|DoubleHead|PreTrained"
)
"""Classes of no part of a language model, and those that draw first weights."""


def _causal() -> list[str]:
    return [one.name for one in model_types().values() if one.causal and one.name in CONFIG_MAPPING]


def keys_of(name: str) -> set[str]:
    """Every key that the class of a type, or one that it derives from, has under some name."""
    kind = CONFIG_MAPPING[name]
    found = {one.name for one in dataclasses.fields(kind)} | set(kind.attribute_map)
    found |= set(PreTrainedConfig().to_dict()) | _OF_BEFORE
    if (table := table_of(name)) is not None:
        # The names of some are put together in the source.
        found |= {key for key in table.defaults if "." not in key}
    for base in kind.__mro__:
        if base.__module__.startswith("transformers."):
            found |= _named_by(base)
    return found


@functools.cache
def _named_by(base: type) -> frozenset[str]:
    """The keys that the source of a class names or writes; most types derive from a few."""
    source = inspect.getsource(base)
    return frozenset({*_QUOTED.findall(source), *_WRITTEN.findall(source)})


def key_types(own: Mapping[str, Sequence[str]]) -> dict[str, dict[str, list[str]]]:
    """The keys of each type of causal language models, refused ones too, by what they take.

    Another name of a key, among the `own` keys of a type, takes the same, and null where the class does.
    """
    found = {}
    for name in _causal():
        kinds: dict[str, list[str]] = {}
        fields = {one.name: one.type for one in dataclasses.fields(CONFIG_MAPPING[name])}
        for key in sorted({*own[name], *_RENAMED, *fields}):
            field = key if key in fields else _field_behind(name, key)
            if field not in fields:
                continue
            declared = fields[field]
            taken = _taken(declared.__name__ if isinstance(declared, type) else str(declared))
            if _literal(declared):
                taken = {"text"} | ({"null"} if type(None) in typing.get_args(declared) else set())
            if field != key:
                taken = taken - {"null"} if _error(name, {key: None}) else taken | {"null"}
            other = next((kind for kind in _VALUES if kind not in taken), None)
            if taken and other is not None and (field != key or _refuses(name, key, _VALUES[other])):
                kinds.setdefault(" ".join(sorted(taken)), []).append(key)
        found[name] = {kind: sorted(keys) for kind, keys in sorted(kinds.items())}
    return found


def words() -> dict[str, dict[str, Any]]:
    """The words that keys of each type take: a list, or `activations` for all that transformers has."""
    found: dict[str, dict[str, Any]] = {}
    for name in _causal():
        kind = CONFIG_MAPPING[name]
        fields = {one.name for one in dataclasses.fields(kind)}
        module = _module_of_model(kind)
        source = _source_of_model(module)
        activations = sorted(importlib.import_module(module).ACT_FNS) if "ACT_FNS[" in source else "activations"
        taken: dict[str, Any] = dict.fromkeys(fields & set(_ACTIVATED.findall(source)), activations)
        taken |= {key: listed for key, listed in _compared(source).items() if key in fields}
        for one in dataclasses.fields(kind):
            if literal := _literal(one.type):
                taken[one.name] = literal
        found[name] = dict(sorted(taken.items()))
    return {name: taken for name, taken in found.items() if taken}


def _module_of_model(kind: type) -> str:
    """Where the class of a type's models stands: some types take that of another."""
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        return str(MODEL_FOR_CAUSAL_LM_MAPPING[kind].__module__)
    return kind.__module__.replace("configuration_", "modeling_")


@functools.cache
def _source_of_model(module: str) -> str:
    """The source of a module's classes that a language model is made of."""
    try:
        source = inspect.getsource(importlib.import_module(module))
    except ModuleNotFoundError:
        return ""
    classes = [one for one in ast.parse(source).body if isinstance(one, ast.ClassDef)]
    return "\n".join(ast.unparse(one) for one in classes if not _OTHER_PARTS.search(one.name))


@functools.cache
def _compared(source: str) -> dict[str, list[str]]:
    """The words of each `if self.key == "one": … elif self.key == "other": …` that ends there or with an error."""
    found: dict[str, list[str]] = {}
    inner: set[ast.If] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.If) or node in inner:
            continue
        compared, rest = [], [node]
        while len(rest) == 1 and isinstance(one := rest[0], ast.If):
            inner.add(one)
            compared.append(_IS_WORD.fullmatch(ast.unparse(one.test)))
            rest = one.orelse
        pairs = [one.groups() for one in compared if one is not None]
        closed = not rest or isinstance(rest[-1], ast.Raise)
        if closed and len({key for key, _ in pairs}) == 1 and len(pairs) == len(compared) > 1:
            found[pairs[0][0]] = [word for _, word in pairs]
    return found


def _literal(declared: Any) -> list[str]:
    """The words of `Literal["one", "other"]`, also beside null; none where something else is declared."""
    parts = [one for one in (typing.get_args(declared) or (declared,)) if one is not type(None)]
    if typing.get_origin(declared) is typing.Literal:
        parts = [declared]
    if len(parts) != 1 or typing.get_origin(parts[0]) is not typing.Literal:
        return []
    return [str(word) for word in typing.get_args(parts[0])]


def sizes() -> dict[str, Any]:
    """What classes ask of sizes: heads that divide hidden_size, turned widths that are even, groups of experts."""
    multiples: list[str] = []
    turned: dict[str, str] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name in _causal():
        defaults = {one.name: one.default for one in dataclasses.fields(CONFIG_MAPPING[name])}
        routed = {key: defaults[key] for key in _GROUPS if isinstance(defaults.get(key), int | str)}
        if routed:
            groups[name] = routed
        heads = defaults.get(CONFIG_MAPPING[name].attribute_map.get("num_attention_heads", "num_attention_heads"))
        if not isinstance(heads, int) or heads < 2:
            continue
        if "not a multiple of" in _error(name, {"hidden_size": 16 * heads + 1}):
            multiples.append(name)
        odd = {"qk_rope_head_dim": 9}, {"head_dim": 9}, {"hidden_size": 9 * heads, "head_dim": None}
        for values in (*odd, {"hidden_size": 9 * heads}):
            if "even rotary dimension" in _error(name, values):
                turned[name] = "qk_rope_head_dim" if "qk_rope_head_dim" in values else "head_dim"
                break
    return {"multiples": multiples, "turned": turned, "groups": groups, "classified": classified()}


def classified() -> list[str]:
    """Types whose classifier of sequences is a linear behind their model without a head, of the last token."""
    types = (name for name in _causal() if model_types()[name].works)
    known = ((name, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(CONFIG_MAPPING[name], None)) for name in types)
    return [name for name, one in known if getattr(one, "forward", None) is GenericForSequenceClassification.forward]


def _error(name: str, values: Mapping[str, Any]) -> str:
    try:
        CONFIG_MAPPING[name](**values)
    except Exception as error:
        return str(error)
    return ""


def _taken(declared: str) -> set[str]:
    """The kinds of values that a type in Python stands for; none where it names another."""
    inner = None
    while inner != declared:
        inner, declared = declared, _BRACKETS.sub("", declared)
    kinds = {_KINDS.get(one.strip()) for one in declared.split("|")}
    return set() if None in kinds else {kind for kind in kinds if kind is not None}


def _refuses(name: str, key: str, value: Any) -> bool:
    """Whether the class does what it declares: some set a value before it is checked, or check nothing."""
    return f"Validation error for field '{key}'" in _error(name, {key: value})


_OF_FIELD = re.compile(r"Validation error for field '(\w+)'")


def _field_behind(name: str, key: str) -> str | None:
    """The field that a class gives the value of a further key, and refuses there; None where it gives it to none."""
    for value in ("much", {}, 0.5):
        said = _error(name, {key: value})
        # Not where it is put together with others.
        if (field := _OF_FIELD.match(said)) and (f"value: {value!r})" in said or f"with value {value!r} " in said):
            return field[1]
    return None


def _lines(values: Mapping[str, Any]) -> str:
    return ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())


def text() -> str:
    """The file: one line for each type."""
    version, keys = json.dumps(transformers.__version__), {name: keys_of(name) for name in _causal()}
    common = set.intersection(*keys.values())
    own = {name: sorted(found - common) for name, found in keys.items()}
    types = f'"types": {{\n{_lines(key_types(own))}\n}}'
    names = f'"common": {json.dumps(sorted(common))}, "keys": {{\n{_lines(own)}\n}}'
    said = f'"words": {{\n{_lines(words())}\n}}, "activations": {json.dumps(sorted(ACT2FN))}'
    said += "".join(f', "{name}": {json.dumps(found)}' for name, found in sizes().items())
    return f'{{"transformers": {version}, {types}, {said}, {names}}}\n'


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
