"""What gpt-neox makes of its options: several spellings of one thing become one (calculate_derived, ParallelMLP)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from parcompile.backends.reading import Source, Undecided, UndecidedError

from .model import kinds, mlp_width
from .options import defaults

STANDS_FOR: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "expansion_factor": ("intermediate_size",),
        "mlp_multiple_of": ("intermediate_size",),
        "mlp_type": ("intermediate_size", "activation"),
        "fp16.enabled": ("precision",),
        "bf16.enabled": ("precision",),
        "lr_decay_fraction": ("lr_decay_iters",),
    }
)
"""Options that are another spelling, and those that they set."""
_GATED = ("swiglu", "geglu", "reglu", "bilinear", "glu")


def meaning(given: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every option after all that follows from the given ones.

    What hangs on a value that the file does not decide is left as it was given.
    """
    found = {**defaults(), **given}
    with contextlib.suppress(UndecidedError, TypeError, ValueError):
        _model(found, given)  # sizes that are open or wrong are reported where they are read
    for section, name in (("fp16", "fp16"), ("bf16", "bfloat16")):
        if found.get("precision") is None and found.get(f"{section}.enabled") is True:
            found["precision"] = name
    found["precision"] = found.get("precision") or "fp32"
    if found.get("pipe_parallel_size") == 0:
        found["pipe_parallel_size"] = 1
    if isinstance(found.get("optimizer.type"), str):
        found["optimizer.type"] = found["optimizer.type"].lower()
    _schedule(found)
    return found


def _model(found: dict[str, Any], given: Mapping[str, Any]) -> None:
    activation = str(found["activation"]).lower()
    is_gated = activation in _GATED or found.get("mlp_type") == "llama"
    if found.get("mlp_type") == "llama":
        activation = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "relu": "reglu"}.get(activation, activation)
    found["activation"] = "silu" if activation == "swish" else activation
    found["norm"] = str(found["norm"]).removeprefix("te_")
    if isinstance(found.get("hidden_size"), int):
        width = mlp_width(Source(given, defaults()), found["hidden_size"], gated=is_gated)
        found["intermediate_size"] = 3 * width if is_gated else width
    if found.get("num_kv_heads") is None:
        found["num_kv_heads"] = found["num_attention_heads"]
    if set(kinds(found.get("attention_config"))) <= {"global", "flash"}:
        found["attention_config"] = "full attention"


def _schedule(found: dict[str, Any]) -> None:
    total, part = found.get("train_iters"), found.get("lr_decay_fraction")
    if any(isinstance(found.get(name), Undecided) for name in ("train_iters", "lr_decay_fraction", "warmup")):
        return
    if found.get("lr_decay_iters") is None:
        found["lr_decay_iters"] = math.floor(total * part) if total and part else total
    if found.get("lr_decay_style") == "constant":
        found["min_lr"] = 0.0
