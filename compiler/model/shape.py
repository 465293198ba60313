"""The dimensions of a decoder-only transformer, independent of where they were read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar

from . import within
from .blocks import Block
from .blocks.experts import MoeShape as MoeShape
from .compressed_keys import LowRank
from .layers import LayerAttention, LayerBlocks, LayerKind, LayerRuns
from .shared_blocks import INPUTS, SharedBlocks
from .user_module import UserModule

B = TypeVar("B", bound=Block)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """A second embedding of each token, of which every layer gets a part of its own."""

    vocab_size: int
    width: int
    """Of one layer's part."""


@dataclass(frozen=True, slots=True)
class Caps:
    """What keeps numbers of a model small, or drops them."""

    logits: bool = False
    """A tanh keeps logits within a cap,"""
    scores: bool = False
    """and scores of attention."""
    dropout: bool = False
    """Weights of attention are dropped at random."""


@dataclass(frozen=True, slots=True)
class Positions:
    """How attention knows positions; neither rotary nor ALiBi: a table of `max_position_embeddings` rows."""

    rotary: bool = True
    """Positions without end (rotary, or ALiBi biases)."""
    alibi: bool = False


@dataclass(frozen=True, slots=True)
class Biases:
    """Which linears have one."""

    qkv: bool = False
    attention_output: bool = False
    mlp: bool = False
    head: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    """What comes behind the last norm: words, or labels of whole sequences."""

    tied: bool = False
    """The embedding is the weight of words."""
    labels: int = 0
    """Those of a classifier, which has no words; 0: the model is a language model."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """The dense MLP of a layer."""

    gated: bool = True
    activation_numbers: int = 0
    """Numbers that the activation keeps for each of its features beside its input and its result."""
    activation_gradients: float = 1
    """Numbers of each feature that its backward pass has at most, beyond those that it has let go of."""


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of a layer."""

    per_layer: int = 2
    names: tuple[str, ...] = ()
    """Empty where the model is no Hugging Face model."""
    bias: bool = False
    gate: int = 0
    """Rank of the gate behind each norm; 0: there is none."""


@dataclass(frozen=True, slots=True)
class Heads:
    """What is done with the heads of attention."""

    paired: bool = False
    """Heads work in pairs, one of the first half of all and one of the second."""
    qk_norm: bool = False
    """A norm of the queries and keys."""
    weightless_qk_norms: tuple[int, ...] = ()
    """Layers in which norms without a weight norm queries and keys."""
    gate: int = 0
    """Width per head of the projection that gates the attention's output; 0: there is none."""
    low_rank: LowRank | None = None
    """Projections of queries and outputs through fewer features, without latent keys."""


@dataclass(frozen=True, slots=True)
class Residual:
    """The hidden states between the layers."""

    fp32: bool = False
    """Whether they are in fp32, whatever the type of the weights."""
    streams: int = 0
    """Those that every block reads and writes through mixtures of its own (hyper-connections); 0: there is one."""
    square_mixtures: int = 0
    """Where these mixtures mix the streams with one another too, how often the numbers of all pairs are normalised."""
    mixture_rank: int = 0
    """Where they lie side by side in one hidden state, the rank of the gates of all features that read them."""


