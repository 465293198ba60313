"""Damages to texts: of their tree, where they are JSON or YAML, and of their words and bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Tree = Any
Place = tuple[Any, Any]
"""A container and the key or index in it."""


@dataclass(frozen=True, slots=True)
class Raw:
    """Text that stands in a file as it is, and that no tree can hold."""

    text: str


_PARTS: dict[str, Any] = json.loads(Path(__file__).with_name("parts.json").read_text(encoding="utf-8"))
_NUMBERS = (*_PARTS["numbers"], *map(Raw, _PARTS["raw"]))
_TEXTS = tuple(_PARTS["texts"])
_OTHERS = (None, True, False, [], {}, [[]], {"": {}}, [None], {"a": None}, [1, "a"], {"type": 1}, [{}], [0.5, -1])


def values(chance: random.Random) -> Any:
    """A value that is odd at most places."""
    kind = chance.random()
    if kind < 0.35:
        return chance.choice(_NUMBERS)
    if kind < 0.6:
        return chance.choice(_TEXTS)
    if kind < 0.95:
        return _copied(chance.choice(_OTHERS))
    if kind < 0.97:
        return Raw(chance.choice("[{").replace("{", '{"a":') * chance.choice((50, 150, 20_000)))
    return chance.choice((list(range(3000)), {str(n): n for n in range(2000)}, "long " * 30_000))


def _copied(tree: Tree) -> Tree:
    """A copy of a tree, several times as fast as `copy.deepcopy`."""
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree


def places(tree: Tree) -> list[Place]:
    """Every place of a tree."""
    found: list[Place] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, (dict, list)):
            continue
        for key in node if isinstance(node, dict) else range(len(node)):
            found.append((node, key))
            waiting.append(node[key])
    return found


def damaged_tree(tree: Tree, donors: Sequence[Tree], chance: random.Random) -> Tree:
    """A copy with one to four damages. Keys and subtrees of `donors`, files of the same kind, are put into it."""
    tree = _copied(tree)
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 4))):
        found = places(tree)
        if not found:
            return values(chance)
        # Files are mostly leaves; what stands near the root matters as much.
        top = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
        node, key = (tree, chance.choice(list(top))) if top and chance.random() < 0.35 else chance.choice(found)
        _damage(tree, node, key, found, donors, chance)
    return tree


def _damage(tree: Tree, node: Any, key: Any, found: list[Place], donors: Sequence[Tree], chance: random.Random) -> None:
    action, old = chance.random(), node[key]
    if action < 0.4:
        node[key] = values(chance)
    elif action < 0.5:
        others = ([old], {"value": old}, str(old), json.dumps(old, default=str), bool(old), None, [old, old])
        node[key] = chance.choice(others)
    elif action < 0.6:
        del node[key]
    elif action < 0.7:
        other, name = chance.choice(places(chance.choice(donors)) or [({"a": 1}, "a")]) if donors else (tree, None)
        if isinstance(node, dict) and isinstance(other, dict):
            node[name] = _copied(other[name]) if chance.random() < 0.5 else values(chance)
        elif donors:
            node[key] = _copied(other[name])
    elif action < 0.77:
        other, name = chance.choice(found)
        # A subtree that would hold itself is copied before.
        node[key], other[name] = _copied(other[name]), _copied(old)
    elif action < 0.84 and isinstance(node, dict):
        node[_renamed(str(key), donors, chance)] = node.pop(key)
    elif action < 0.9 and isinstance(node, dict) and isinstance(key, str):
        twice = values(chance) if chance.random() < 0.7 else _copied(old)
        node[key] = Raw(f"{dumped(old)}, {json.dumps(key)}: {dumped(twice)}")
    elif action < 0.94 and isinstance(old, (int, float)) and not isinstance(old, bool):
        node[key] = chance.choice((-old, old + 1, old * 2, old * 1000, float(old), str(old), old / 3, 0))
    elif isinstance(node, list):
        node.insert(chance.randrange(len(node) + 1), _copied(old) if chance.random() < 0.5 else values(chance))
    else:
        for _ in range(chance.choice((3, 30, 200))):
            node[key] = {str(key): node[key]} if chance.random() < 0.5 else [node[key]]


def _renamed(key: str, donors: Sequence[Tree], chance: random.Random) -> str:
    if donors and chance.random() < 0.4:
        keys = [name for node, name in places(chance.choice(donors)) if isinstance(node, dict)]
        return str(chance.choice(keys or [key]))
    at = chance.randrange(len(key) + 1)
    return key[:at] + chance.choice(("", "x", "_", "-", "S", " ", ".", "\u0000", "é")) + key[at + 1 :]


_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_MARK = "\ue000{}\ue001"


def dumped(tree: Tree, form: str = "json", indent: int | None = None) -> str:
    """A tree as text, with `Raw` values as they are."""
    raw: list[str] = []

    def plain(node: Any) -> Any:
        if isinstance(node, Raw):
            raw.append(node.text)
            return _MARK.format(len(raw) - 1)
        if isinstance(node, dict):
            return {str(key): plain(value) for key, value in node.items()}
        return [plain(value) for value in node] if isinstance(node, list) else node

    found = plain(tree)
    if form == "yaml":
        text = yaml.dump(found, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=10**6)
    else:
        text = json.dumps(found, indent=indent, ensure_ascii=False)
    for number, one in enumerate(raw):
        mark = _MARK.format(number)
        text = text.replace(f'"{mark}"', one).replace(mark, one)
    return text


def damaged_text(text: str, form: str, chance: random.Random) -> bytes:
    """The text with one to four damages of its words, lines and bytes."""
    data = text.encode("utf-8", "surrogatepass")
    for _ in range(chance.choice((1, 1, 2, 3, 4))):
        data = _damaged_bytes(data, form, chance)
    return data


def _damaged_bytes(data: bytes, form: str, chance: random.Random) -> bytes:
    action, at = chance.random(), chance.randrange(len(data) + 1)
    if action < 0.35:
        return data[:at] + chance.choice(_PARTS["pieces"][form]).encode("utf-8", "surrogatepass") + data[at:]
    if action < 0.45:
        return data[:at] + data[min(len(data), at + chance.choice((1, 1, 2, 5, 20, 200))) :]
    if action < 0.5:
        return data[:at]
    if action < 0.6:
        return data[:at] + bytes(chance.randrange(256) for _ in range(chance.randint(1, 8))) + data[at:]
    if action < 0.9:
        return _damaged_word(data, form, chance)
    lines = data.split(b"\n")
    first, second = chance.randrange(len(lines)), chance.randrange(len(lines))
    if action < 0.95:
        lines[first], lines[second] = lines[second], lines[first]
    else:
        lines.insert(first, lines[second])
    return b"\n".join(lines)


def _damaged_word(data: bytes, form: str, chance: random.Random) -> bytes:
    words = data.split(b" ")
    at = chance.randrange(len(words))
    new: Any = values(chance) if chance.random() < 0.6 else chance.choice(_PARTS["pieces"][form])
    word = new.text if isinstance(new, Raw) else new if isinstance(new, str) else json.dumps(new)
    action = chance.random()
    if action < 0.6:
        words[at] = word.encode("utf-8", "surrogatepass")
    elif action < 0.75:
        words[at] += word.encode("utf-8", "surrogatepass")
    elif action < 0.9:
        words.insert(at, words[chance.randrange(len(words))])
    else:
        del words[at]
    return b" ".join(words)


def mutant(text: str, form: str, tree: Tree, donors: Sequence[Tree], chance: random.Random) -> bytes:
    """A damaged file. `tree` is what the text holds, None where it holds none."""
    if tree is None or chance.random() < 0.2:
        return damaged_text(text, form, chance)
    written = "yaml" if form == "yaml" and chance.random() < 0.7 else "json"
    try:
        found = dumped(damaged_tree(tree, donors, chance), written, chance.choice((None,) * 8 + (1, 2)))
    except (RecursionError, ValueError, yaml.YAMLError):
        return damaged_text(text, form, chance)
    if chance.random() < 0.05:
        return damaged_text(found, form, chance)
    return found.encode("utf-8", "surrogatepass")
