"""What of a Hugging Face configuration decides the model, and what only tells of the file."""

from __future__ import annotations

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


def architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without the keys that have no effect on training."""
    return {key: value for key, value in config.items() if key not in WITHOUT_EFFECT}
