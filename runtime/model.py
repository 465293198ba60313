"""Builds the model of a plan with its initial weights: the same whole weights for every layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parcompile.plan import Plan

from .errors import RunError


def build_model(plan: Plan, seed: int | None = None) -> nn.Module:
    """The plan's Hugging Face model, whole, in fp32 on the CPU, with weights drawn from `seed` (default: the plan's).

    The random state of the caller is left as it was.

    Raises:
        RunError: transformers is missing or does not know the model type.
    """
    try:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    except ImportError:
        raise RunError("building the model needs transformers: pip install 'parcompile[hf]'", everywhere=True) from None
    config = hf_config(plan, CONFIG_MAPPING)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.spec.training.seed if seed is None else seed)
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def hf_config(plan: Plan, known: Any) -> Any:
    """The plan's configuration as transformers' own class."""
    values = dict(plan.spec.model.hf_config)
    family = values.pop("model_type")
    for key in ("architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path"):
        values.pop(key, None)
    if family not in known:
        raise RunError(f"transformers does not know the model type {family!r}", everywhere=True)
    # A cache of keys and values serves generation; in training it would only hold memory.
    return known[family](**{**values, "use_cache": False})
