"""Gated delta nets and Kimi delta attention: a matrix of each head, corrected by the error of what it gives for a key.

| a gated delta net | S ← exp(g) S, then S ← S + β k (v − Sᵀ k)ᵀ, read as Sᵀ q | arXiv 2412.06464, equation 10 |
|---|---|---|
| Kimi delta attention | the same with a decay of its own for each row of S, a channel of the key | arXiv 2510.26692 |
| operations of a token and head, forward | 6 K V + 2 c (2 K + V) + c (K + V) | chunkwise form, 2412.06464, 3.3 |

c is the chunk, of 64 tokens: three products with the state, scores of keys and queries within the chunk, and a
triangular system. A piece that receives a state computes with V + K columns in the place of V: beside its output what
each token reads of that state, beside its own state what is left of that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from parcompile.model import Part
from parcompile.model.layers import LayersError

from .block import Size, Small, StateCut
from .recurrent import STATE_BYTES, Columns, Recurrent, RecurrentTraits

_WIDTH_OF_A_HEAD = 16
"""Of a small model."""
_SAID_ELSEWHERE = frozenset(("num_heads", "head_dim", "kda_layers", "full_attn_layers"))
"""Keys of a section that the small model says elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta(Recurrent):
    """A gated delta net."""

    kind: ClassVar[str] = "gated delta net"

    @property
    def projected(self) -> int:
        """Queries, keys, values, their gate, and two numbers of each head."""
        return self.channels + self.values + 2 * self.heads

    def columns(self) -> Columns:
        """By groups of heads."""
        groups = self.groups
        keys, values, heads = (Part(size, groups) for size in (self.keys, self.values, self.heads))
        return {
            # A group has its query, its key, its values and their gates one after the other.
            "in_proj_qkvz": (Part(2 * (self.keys + self.values), groups),),
            "in_proj_ba": (Part(2 * self.heads, groups),),
            **dict.fromkeys(("in_proj_qkv", "conv1d"), (keys, keys, values)),
            **dict.fromkeys(("q_proj", "k_proj"), (keys,)),
            **dict.fromkeys(("in_proj_z", "v_proj", "g_proj"), (values,)),
            **dict.fromkeys(("in_proj_b", "in_proj_a", "b_proj", "a_proj", "dt_bias", "A_log"), (heads,)),
        }

    def flops_per_token(self, *, carried: bool) -> float:
        """In chunks."""
        keys, values, chunk = self.key_dim, self.value_dim + (self.key_dim if carried else 0), self.chunk
        return float(self.heads * (6 * keys * values + 2 * chunk * (2 * keys + values) + chunk * (keys + values)))

    def small_sizes(self, small: Small) -> Mapping[str, Any]:
        """Two narrow key heads on a rank, with at most two value heads each."""
        groups = small.tp * min(self.groups // small.tp, 2)
        return {
            "linear_num_key_heads": groups,
            "linear_num_value_heads": groups * min(self.heads // self.groups, 2),
            "linear_key_head_dim": min(self.key_dim, _WIDTH_OF_A_HEAD),
            "linear_value_head_dim": min(self.value_dim, _WIDTH_OF_A_HEAD),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaTraits(RecurrentTraits):
    """Of gated delta nets."""

    kind: ClassVar[type[Recurrent]] = GatedDelta
    follows_attention: bool = False
    """Sizes that a configuration leaves out follow from its attention."""

    def sizes_of(self, config: Mapping[str, Any], size: Size) -> dict[str, Any]:  # noqa: ARG002
        """Where they follow from attention: as many heads, keys of 3/4 of the hidden size, values twice as wide."""
        attending = size("num_attention_heads", 1) if self.follows_attention else 0
        groups, heads = size("linear_num_key_heads", attending or 16), size("linear_num_value_heads", attending or 32)
        width = max(int(0.75 * size("hidden_size", 1) / groups), 1) if attending else 128
        key_dim = size("linear_key_head_dim", width)
        if heads % groups:
            raise LayersError(
                f"linear_num_value_heads {heads} / linear_num_key_heads {groups} is not whole: each key head serves as "
                "many value heads as the others",
                "linear_num_value_heads",
            )
        return {
            "heads": heads,
            "groups": groups,
            "key_dim": key_dim,
            "value_dim": size("linear_value_head_dim", 2 * key_dim if attending else 128),
            "kernel": size("linear_conv_kernel_dim", 4),
            "groups_key": "linear_num_key_heads",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDelta(GatedDelta):
    """Kimi delta attention."""

    kind: ClassVar[str] = "Kimi delta attention"
    gate_rank: int = 0
    """Features between the two projections of a gate, where it has two; 0: gates are projected at once."""
    section: str = field(default="", compare=False)
    """A section of the configuration that may say the sizes too, before all other keys."""

    @property
    def projected(self) -> int:
        """A decay for each channel, and gates that may come by way of a few features."""
        return self.channels + self.heads + 2 * (self.gate_rank or self.values)

    def backward_bytes(self, cut: StateCut) -> float:
        """The gradient of what each channel of a key has with each token of its chunk, of one piece at a time.

        In fp32: the sum, what is added to it and what comes of it.
        """
        padded = cut.rows * -(-cut.length // self.chunk) * self.chunk
        return 3.0 * STATE_BYTES * padded * self.heads * self.key_dim * self.chunk / cut.tp

    def matmul_parameters(self, hidden: int, streams: int) -> int:
        """Gates by way of a few features have a second projection."""
        return Recurrent.matmul_parameters(self, hidden, streams) + 2 * self.gate_rank * self.values

    def columns(self) -> Columns:
        """A decay for each channel."""
        values = (Part(self.values, self.groups),)
        return {**GatedDelta.columns(self), **dict.fromkeys(("f_proj", "f_b_proj", "g_b_proj", "dt_bias"), values)}

    def small_sizes(self, small: Small) -> Mapping[str, Any]:
        """Two narrow heads on a rank."""
        groups = small.tp * min(self.groups // small.tp, 2)
        sizes = {"linear_num_heads": groups, "linear_head_dim": min(self.key_dim, _WIDTH_OF_A_HEAD)}
        if not self.section:  # keys that transformers writes beside those that they are taken from
            return {key: value for key, value in sizes.items() if key in small.written}
        # What a section says goes before these keys; `layer_types` says which layers they are.
        if (section := small.written.get(self.section)) is None:
            return sizes
        kept = {key: value for key, value in section.items() if key not in _SAID_ELSEWHERE}
        return {**sizes, self.section: {**kept, "short_conv_kernel_size": self.kernel}}


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaTraits(RecurrentTraits):
    """Of Kimi delta attention."""

    kind: ClassVar[type[Recurrent]] = KimiDelta
    gates_by_few: bool = False
    """Its gates are projected by way of a few features, as many as a head has."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """What the configuration calls the keys of its sizes, where they have other names."""
    section: str = ""

    def sizes_of(self, config: Mapping[str, Any], size: Size) -> dict[str, Any]:
        """Of the section, else of the keys."""
        section = {} if config.get(self.section) is None else config[self.section]
        if not isinstance(section, Mapping):
            raise LayersError(f"{self.section} is {section!r}: it has to be an object", self.section)

        def called(key: str) -> str:
            # A configuration that transformers saved has both names, and its class takes the value of the longer one:
            # it writes another width over the published head_dim.
            return key if config.get(key) is not None else self.sizes.get(key, key)

        def of(key: str, inside: str, default: int) -> int:
            if inside not in section:
                return size(called(key), default)
            value = section[inside]
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                message = f"{self.section}.{inside} is {value!r}: it has to be a whole number of 1 or more"
                raise LayersError(message, self.section)
            return value

        heads, width = of("linear_num_heads", "num_heads", 32), of("linear_head_dim", "head_dim", 128)
        heads_key = self.sizes.get("linear_num_heads", "linear_num_heads")
        if size(heads_key, 32) != heads:
            heads_key = "linear_num_heads"
        return {
            "heads": heads,
            "groups": heads,
            "key_dim": width,
            "value_dim": width,
            "kernel": of("linear_conv_kernel_dim", "short_conv_kernel_size", 4),
            "groups_key": self.section if "num_heads" in section else heads_key,
            "gate_rank": width if self.gates_by_few else 0,
            "section": self.section,
        }
