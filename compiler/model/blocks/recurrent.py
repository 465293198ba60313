"""Layers that carry a state along the sequence, in the place of attention or beside it: what their kinds share.

A state is a [key_dim, value_dim] matrix for each of `heads`. `groups` is what tensor parallelism deals to its ranks: a
group has its own keys, and `heads / groups` heads. A sequence that is spread over cp is computed piece by piece.

| a piece hands to the next, of a layer and micro-batch of b rows | bytes of a rank |
|---|---|
| its state, H K V elements in fp32, when it has computed | 4 b H K V / t |
| a halo: what a convolution of n tokens sees of it, C channels of a rank | w b C (n − 1) |
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from parcompile.model import PARTIAL, STREAM, Cut, Part, Split, rows
from parcompile.model.layers import LayerPeriod, LayersError
from parcompile.model.tables import OLDER_KINDS

from .block import Block, Divided, Exchange, Halo, Local, Size, Small, StateCut, Traits

STATE_BYTES = 4
"""Of an element of a state: fp32."""
_OUTPUTS = ("out_proj", "o_proj")
SCALARS = ("A_log", "D", "dt_bias")
"""Numbers of each head."""
Columns = Mapping[str, tuple[Part, ...]]
"""What tensor parallelism splits of each module or parameter, by its last name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent(Block):
    """Which layers carry a state, and how large it is."""

    kind: ClassVar[str]
    """What such a layer is called."""
    told_apart: ClassVar[bool] = False
    kept_as: ClassVar[str] = "GatedDelta"
    """A kind that `kept.json` has rows of, where it has none of this one and of those that it is made from."""
    layers: tuple[int, ...]
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    kernel: int = 1
    """Tokens that the causal convolution in front of the recurrence sees; 1: there is none."""
    chunk: int = 64
    """Tokens that the recurrence computes at once."""
    beside_attention: bool = False
    groups_key: str = field(default="hidden_size", compare=False)
    """The configuration's key of the groups. Configurations that say the same in other words are of one shape."""
    module: str = field(compare=False)
    """What a layer calls it."""
    inside: str = field(default="", compare=False)
    """The module of a layer that it stands in, in some layers."""
    attending_key: str = field(default="", compare=False)
    """The key that lists the numbers of the layers that attend, where nothing else says it."""

    @property
    def replaces_attention(self) -> bool:
        """Unless they attend too."""
        return not self.beside_attention

    @property
    def states(self) -> str:
        """By their kind."""
        return f"linear-attention/SSM layers ({self.kind})"

    @property
    def units(self) -> int:
        """What tensor parallelism deals to its ranks."""
        return self.groups

    @property
    def output_units(self) -> int:
        """The pieces of what the output projection takes that are never split."""
        return self.groups

    @property
    def values(self) -> int:
        """Features of all heads together."""
        return self.heads * self.value_dim

    @property
    def keys(self) -> int:
        """Features of the keys of all groups together."""
        return self.groups * self.key_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values; where there is a convolution, its channels."""
        return 2 * self.keys + self.values

    @property
    def projected(self) -> int:
        """Features that the input projections give: queries, keys, values, and their gate."""
        return self.channels + self.values

    @property
    def state_numel(self) -> int:
        """Elements of the state of one sequence, in one layer."""
        return self.heads * self.key_dim * self.value_dim

    def channels_of_rank(self, tp: int) -> int:
        """Channels of the convolution on a tensor-parallel rank: ranks that share a group have its keys each."""
        return self.values // tp + 2 * self.groups_of_rank(tp) * self.key_dim

    def groups_of_rank(self, tp: int) -> int:
        """Groups that a tensor-parallel rank has heads of."""
        return max(1, self.groups // tp)

    def chunk_of(self, length: int) -> int:  # noqa: ARG002
        """Tokens of a chunk in a piece of so many: the last one is filled up."""
        return self.chunk

    def backward_bytes(self, cut: StateCut) -> float:  # noqa: ARG002
        """What the backward pass of a layer makes of a micro-batch, and lets go of at its end; 0: it is not counted."""
        return 0.0

    def forward_bytes(self, cut: StateCut, width: int) -> float:  # noqa: ARG002
        """What a layer holds at the end of its scan beyond what it keeps, its activations of `width` bytes."""
        return 0.0

    def columns(self) -> Columns:
        """What tensor parallelism splits of the modules that come before the output projection."""
        return {}

    def own(self, name: str) -> str | None:
        """What the module calls a parameter that a layer calls `name`; None where it is not in it."""
        for prefix in (f"{self.module}.", f"{self.inside}.{self.module}."):
            if name.startswith(prefix):
                return name.removeprefix(prefix)
        return None

    def cut(self, own: str, shape: tuple[int, ...]) -> Cut | None:
        """By groups of heads, or by channels."""
        if (module := self.own(own)) is None:
            return None
        name, _, kind = module.rpartition(".")
        last = (name if kind in ("weight", "bias") else module).rpartition(".")[2]
        if last in _OUTPUTS:
            return STREAM if kind == "bias" else rows(Part(self.values, self.output_units), transposed=False)
        if (parts := self.columns().get(last)) is None:
            return PARTIAL  # one for all heads, or few features of which every rank makes those of its own heads
        # Some models keep them as [1, 1, heads, 1].
        return Cut(Split(len(shape) // 2 if last in SCALARS and len(shape) > 3 else 0, parts))

    def dealt(self) -> Divided:
        """Groups, or the heads of one."""
        each = "groups" if self.groups > 1 else "heads"
        return Divided(self.units, f"{self.groups_key} {self.units}", self.groups_key, each)

    def halo(self) -> Halo:
        """What the convolution sees."""
        return Halo(self.kernel - 1, f"{self.kernel} − 1")

    def matmul_parameters(self, hidden: int, streams: int) -> int:  # noqa: ARG002
        """The projections of the input and of the output."""
        return hidden * (self.projected + self.values)

    def exchanges(self, local: Local) -> Iterator[Exchange]:
        """The state and the halo of a piece."""
        yield Exchange("cp", "chain", local.batch * STATE_BYTES * self.state_numel // local.tp)
        halo = local.batch * local.width * self.channels_of_rank(local.tp) * (self.kernel - 1)
        yield Exchange("cp", "halo", halo)

    def small(self, config: Any, small: Small) -> Mapping[str, Any]:  # noqa: ARG002
        """Few heads or channels, and which of the layers that are left attend."""
        attending = [place for place, layer in enumerate(small.layers) if layer not in self.layers]
        return {**self.small_sizes(small), **({self.attending_key: attending} if self.attending_key else {})}

    def small_sizes(self, small: Small) -> Mapping[str, Any]:  # noqa: ARG002
        """The sizes of a small model that do not follow from others."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentTraits(Traits):
    """The name of the module, and which layers have it in the place of attention."""

    telling: ClassVar[int] = -1
    kind: ClassVar[type[Recurrent]]

    module: str = "linear_attn"
    inside: str = ""
    where: str = "in the place of most attention"
    """In which layers it stands, in words."""
    word: str = "linear_attention"
    """What stands for such a layer in the list of layers."""
    attending_words: tuple[str, ...] = ("full_attention",)
    """What stands there for one that attends."""
    layers_key: str = "layer_types"
    layers_alias: str = ""
    """Another name of that key."""
    attending_key: str = ""
    """Where there is no list: the key of the numbers of the layers that attend."""
    attends_by_default: bool = False
    """Whether all layers attend where neither is given."""
    every_key: tuple[str, int] | None = ("full_attention_interval", 4)
    """Where there is no list: the key of a number n, whose every nth layer attends, with its default."""
    by_default: Callable[[Mapping[str, Any], int], tuple[int, ...]] | None = None
    """Which layers carry a state where there is neither, from the configuration and the number of layers."""
    attending_period: LayerPeriod | None = None
    """Where there is no list: which layers attend."""

    @property
    def described(self) -> str:
        """The kind, and where it stands."""
        return f"{self.kind.kind}s {self.where}"

    @property
    def is_periodic(self) -> bool:
        """Where a period says which layers attend."""
        return self.attending_period is not None

    def read(self, config: Mapping[str, Any], layers: int, size: Size) -> tuple[Block, ...]:
        """The layers with a state, where a configuration has some."""
        if not (own := self._layers(config, layers, size)):
            return ()
        listed = self.attending_key if not self.layers_key else ""
        names: dict[str, Any] = {"module": self.module, "inside": self.inside, "attending_key": listed}
        return (self.kind(layers=own, **names, **self.sizes_of(config, size)),)

    @abstractmethod
    def sizes_of(self, config: Mapping[str, Any], size: Size) -> dict[str, Any]:
        """The sizes of the block."""

    def _layers(self, config: Mapping[str, Any], count: int, size: Size) -> tuple[int, ...]:
        names = filter(None, (self.layers_key, self.layers_alias))
        kinds = next((found for key in names if (found := config.get(key)) is not None), None)
        if kinds is None:
            if self.attending_period is not None:
                periodic = self.attending_period.layers(config, count)
                return tuple(layer for layer in range(count) if layer not in periodic)
            if self.by_default is not None:
                return self.by_default(config, count)
            attending = config.get(self.attending_key)
            if self.every_key is None:
                if attending is None and self.attends_by_default:
                    return ()
                return tuple(layer for layer in range(count) if layer not in (attending or ()))
            interval = size(*self.every_key)
            return tuple(layer for layer in range(count) if (layer + 1) % interval)
        if not isinstance(kinds, list | tuple) or len(kinds) != count:
            listed = len(kinds) if isinstance(kinds, list | tuple) else repr(kinds)
            raise LayersError(
                f"{self.layers_key} has {listed} entries for {count} layers: write the kind of each", self.layers_key
            )
        kinds = [OLDER_KINDS.get(str(kind), kind) for kind in kinds]
        known = (self.word, *self.attending_words)
        if others := sorted({str(kind) for kind in kinds} - set(known)):
            raise LayersError(
                f"{self.layers_key} has {', '.join(others)}: the kinds of layers here are {' and '.join(known)}",
                self.layers_key,
            )
        return tuple(layer for layer, kind in enumerate(kinds) if kind == self.word)
