"""Which class is the causal language model of a configuration, and what precisions are called in torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from parcompile.model.family import by_type
from parcompile.spec import Precision

from .text_head import TEXT_MODELS, with_head

# What precisions are called in torch.

TORCH_DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


# Which class is the causal language model of a configuration.

UNLISTED: Mapping[str, str] = by_type("unlisted_class")
"""Model types whose class `AutoModelForCausalLM` does not find. Transformers 5.23 lists Mistral 4's with the models of
images and text, of which it is the text part."""


def model_class(config: Any) -> Any:
    """The class for language modelling with a configuration, or with those of a class."""
    import transformers

    if config.model_type in TEXT_MODELS:
        return with_head(config.model_type)
    if config.model_type in UNLISTED:
        return getattr(transformers, UNLISTED[config.model_type])
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config if isinstance(config, type) else type(config)]


def causal_model(config: Any, **options: Any) -> Any:
    """The model of a configuration with weights that are drawn, as `AutoModelForCausalLM.from_config` gives it."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if config.model_type in TEXT_MODELS:
        return with_head(config.model_type)._from_config(config, **options)
    listed = AutoModelForImageTextToText if config.model_type in UNLISTED else AutoModelForCausalLM
    return listed.from_config(config, **options)
