"""Which keys of a configuration take a number or a switch and no null, as transformers' own classes declare them.

    python .ci/generate/key_types.py      # writes compiler/model/key_types.json

Most classes are strict: a value of another type, or null, is refused before a model is built. A key stands in the file
when its class declares a number or a switch and refuses null.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING

from parcompile.model.catalogue import model_types

FILE = Path(__file__).parents[2] / "compiler" / "model" / "key_types.json"
_KINDS = {"int": "whole", "float": "number", "float | int": "number", "int | float": "number", "bool": "switch"}


def key_types() -> dict[str, dict[str, list[str]]]:
    """The keys of each type of causal language models, refused ones too, by what they take."""
    found = {}
    for name in (one.name for one in model_types().values() if one.causal and one.name in CONFIG_MAPPING):
        kinds: dict[str, list[str]] = {}
        for one in dataclasses.fields(CONFIG_MAPPING[name]):
            said = one.type.__name__ if isinstance(one.type, type) else str(one.type)
            if said in _KINDS and isinstance(one.default, int | float) and _refuses_null(name, one.name):
                kinds.setdefault(_KINDS[said], []).append(one.name)
        found[name] = {kind: sorted(keys) for kind, keys in sorted(kinds.items())}
    return found


def _refuses_null(name: str, key: str) -> bool:
    """Whether the class does what it declares: some set a value before it is checked, or check nothing."""
    try:
        CONFIG_MAPPING[name](**{key: None})
    except Exception as error:
        return f"Validation error for field '{key}'" in str(error)
    return False


def text() -> str:
    """The file: one line for each type."""
    types = ",\n".join(f"  {json.dumps(name)}: {json.dumps(kinds)}" for name, kinds in key_types().items())
    version = json.dumps(transformers.__version__)
    return f'{{"transformers": {version}, "types": {{\n{types}\n}}}}\n'


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
