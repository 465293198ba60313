"""Writes schemas/ds_config.schema.json: the facts of the newest version in keys.json with the words of words.json.

    python .ci/generate/deepspeed/schema.py [--check]

The schema is for editors: it is closed at every level and takes values in their own type, where DeepSpeed converts
text. What is removed stands in it as a key that takes nothing, and says what to write instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from parcompile.backends.deepspeed.table import ANY, ENTRY, Key, as_schema, classes, newest, table
from parcompile.lint import deepspeed as fillers
from parcompile.lint.deepspeed import constructors

ROOT = Path(__file__).resolve().parents[3]
TARGET = ROOT / "schemas" / "ds_config.schema.json"
WORDS: dict[str, Any] = json.loads((Path(__file__).parent / "words.json").read_text(encoding="utf-8"))
FRAME: dict[str, Any] = json.loads((Path(__file__).parent / "frame.json").read_text(encoding="utf-8"))
"""What stands before the keys (`{newest}` is the version) and behind them, and the key of editors."""
CLASSES = ("Adam", "Lamb", "Lion", "Adagrad", "Muon")


def said(path: str) -> dict[str, Any]:
    """Title, description and examples of a key."""
    entry = WORDS.get(path)
    if entry is None:
        sys.exit(f"words.json says nothing of {path}")
    return {name: entry[name] for name in ("title", "description", "examples") if name in entry}


def node(key: Key) -> dict[str, Any]:
    """The schema of a key and of everything in it."""
    if key.refused:
        return {**said(key.path), "deprecated": True, "not": {}}
    words = WORDS.get(key.path, {})
    if key.deprecated:
        return {**said(key.path), "deprecated": True, **as_schema(key.facts)}
    body = as_schema({**words.get("is", {}), **key.facts})
    if "names" in key.facts:
        body = {"anyOf": [{"enum": [*key.facts["names"], *([None] if key.facts.get("null") else [])]}]}
        body = body["anyOf"][0]
    body.update(section(key))
    default = key.default if "default" in key.facts else words.get("default")
    is_default = "default" in key.facts or "default" in words
    takes_default = Draft202012Validator(body).is_valid(default)
    if is_default and takes_default and key.facts.get("type") != "section" and not isinstance(default, dict):
        body["default"] = default
    filled = [name for name in (fillers.TRANSFORMERS, fillers.ACCELERATE) if key.path in fillers.filled(name)]
    if filled:
        body["x-filled-by"] = filled
    if words.get("old"):
        body["deprecated"] = True
    found = {**said(key.path), **body}
    if body.get("not") == {}:
        found.pop("examples", None)  # nothing that a file can hold
    return found


def section(key: Key) -> dict[str, Any]:
    """What a key says of the keys and entries in it."""
    inner = {name: one for name, one in key.keys.items() if name not in (ANY, ENTRY)}
    found: dict[str, Any] = {}
    if inner:
        aliases = {name: node(one) for name, one in inner.items() if name == one.name}
        others = {
            name: {**aliases[one.name], "title": aliases[one.name]["title"]}
            for name, one in inner.items()
            if name != one.name
        }
        found = {"type": ["object", "null"] if key.facts.get("null") else "object"}
        found["properties"] = {**aliases, **others, **gone(key, inner)}
        found["additionalProperties"] = False
    if ANY in key.keys:
        found["additionalProperties"] = node(key.keys[ANY])
    if ENTRY in key.keys:
        found["items"] = node(key.keys[ENTRY])
    return found


def gone(key: Key, inner: Any) -> dict[str, Any]:
    """Keys that many files have and no version reads there, with what to write instead."""
    prefix = f"{key.path}."
    names = [
        path.removeprefix(prefix) for path, entry in WORDS.items() if path.startswith(prefix) and entry.get("gone")
    ]
    return {
        name: {**said(f"{prefix}{name}"), "deprecated": True, "not": {}}
        for name in names
        if "." not in name and name not in inner
    }


def optimizer() -> dict[str, Any]:
    """Which parameters each optimizer takes, in whatever way it is run."""
    version = newest()
    known = constructors.optimizers(version)
    own = [one["written"] for name, one in constructors.CLASSES.items() if name in known]
    spelt = [spelling for name in own for spelling in dict.fromkeys((name, name.lower(), name.upper()))]
    conditions = []
    for name in CLASSES:
        low = name.lower()
        kinds = ("Adam", "AdamW") if low == "adam" else (name,)
        takes: dict[str, None] = {}
        for params in ({}, {"torch_adam": True}):
            for zero in ({}, {"offload_optimizer": {"device": "cpu"}}):
                tree = {"optimizer": {"type": name, "params": params}, "zero_optimization": zero}
                found = constructors.optimizer(tree, version)
                takes.update(dict.fromkeys(found.takes if found else ()))
        enum = [spelling for kind in kinds for spelling in dict.fromkeys((kind, kind.lower(), kind.upper()))]
        conditions.append(condition({"enum": enum}, f"{' and '.join(kinds)}", sorted(takes)))
    return {"type": {"enum": [*spelt, *constructors.torch_classes("optim")]}, "allOf": conditions}


def scheduler() -> dict[str, Any]:
    known = classes(newest())
    conditions = []
    for name in constructors.SCHEDULES:
        one = condition({"const": name}, name, list(known[name]))
        required = [parameter for parameter, facts in known[name].items() if facts.get("required")]
        if required:
            one["then"]["properties"]["params"]["required"] = required
        conditions.append(one)
    return {
        "type": {"enum": [*constructors.SCHEDULES, *constructors.torch_classes("lr_scheduler")]},
        "allOf": conditions,
    }


def condition(kind: dict[str, Any], name: str, takes: list[str]) -> dict[str, Any]:
    return {
        "if": {"properties": {"type": kind}, "required": ["type"]},
        "then": {
            "properties": {
                "params": {
                    "propertyNames": {"title": "Setting", "description": f"{name}: {', '.join(takes)}", "enum": takes}
                }
            }
        },
    }


def schema() -> dict[str, Any]:
    root = table(newest())
    properties = {name: node(key) for name, key in root.keys.items() if name == key.name}
    for name, rules in (("optimizer", optimizer()), ("scheduler", scheduler())):
        entry = properties[name]
        entry["properties"]["type"] = {**said(f"{name}.type"), **rules["type"]}
        # The names of parameters are those of the class, not of a list.
        entry["properties"]["params"].pop("additionalProperties", None)
        entry.update(required=["type"], allOf=rules["allOf"])
    properties["zero_optimization"]["type"] = ["object", "boolean"]
    head = {**FRAME["head"], "description": FRAME["head"]["description"].replace("{newest}", newest())}
    return {**head, "properties": {"$schema": FRAME["editor"], **ordered(properties)}, **FRAME["tail"]}


def ordered(properties: dict[str, Any]) -> dict[str, Any]:
    """The keys in the order of words.json, which is that of the documentation."""
    rank = {name: index for index, name in enumerate(WORDS)}
    return dict(sorted(properties.items(), key=lambda item: rank.get(item[0], len(rank))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the file is out of date")
    check = parser.parse_args().check
    text = json.dumps(schema(), indent=2) + "\n"
    if check and TARGET.read_text(encoding="utf-8") != text:
        sys.exit(f"{TARGET.name} is out of date")
    if not check:
        TARGET.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
