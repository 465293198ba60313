"""What can be drawn of a model type: its keys, the words that its code knows for them, and what it may turn off."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from building import INERT, LAYERS, ModelType
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")


class Keys:
    """The keys of a model type, as its classes declare, compare and ask for them."""

    def __init__(self, kind: ModelType) -> None:
        self.kind = kind
        self.keys = {key: value for key, value in kind.defaults.items() if not INERT.search(key.rpartition(".")[2])}
        self.layer_keys = [key for key, value in self.keys.items() if LAYERS.search(key) and type(value) is int]
        self.words: dict[str, list[str]] = {}
        source = kind.source()
        for key, value in self.keys.items():
            last = key.rpartition(".")[2]
            if last in KINDS or (isinstance(value, list) and value and all(isinstance(one, str) for one in value)):
                named = {word for word in ALLOWED_LAYER_TYPES if f'"{word}"' in source} if last in KINDS else set()
                if last == "mlp_layer_types":
                    named &= {"dense", "sparse"}
                elif last == "layer_types":
                    named -= {"dense", "sparse"}
                self.words[key] = sorted(named | set(value or ()))
        self.made: dict[str, list[int]] = {}
        """Lists of numbers that a class has where none are given."""
        self.letters_named = set(re.findall(r'["\'].["\']: *["\'](\w\w+)', source))
        self.letters: dict[str, str] = {}
        """The letters of keys that name the kind of each layer by one."""
        self._undeclared(source)
        self._made()
        self.optional = {key for key, value in self.keys.items() if type(value) is int and _is_asked(key, source)}
        """Sizes that the code asks for: 0 turns off what they are the size of."""
        self.texts = {key: found for key in self.keys if len(found := self._texts(key, source)) > 1}
        """The words that a key which is no list may hold."""

    def _made(self) -> None:
        """Numbers that a class computes and does not declare: a file holds them when the class has written it."""
        with contextlib.suppress(Exception):
            for key, value in self.kind.configuration({})[1].full.items():
                if self.keys.get(key, value) is None and isinstance(value, list) and value:
                    if all(isinstance(one, str) for one in value):
                        named = self.letters_named if key.rpartition(".")[2].endswith("_types") else set()
                        self.words[key] = sorted({*self.words.get(key, ()), *value, *named})
                    elif all(type(one) is int for one in value):
                        self.made[key] = value
                if type(value) is int and key not in self.kind.defaults and not INERT.search(key.rpartition(".")[2]):
                    self.keys[key], self.kind.hints[key] = None, "int"

    def _undeclared(self, source: str) -> None:
        """Keys that the code reads with `getattr`, or takes from `kwargs`, and its configuration does not declare."""
        for prefix, text in self.kind.configuration_sources().items():
            self._taken(prefix, text)
        for name, default in re.findall(r'getattr\((?:self\.)?config, "(\w+)", *(\w+)\)', source):
            if name in self.keys or INERT.search(name) or name in self.kind.names or name in self.kind.defaults:
                continue
            if default in ("True", "False"):
                self.keys[name], self.kind.hints[name] = default == "True", "bool"
                self.kind.defaults[name] = default == "True"
            elif default == "None" and re.search("dim|size|num_|rank|head", name):
                self.keys[name], self.kind.hints[name] = None, "int"  # null may differ from nothing

    def _taken(self, prefix: str, source: str) -> None:
        """Keys that the code of a configuration class takes from `kwargs`."""
        letters = "".join(re.findall(r'["\'](.)["\']: *["\']\w\w', source))
        found = re.findall(r'kwargs\.(?:pop|get)\(\s*"(\w+)"(?:,\s*([^()\n]*?))?\s*\)', source)
        for start, behind in re.findall(r'kwargs\.(?:pop|get)\(f"(\w+)\{\w+\}"(.{0,800}?)\}\.items', source, re.DOTALL):
            found += [(start + last, default) for last, default in re.findall(r'"(\w+)": (\d+)', behind)]
        for last, default in found:
            name = prefix + last
            if name in self.keys or INERT.search(last) or name in self.kind.defaults or name in self.kind.names:
                continue
            owner = prefix + default.removeprefix("self.")
            if default.startswith("self.") and owner in self.keys:
                self._other_name(name, owner)
            elif default.isdigit():
                self.keys[name], self.kind.defaults[name], self.kind.hints[name] = int(default), int(default), "int"
            elif otherwise := re.search(r"(?:^|^None if .* else )(True|False)$", default):
                self.keys[name] = self.kind.defaults[name] = otherwise[1] == "True"
                self.kind.hints[name] = "bool | None" if default.startswith("None") else "bool"
            elif "pattern" in last and letters:
                self.keys[name], self.kind.hints[name], self.letters[name] = None, "str", letters
            elif re.search("^use_|bias$", last):
                self.keys[name], self.kind.hints[name] = None, "bool"
            elif re.search("dim|size|num_|rank|head|groups|conv$|expand|_rate_", last):
                self.keys[name], self.kind.hints[name] = None, "int"

    def _other_name(self, name: str, owner: str) -> None:
        """A key that a class takes for another one where it is there."""
        default, hint = self.keys[owner], self.kind.hints.get(owner, "")
        if isinstance(default, bool):
            self.keys[name], self.kind.hints[name] = None, "bool"
        elif type(default) is int or (default is None and "int" in hint):
            self.keys[name], self.kind.hints[name] = default, "int"

    def _texts(self, key: str, source: str) -> list[Any]:
        """Words that a class declares or that its code compares a key with."""
        hint, last, default = self.kind.hints.get(key, ""), key.rpartition(".")[2], self.keys[key]
        if ("str" not in hint and "Literal" not in hint) or "list" in hint:
            return []
        if re.search(r"(^|_)act(ivation)?(_|$)|hidden_act|activation", last):
            return list(dict.fromkeys([default, "silu", "gelu", "relu"]))
        found = re.findall(r"['\"]([\w-]+)['\"]", hint) if "Literal" in hint else []
        found += re.findall(rf'\b{last}\b *(?:==|!=) *"([\w-]+)"', source)
        found += [default] if default is not None else []
        if "bool" in hint and found:
            found += [True, False, "another"]
        return list(dict.fromkeys(found))


def _is_asked(key: str, source: str) -> bool:
    last = key.rpartition(".")[2]
    if not re.search("size|dim|rank|shared", last):
        return False
    return bool(
        re.search(rf"\bif (?:not )?(?:self\.)?(?:config\.)?{last}(?: > 0| != 0)?(?:$|:| and | or | else )", source)
    )
