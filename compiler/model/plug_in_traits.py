"""What only families of plug-ins say: of built-in ones the derived tables say it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class QkNorm(enum.Enum):
    """The norm of queries and keys."""

    NONE = "none"
    HEAD = "one weight of a head's width, used by all heads"
    HEADS = "a weight for each head"
    WHOLE = "one norm over all heads together"


Switch = bool | str | tuple[str, ...]
"""A trait that is fixed, or the configuration key that decides it; several keys stand for the same thing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfPlugIn:
    """How the rows of a family are written, under the names of a layer. Without arguments it is Llama."""

    final_norm: str = "norm"
    """Empty: the last layer ends with one."""
    order: tuple[str, ...] = ("attention", "mlp", "norms")
    """The parts of a layer in the order in which they are registered; other words name one norm each."""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """One name stands for a fused projection."""
    output: str = "o_proj"
    """The projection of what the heads give."""
    qk_norm: QkNorm = QkNorm.NONE
    qk_norm_key: str | None = None
    """The configuration key that switches the norm of queries and keys on."""
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    gated: bool = True
    """Two column-parallel projections; fused when `up` has one name."""
    down: str = "down_proj"
    norms_by: Callable[[Mapping[str, Any]], tuple[str, ...]] | None = None
    """The norms of a layer in a configuration, where they vary."""
    norm_bias: Switch = False
    """Norms of weights have a bias too."""
    qkv_bias: Switch = "attention_bias"
    output_bias: Switch = "attention_bias"
    mlp_bias: Switch = False
    head_bias: Switch = False
    never_tied: bool = False
    """The class ties its head to the embedding in no configuration."""
    own_head_dim: bool = True
    """The configuration may state `head_dim`; otherwise it is hidden_size / num_attention_heads."""
    null_is_off: tuple[str, ...] = ()
    """Switches that transformers takes for off where they are null; it refuses the null of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsOfPlugIn:
    """How the rows of its experts are written."""

    router: str = "gate"
    gated: bool = True
    """The first projection gives a gate too."""
    transposed: bool = False
    """Stored as [experts, in, out]."""
    shared_gate: str = ""
    count_alias: str | None = None
    """Another name of the key of their number, which transformers reads and may write too."""
    chosen_alias: str | None = None
    """That of the key of how many of them a token visits."""
    shared_alias: str | None = None
    """That of the key of how many are shared."""
