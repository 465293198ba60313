"""What of a Hugging Face configuration decides the model, and what only tells of the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

WITHOUT_EFFECT = (
    *("architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "use_cache"),
    "quantization_config",
)
"""Keys that change no number of a training step.

They name who wrote the file and where it lay, the class that was saved, the type of its weights (a spec has its own)
and the cache of keys and values, which serves generation. Quantized weights cannot be loaded (`PretrainedFolder` says
so): how they were quantized holds for no weight of a run.
"""


FLOAT = "__float__"
"""The key of an object that stands for a number without a name: {"__float__": "Infinity"}."""


def architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without the keys that have no effect on training."""
    return {key: value for key, value in config.items() if key not in WITHOUT_EFFECT}


def portable(value: Any) -> Any:
    """A configuration whose numbers JSON has names for; others are objects, as transformers writes them."""
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, Mapping):
        return {key: portable(one) for key, one in value.items()}
    return [portable(one) for one in value] if isinstance(value, list | tuple) else value
