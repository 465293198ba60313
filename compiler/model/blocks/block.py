"""What a mechanism tells of itself, in numbers that depend on nothing but its sizes and a rank's share of tokens.

A `Traits` is what a family says (data); it reads a configuration into a `Block`, which has the sizes, and the layers
that it stands in. What a mechanism has nothing to say of it leaves out: the answers here are those of nothing at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from parcompile.model import Cut

Size = Callable[[str, "int | None"], int]
"""The value of a key of a configuration, or its default."""


class Local(NamedTuple):
    """What a rank has of a micro-batch."""

    batch: int
    hidden: int
    streams: int
    """Hidden states of each token between layers."""
    width: int
    """Bytes of an activation."""
    tokens: int
    """Of this rank of cp."""
    split_tokens: int
    """The same, each sequence continued to a multiple of tp where sequence parallelism splits it."""
    tp: int
    sequence_parallel: bool

    @property
    def share(self) -> int:
        """Ranks that the tokens outside of regions are dealt to."""
        return self.tp if self.sequence_parallel else 1


class StateCut(NamedTuple):
    """What a rank has of a layer that carries a state, and of a micro-batch."""

    tp: int
    cp: int
    rows: int
    """Sequences of the micro-batch."""
    pieces: int
    """Of each sequence, on the rank."""
    length: int
    """Tokens of a piece."""


class Exchange(NamedTuple):
    """What a layer sends of a micro-batch over an axis, in forward, and `back` in backward."""

    axis: str
    kind: str
    """An operation, or what each piece of the sequence hands to the next, with a gradient back.

    A "chain" waits for what the piece before has handed on, a "halo" for nothing.
    """
    size: float
    """Bytes: of an all-reduce, and of what is gathered or scattered, all of it; over cp a rank's own."""
    back: str = ""


class Divided(NamedTuple):
    """What tp has to divide."""

    size: int
    told: str
    key: str
    each: str = ""
    """What these are, where tp deals whole ones to its ranks."""


class Halo(NamedTuple):
    """Tokens of the piece before that a piece of the sequence has to see."""

    tokens: int
    told: str


class Small(NamedTuple):
    """The small model of the same kind that a mechanism gives its keys for."""

    layers: Sequence[int]
    """Those of the model that it has."""
    starts: Collection[int]
    """The places among them at which stages begin."""
    before: int
    """Tokens of a sequence of the model."""
    length: int
    """The same of the small one."""
    written: Mapping[str, Any]
    """The model's configuration as files have it."""
    tp: int
    hidden: int
    """Features of the hidden states of the small model."""
    whole_hidden: int
    """The same of the model."""