@dataclass(frozen=True, slots=True)
class Stack:
    """How the layers of a model come about, where they are not modules one after the other."""

    layers_per_module: int = 1
    """Consecutive layers that are one module, which is never cut between stages."""
    runs: LayerRuns | None = None
    """Stacks whose layers run several times; `num_hidden_layers` counts the runs."""
    blocks: LayerBlocks | None = None
    """Where a layer is one block: which are of which kind."""
    shared_blocks: SharedBlocks | None = None
    """Transformer blocks that several layers use."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions under their Hugging Face names; what a family fixes (biases, norms, gating) is spelled out as flags.

    `head_dim` is never derived from `hidden_size / num_attention_heads` unless the model's own config leaves it out.
    """

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    """As transformers counts them: each attends."""
    num_attention_heads: int
    """0, as are the other sizes of attention and MLP, where no layer attends."""
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    """0: a state has no positions, and no end."""
    head: Head = Head()
    positions: Positions = Positions()
    mlp: Mlp = Mlp()
    biases: Biases = Biases()
    heads: Heads = Heads()
    norms: Norms = Norms()
    caps: Caps = Caps()
    attention: LayerAttention = field(default_factory=LayerAttention)
    """What layers attend to, and what of; where they differ, see `kinds`."""
    kinds: tuple[LayerKind, ...] = ()
    """Where layers differ: all layers, by kind. Dimensions that differ are those of the configuration above."""
    layer_inputs: LayerInputs | None = None
    residual: Residual = Residual()
    parts: tuple[Block, ...] = ()
    """The mechanisms that some of its layers have (`blocks/`), in the order in which its family names them."""
    moe: MoeShape | None = None
    stack: Stack = Stack()
    stated: tuple[tuple[str, Hashable], ...] = field(default=(), repr=False, compare=False)
    """Values of the configuration that the derived table of the type reads; empty where its rows are hand-written.

    Configurations that say the same in other words are of one shape.
    """
    user_module: UserModule | None = None
    """The parameters and rules of a module that is no Hugging Face model; model_type is "module"."""

    def __hash__(self) -> int:
        # Tables of what follows from a shape are asked a million times in a search; few shapes are in one.
        sizes = (self.hidden_size, self.num_hidden_layers, self.num_attention_heads, self.intermediate_size)
        return hash((self.model_type, *sizes, self.vocab_size, self.attention.sliding_window, len(self.kinds)))

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether the embedding is the weight of the head too."""
        return self.head.tied

    @property
    def head_size(self) -> int:
        """Numbers that the head gives for each token; 0 of a classifier, which looks at one token of a sequence."""
        return 0 if self.head.labels else self.vocab_size

    @property
    def attends(self) -> bool:
        """Whether any layer attends."""
        return self.num_attention_heads > 0

    @property
    def attention_inputs(self) -> int:
        """Features of a token that queries, keys and values are projected from."""
        return self.hidden_size * (1 if self.stack.shared_blocks is None else INPUTS)

    @property
    def attention_layers(self) -> range | tuple[int, ...]:
        """The layers that attend."""
        if self.stack.blocks is not None:
            return self.stack.blocks.attention
        every = range(self.num_hidden_layers)
        return _attention_layers(self) if any(one.replaces_attention for one in self.parts) else every

    def attending(self, layers: range) -> int:
        """How many of these layers attend."""
        if self.stack.blocks is not None:
            return len(within(self.stack.blocks.attention, layers))
        return len(layers) - sum(one.count(layers) for one in self.parts if one.replaces_attention)

    @property
    def blocks_per_layer(self) -> int:
        """Blocks that take a layer's hidden states in and give a part of a sum: attention and MLP, mostly."""
        if self.stack.blocks is not None:
            return 1
        return 3 if any(one.beside_attention for one in self.parts) else 2

    def routed(self, layers: range) -> int:
        """How many of these layers have routed experts."""
        if self.moe is None:
            return 0
        if self.stack.blocks is not None:
            return len(within(self.stack.blocks.experts, layers))
        if self.moe.layers is not None:
            return len(within(self.moe.layers, layers))
        return len(range(max(self.moe.first_moe_layer, layers.start), layers.stop))

    def dense(self, layers: range) -> int:
        """How many of these layers have an MLP that is no mixture of experts."""
        return (
            len(layers) - self.routed(layers)
            if self.stack.blocks is None
            else len(within(self.stack.blocks.mlp, layers))
        )

    @property
    def by_kind(self) -> Iterator[tuple[range | tuple[int, ...], ModelShape]]:
        """The layers that attend, by kind: the numbers of each kind, and a model all of whose layers are of it."""
        if not self.kinds and self.attends:
            yield self.attention_layers, self
        for kind in self.kinds:
            one = kind.shape
            # What a kind does not say is the model's.
            projections = one.attention.projections or self.attention.projections
            yield (
                kind.layers,
                replace(
                    self,
                    kinds=(),
                    num_attention_heads=one.num_attention_heads or self.num_attention_heads,
                    num_key_value_heads=one.num_key_value_heads,
                    head_dim=one.head_dim,
                    intermediate_size=one.intermediate_size,
                    attention=replace(one.attention, projections=projections),
                ),
            )

    @property
    def window_rates(self) -> tuple[int, ...]:
        """How many tokens the keys of layers stand for that stand for windows, each number once, ascending."""
        return tuple(
            sorted({one.attention.compressed.rate for _, one in self.by_kind if one.attention.compressed is not None})
        )

    def of_layer(self, layer: int) -> ModelShape:
        """A model all of whose layers are as this one."""
        return next((one for layers, one in self.by_kind if layer in layers), self)

    @property
    def head_counts(self) -> tuple[int, ...]:
        """How many query heads layers have, each count once, the largest first."""
        return tuple(sorted({one.num_attention_heads for _, one in self.by_kind}, reverse=True))

    @property
    def kv_head_counts(self) -> tuple[int, ...]:
        """How many kv heads layers have, each count once, the largest first."""
        alike = {self.num_key_value_heads} if not self.kinds and self.attends else set()
        return tuple(sorted(alike.union(one.shape.num_key_value_heads for one in self.kinds), reverse=True))

    @property
    def kv_units(self) -> tuple[int, ...]:
        """The same of what tensor parallelism never cuts: kv heads, or pairs of them."""
        return tuple(heads // (2 if self.heads.paired else 1) for heads in self.kv_head_counts)

    def kv_replicas(self, tp: int) -> int:
        """Consecutive tp ranks that hold the same kv heads; the most of all layers."""
        return max(1, tp // self.kv_units[-1]) if self.attends else 1

    @property
    def residual_streams(self) -> int:
        """How many hidden states of each token a layer hands on."""
        return max(1, self.residual.streams, *(one.streams for one in self.parts))

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim if self.attention.value_head_dim is None else self.attention.value_head_dim

    @property
    def expert_features(self) -> int:
        """Features of a token that routed experts take and give."""
        return self.hidden_size if self.moe is None else self.moe.features(self.hidden_size)

    def part(self, kind: type[B]) -> B | None:
        """The mechanism of a kind; None where the model has none."""
        return next((one for one in self.parts if isinstance(one, kind)), None)

    @property
    def has_moe(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return self.moe is not None


@lru_cache(maxsize=256)
def _attention_layers(shape: ModelShape) -> range | tuple[int, ...]:
    every = range(shape.num_hidden_layers)
    others = {layer for one in shape.parts if one.replaces_attention for layer in one.layers}
    return tuple(layer for layer in every if layer not in others) if others else every


# Means over layers of different shapes.


def mean_over_layers(shape: ModelShape, value: Callable[[ModelShape], float]) -> float:
    """The mean over the layers that attend, of what `value` says of a model all of whose layers are of one kind.

    0 where none attends.
    """
    found = [(len(layers), value(one)) for layers, one in shape.by_kind if layers]
    return sum(count * each for count, each in found) / sum(count for count, _ in found) if found else 0.0
