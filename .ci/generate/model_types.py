"""Writes compiler/model/model_types.json: why the runtime refuses a model type of the installed transformers.

    python .ci/generate/model_types.py

Lists every type that `AutoModelForCausalLM` or `AutoModelForImageTextToText` builds and that has no row in
`compiler/model/families/`, with the key of its reason in `compiler/model/catalogue.py` and the type of its text
part. A reason follows from what the type is, or stands in model_types.json.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from parcompile.model.catalogue import TYING
from parcompile.model.families import FAMILIES

FILE = Path(__file__).parents[2] / "compiler" / "model" / "model_types.json"

WRITTEN: dict[str, str] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Reasons that do not follow from what a type is."""
ENCODERS = re.compile(r"bert|electra|^ernie$|roformer|xmod|data2vec|rembert|big_bird$|^xlm|^git$|reformer|xlnet")


def text_type(config: type[Any]) -> str | None:
    """The model type of `text_config` where a configuration has one."""
    kinds = getattr(config, "sub_configs_defaults", None) or getattr(config, "sub_configs", None) or {}
    kind = kinds.get("text_config")
    if kind is None:
        return None
    found = getattr(kind, "model_type", None) or getattr(getattr(kind, "config_class", None), "model_type", None)
    return found or None


def reason(name: str, config: type[Any]) -> str:
    """The key of what stands in the way."""
    if name in WRITTEN:
        return WRITTEN[name]
    if "text_config" in (getattr(config, "sub_configs_defaults", None) or getattr(config, "sub_configs", None) or {}):
        return "multimodal"
    with contextlib.suppress(Exception):
        if config().is_encoder_decoder:
            return "encoder_decoder"
    if ENCODERS.search(name):
        return "encoder"
    if getattr(config, "sub_configs_defaults", None) or getattr(config, "sub_configs", None):
        return "multimodal"
    return "no_table"


def entries() -> dict[str, dict[str, str]]:
    """Each type with its reason."""
    names = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    found = {}
    for name in sorted(names.keys() - FAMILIES.keys()):
        try:
            config = CONFIG_MAPPING[name]
        except Exception:
            continue
        found[name] = {"reason": reason(name, config)}
        if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            found[name]["only"] = "multimodal"
        if (text := text_type(config)) is not None:
            found[name]["text"] = text
            if kind := tying(config, text):
                found[name]["tied"] = kind
    return found


def tying(config: type[Any], text: str) -> str:
    """Who says whether the head of a multimodal model is tied: the first key of `TYING` that does as its class does."""
    said = list(itertools.product((None, False, True), repeat=2))
    found = []
    for whole, inner in said:
        given: dict[str, Any] = {"text_config": {"model_type": text, **_stated(inner)}, **_stated(whole)}
        with contextlib.suppress(Exception):
            found.append(bool(getattr(config(**given), "tie_word_embeddings", False)))
    if len(found) < len(said):
        return ""  # no such model can be built
    kinds = [kind for kind, rule in TYING.items() if [rule(*pair) for pair in said] == found]
    if not kinds:
        pairs = dict(zip(said, found, strict=True))
        raise SystemExit(f"{config.__name__} ties its head in a way that TYING does not have: {pairs}")
    return kinds[0]


def _stated(tied: bool | None) -> dict[str, bool]:
    return {} if tied is None else {"tie_word_embeddings": tied}


def main() -> None:
    """Writes the file."""
    value = {"transformers": transformers.__version__, "types": entries()}
    FILE.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