class Block:
    """A mechanism with its sizes, in the layers that have it."""

    __slots__ = ()

    layers: tuple[int, ...]
    streams_dim: ClassVar[int | None] = None
    """Where hidden states between layers have its streams; None: it makes none, or they lie side by side."""
    told_apart: ClassVar[bool] = True
    """Whether masks are enough to tell documents of one row apart."""
    inputs: ClassVar[Sequence[str]] = ()
    """What names of parameters in front of the layers begin with, where a stage that receives streams has no use."""

    has: ClassVar[str] = ""
    """What those layers have, where others do without; empty: that needs no words."""

    @property
    def streams(self) -> int:
        """Hidden states of each token that a layer hands on."""
        return 1

    def hides_keys(self, length: int) -> bool:  # noqa: ARG002
        """Whether a query does not see all keys before it, in sequences of this length."""
        return False

    @property
    def behind(self) -> frozenset[int]:
        """Layers that take what a layer before them has made, beside hidden states: no stage begins with one."""
        return frozenset()

    @property
    def unmasked(self) -> Collection[int]:
        """Layers whose attention goes by something else than a mask of the model."""
        return ()

    @property
    def states(self) -> str:
        """What its layers are called, where they carry a state along the sequence; else empty."""
        return ""

    @property
    def replaces_attention(self) -> bool:
        """Whether its layers do not attend."""
        return False

    @property
    def beside_attention(self) -> bool:
        """Whether its layers attend too, and add what both give."""
        return False

    def count(self, layers: range) -> int:
        """How many of these layers have it."""
        return bisect_left(self.layers, layers.stop) - bisect_left(self.layers, layers.start)

    def share(self, total: int) -> float:
        """The share of a model's layers that have it."""
        return len(self.layers) / total

    def cut(self, own: str, shape: tuple[int, ...]) -> Cut | None:  # noqa: ARG002
        """How a parameter that layers call `own` is cut; None where it is none of this mechanism."""
        return None

    def is_late(self, own: str) -> bool:  # noqa: ARG002
        """Whether the gradient of a parameter counts at the peak: a table's, with all layers before it still to go."""
        return False

    def divided(self, own: str, shape: tuple[int, ...]) -> Iterator[Divided]:  # noqa: ARG002
        """What tp has to divide of a parameter."""
        yield from ()

    def dealt(self) -> Divided | None:
        """What tp deals to its ranks whole."""
        return None

    def sums_norm(self, own: str) -> bool:  # noqa: ARG002
        """Whether a norm whose features tp splits is summed over ranks by `exchanges`, and not as others are."""
        return False

    def halo(self) -> Halo | None:
        """What a piece of the sequence sees of the piece before."""
        return None

    def matmul_parameters(self, hidden: int, streams: int) -> int:  # noqa: ARG002
        """Of a layer, those that multiply each token."""
        return 0

    def forward_flops(self, hidden: int, query_rank: int, sequence_length: int) -> float:  # noqa: ARG002
        """Operations of a layer for a token that have no gradient, and that each tp rank computes all of.

        `query_rank` is how many features queries are compressed to; 0 where they are not.
        """
        return 0.0

    def flops_per_token(self, *, carried: bool) -> float:  # noqa: ARG002
        """Forward operations of a layer beside products with parameters, for a token.

        Args:
            carried: its piece of a sequence goes on with the state of the piece before.
        """
        return 0.0

    def end_parameters(self, hidden: int) -> int:  # noqa: ARG002
        """Outside of the layers, those that multiply each token."""
        return 0

    def exchanges(self, local: Local) -> Iterator[Exchange]:  # noqa: ARG002
        """What a layer sends of a micro-batch."""
        yield from ()

    def borders(self) -> Iterator[int]:
        """Lengths of sequences, in tokens, from which on it computes otherwise."""
        yield from ()

    def small(self, config: Any, small: Small) -> Mapping[str, Any]:  # noqa: ARG002
        """The keys of a small model."""
        return {}


class Traits(ABC):
    """What a family says of a mechanism."""

    __slots__ = ()

    words: ClassVar[str]
    """What distinguishes a type that has it."""
    telling: ClassVar[int] = 1
    """-1: that comes first; 0: in front of what layers take in beside their inputs; 2: behind the kind of attention."""
    lists: ClassVar[Sequence[str]] = ()
    """What keys end with that list something for each layer."""
    rules: ClassVar[Mapping[str, str]] = {}
    """What the pages of rules say of it, by code."""
    pieces: ClassVar[Sequence[tuple[str, str]]] = ()
    """Parameters that published files store in pieces: a pattern of the name, and the ending of a piece with `{}`."""

    @property
    def described(self) -> str:
        """The words of a type that says so much of it."""
        return self.words

    @property
    def is_periodic(self) -> bool:
        """Whether a period says which layers have it."""
        return False

    @abstractmethod
    def read(self, config: Mapping[str, Any], layers: int, size: Size) -> tuple[Block, ...]:
        """The mechanism in a model of so many layers: a block for each set of layers that have another part of it.

        Raises:
            LayersError: a size or a list of layers that transformers' class does not take.
        """

    @classmethod
    def numeric_keys(cls, declared: frozenset[str]) -> frozenset[str]:  # noqa: ARG003
        """Keys that change numbers, beside those that classes declare or name in their code."""
        return frozenset()
