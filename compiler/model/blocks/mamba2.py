"""Mamba-2 layers: S ← exp(Δ A) S + Δ x Bᵀ, read as S C (arXiv 2405.21060, section 2).

A head has a state of [state size, head dim] and its own decay; a group of heads shares what writes to the state and
what reads from it (B and C). Ranks of tp that have heads of one group have what it shares each, and sum the squares of
its gated norm.

Operations of a token and head, forward: 4 N P + 2 c (N + P), of N state features, P values and chunks of c tokens
(section 6); 2 N P more where a token reads of a received state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from parcompile.model import Part
from parcompile.model.layers import LayersError

from .block import Exchange, Local, Size, Small, StateCut
from .recurrent import SCALARS, STATE_BYTES, Columns, Recurrent, RecurrentTraits

_FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Keys:
    """What a configuration calls the sizes of its Mamba-2 layers, with defaults.

    The features of all heads together are `width`, where there is such a key and it has a value; else `expand` times
    the hidden size, or where that is None too the heads times their width.
    """

    heads: tuple[str, int] = ("mamba_n_heads", 128)
    head_dim: tuple[str, int | None] = ("mamba_d_head", None)
    """Without a value, or "auto": the features of all heads, divided by the heads."""
    groups: tuple[str, int] = ("mamba_n_groups", 1)
    state: tuple[str, int] = ("mamba_d_state", 256)
    kernel: tuple[str, int] = ("mamba_d_conv", 4)
    chunk: tuple[str, int] = ("mamba_chunk_size", 256)
    width: tuple[str, int] | None = None
    expand: tuple[str, int] | None = ("mamba_expand", 2)
    norm: tuple[str, bool] | None = None
    """The key that switches the gated norm on; None: there always is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(Recurrent):
    """Its sizes."""

    kind: ClassVar[str] = "Mamba-2 layer"
    gated_norm: bool
    """A norm of what all heads give, times a gate, in front of the output projection."""
    called: Mamba2Keys = field(compare=False)
    """The keys of the sizes."""

    @property
    def units(self) -> int:
        """Groups; of one group its heads."""
        return self.heads if self.groups == 1 else self.groups

    @property
    def output_units(self) -> int:
        """Heads."""
        return self.heads

    @property
    def projected(self) -> int:
        """One number of each head."""
        return self.channels + self.values + self.heads

    def fused(self) -> tuple[Part, ...]:
        """What the input projection gives.

        Gate, channels of the convolution (x, B, C), and a step size of each head. Tensor parallelism splits heads, and
        groups with them; ranks that have heads of one group hold its rows each.
        """
        values, groups = Part(self.values, self.heads), Part(self.keys, self.groups)
        return values, values, groups, groups, Part(self.heads, self.heads)

    def columns(self) -> Columns:
        """By heads and groups."""
        fused = self.fused()
        return {**dict.fromkeys(SCALARS, fused[4:]), "conv1d": fused[1:4], "in_proj": fused, "norm": fused[:1]}

    def sums_norm(self, own: str) -> bool:
        """By groups, which ranks have whole but for one group."""
        return self.own(own) is not None

    def flops_per_token(self, *, carried: bool) -> float:
        """In chunks."""
        states = self.key_dim * self.value_dim * (6 if carried else 4)
        return float(self.heads * (states + 2 * self.chunk * (self.key_dim + self.value_dim)))

    def forward_bytes(self, cut: StateCut, width: int) -> float:
        """Of one piece at a time.

        The function of the scan holds two more fp32 numbers of each state feature, 11 of each value, where the layer
        goes on to keep 10 or 7, and a state of each chunk; its caller the channels behind their activation, but not
        yet the output.
        """
        kept = 10 if self.gated_norm else 7
        of_heads: float = 4 * (2 * self.key_dim + (11 - kept) * self.value_dim)
        of_heads += STATE_BYTES * self.key_dim * self.value_dim / self.chunk
        beyond_output = self.channels_of_rank(cut.tp) - self.values / cut.tp
        of_token = self.heads * of_heads / cut.tp + cut.pieces * width * beyond_output
        return cut.rows * -(-cut.length // self.chunk) * self.chunk * of_token

    def exchanges(self, local: Local) -> Iterator[Exchange]:
        """Squares of a norm over more heads than a rank has, and their gradient."""
        yield from Recurrent.exchanges(self, local)
        if self.gated_norm and self.groups < local.tp:
            yield Exchange("tp", "all-reduce", _FP32_BYTES * local.tokens, back="all-reduce")

    def small_sizes(self, small: Small) -> Mapping[str, Any]:
        """A few heads on a rank, and as many ranks as before that share a group of them."""
        keys, tp = self.called, small.tp
        groups = min(self.groups, 2 * tp if self.groups % (2 * tp) == 0 else tp) if self.groups > 1 else 1
        features = self.value_dim * 2 * max(groups, tp)
        changed: dict[str, Any] = {keys.groups[0]: groups}
        if keys.width is not None:
            changed[keys.width[0]] = features
        elif keys.expand is not None:
            features = small.hidden * (self.values // small.whole_hidden)
        heads = max(groups, tp) * (2 if features % (2 * max(groups, tp)) == 0 else 1)
        return {**changed, keys.heads[0]: heads, keys.head_dim[0]: features // heads}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Traits(RecurrentTraits):
    """Of Mamba-2 layers."""

    kind: ClassVar[type[Recurrent]] = Mamba2
    module: str = "mamba"
    layers_key: str = ""
    every_key: tuple[str, int] | None = None
    keys: Mamba2Keys = field(default_factory=Mamba2Keys)
    beside_attention: bool = False
    """Every layer has the module beside its attention: both take the same hidden states, their results are added."""

    def sizes_of(self, config: Mapping[str, Any], size: Size) -> dict[str, Any]:
        """The sizes.

        Raises:
            LayersError: heads, their width and groups do not fit each other.
        """
        keys = self.keys
        heads, groups = size(*keys.heads), size(*keys.groups)
        name = keys.head_dim[0]
        told_alone = keys.expand is None and keys.width is None
        given = config.get(name) not in (None, "auto") or (keys.head_dim[1] is not None and not told_alone)
        if keys.width is not None and (keys.width[0] not in config or config[keys.width[0]] is not None):
            features, told = size(*keys.width), keys.width[0]
        elif keys.expand is not None:
            expand, hidden = size(*keys.expand), size("hidden_size", None)
            features, told = expand * hidden, f"{keys.expand[0]} {expand} x hidden_size {hidden} ="
        else:
            features, told = heads * size(*keys.head_dim), name
        if features % heads:
            raise LayersError(f"{told} {features} / {keys.heads[0]} {heads} is not whole", keys.heads[0])
        if given and (width := size(*keys.head_dim)) * heads != features:
            raise LayersError(
                f"{keys.heads[0]} {heads} x {name} {width} = {heads * width} is not {told} {features}", name
            )
        if heads % groups:
            raise LayersError(
                f"{keys.heads[0]} {heads} / {keys.groups[0]} {groups} is not whole: each group serves as many heads as "
                "the others",
                keys.groups[0],
            )
        return {
            "heads": heads,
            "groups": groups,
            "key_dim": size(*keys.state),
            "value_dim": features // heads,
            "kernel": size(*keys.kernel),
            "chunk": size(*keys.chunk),
            "gated_norm": keys.norm is None or bool(config.get(*keys.norm)),
            "groups_key": (keys.groups if groups > 1 else keys.heads)[0],
            "called": keys,
            "beside_attention": self.beside_attention,
        }
