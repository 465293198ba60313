"""Sparse attention with an indexer (DeepSeek-V3.2): a few light heads choose the keys that each query attends to.

An indexer scores every earlier token for a query, and the `top_k` best are the keys that all heads of the layer see.
The choice has no gradient: transformers computes it without one, so that the indexer's weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from parcompile.model import FROZEN, Cut
from parcompile.model.layers import LayersError

from .block import Block, Exchange, Local, Size, Small, Traits

FULL, SHARED, NONE = "full", "shared", ""
"""What a layer does for its keys: it runs an indexer, takes the choice of the last layer that did, or sees all."""
_KEYS, _POOL, _BLOCK, _BLOCKS = 7, 3, 4, 2
"""Of a small model: keys that queries choose, tokens of a pool and of a block, and blocks that queries choose."""


@dataclass(frozen=True, slots=True)
class Indexer(Block):
    """The sizes of the indexers. `layers` have one; others of `attending` take the choice of the last before them."""

    heads: int
    head_dim: int
    top_k: int
    layers: tuple[int, ...]
    attending: tuple[int, ...]
    """The layers whose attention sees chosen keys only."""
    pool: int = 0
    """Tokens of a pool, whose key is a mean by weights that are learned for each feature; 0: each token is scored."""
    block: int = 0
    """Tokens that are chosen together, by the mean of their keys; 0: each is chosen alone."""
    beside: int = 0
    """Features that ranks exchange with the key of a token: sines and cosines of its position."""
    key_width: int | None = None
    """Bytes of an element of its keys; None: as of an activation."""

    has: ClassVar[str] = "an indexer"

    def hides_keys(self, length: int) -> bool:
        """Keys that are not chosen are hidden."""
        return length > self.top_k

    @property
    def behind(self) -> frozenset[int]:
        """Those that take a choice."""
        return frozenset(self.attending) - frozenset(self.layers)

    @property
    def unmasked(self) -> Collection[int]:
        """Attention goes by the choice, and has the causal mask."""
        return self.attending

    def numel(self, hidden: int, query_rank: int) -> int:
        """Elements of the weights of one indexer that multiply each token."""
        if self.block:
            return hidden * (self.heads + 1) * self.head_dim
        keys = (2 if self.pool else 1) * self.head_dim
        return query_rank * self.heads * self.head_dim + hidden * (keys + self.heads)

    @property
    def token_width(self) -> int:
        """Numbers of a token that other ranks want: its key; of pools what weights it, too, and whether it counts."""
        return 2 * self.head_dim + 1 if self.pool else self.head_dim + self.beside

    def scored(self, sequence_length: int) -> int:
        """Keys that each query is scored with."""
        return sequence_length // (self.pool or self.block or 1)

    def cut(self, own: str, shape: tuple[int, ...]) -> Cut | None:  # noqa: ARG002
        """All ranks have to choose the same keys."""
        return FROZEN if ".indexer." in own else None

    def forward_flops(self, hidden: int, query_rank: int, sequence_length: int) -> float:
        """Every key of the sequence is scored; with the blocks that they see, half of all, queries are compared."""
        scored = self.scored(sequence_length) * self.heads * (self.head_dim + 1)
        return 2.0 * self.numel(hidden, query_rank) + (1.0 if self.block else 2.0) * scored

    def exchanges(self, local: Local) -> Iterator[Exchange]:
        """The keys of all ranks."""
        yield Exchange("cp", "all-gather", local.tokens * self.token_width * (self.key_width or local.width))

    def borders(self) -> Iterator[int]:
        """As many tokens as are chosen; of blocks also those behind the last whole one."""
        yield self.top_k + self.block

    def small(self, config: Any, small: Small) -> Mapping[str, Any]:
        """As few keys, pools or blocks as show a choice if there was one; which layers take one of another."""
        found = dict(self._small_kinds(config, small))
        if self.block:
            block, blocks = min(self.block, _BLOCK), self.top_k // self.block
            chosen = min(blocks, _BLOCKS) if self.top_k < small.before else max(blocks, -(-small.length // block))
            return {**found, "indexer_compress_ratio": block, "indexer_budget": block * chosen}
        chosen = min(self.top_k, _KEYS) if self.top_k < small.before else max(self.top_k, small.length)
        if self.pool:
            pool = found["index_kpool"] = min(self.pool, _POOL)
            chosen = max(chosen // pool, 1) * pool
        return {**found, "index_topk": chosen}

    def _small_kinds(self, config: Any, small: Small) -> Mapping[str, Any]:
        """A stage begins with an indexer; where layers that see all stand between, the next layer takes its choice."""
        listed = getattr(config, "indexer_types", None)
        if not listed or len(small.layers) == len(listed) or self.behind.isdisjoint(small.layers):
            return {}
        attending = [layer in self.attending for layer in small.layers]
        kinds: list[str] = []
        for place in range(len(small.layers)):
            takes = place not in small.starts and (all(attending) or (attending[place - 1] and kinds[-1] == FULL))
            kinds.append(SHARED if takes else FULL)
        return {"indexer_types": kinds}


@dataclass(frozen=True, slots=True)
class IndexerTraits(Traits):
    """Defaults of an indexer's keys, and which layers have one."""

    heads: int = 64
    head_dim: int = 128
    top_k: int = 2048
    kinds: Callable[[Mapping[str, Any], int], tuple[str, ...]] | None = None
    """`FULL`, `SHARED` or `NONE` for each layer, from the configuration and their number; None: `FULL` for all."""
    pool: tuple[str, int] | None = None
    """The key of how many tokens follow each other in a pool, where whole pools are chosen and scored by one key."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """What the configuration calls the keys of its sizes, where they have other names."""
    block_key: str = ""
    """The key of how many tokens are chosen together, as blocks that the mean of their keys stands for."""
    rotated: Callable[[Mapping[str, Any]], int] | None = None
    """Features of a key that are rotated, where their angles are exchanged beside it."""
    key_width: int | None = None
    """Bytes of an element of its keys, where they are not as activations are."""

    words: ClassVar[str] = "keys chosen by an indexer"
    telling: ClassVar[int] = 2
    lists: ClassVar[Sequence[str]] = ("indexer_types",)
    rules: ClassVar[Mapping[str, str]] = {
        "L009": "An indexer chooses the keys that each query attends to, and layers behind it may take its choice.",
    }

    @property
    def described(self) -> str:
        """With what it chooses among."""
        return ("pools of " if self.pool else "blocks of " if self.block_key else "") + self.words

    def read(self, config: Mapping[str, Any], layers: int, size: Size) -> tuple[Block, ...]:
        """None where no layer has one."""
        kinds = (FULL,) * layers if self.kinds is None else self.kinds(config, layers)
        if FULL not in kinds:
            return ()
        named = {key: self.sizes.get(key, key) for key in ("index_n_heads", "index_head_dim", "index_topk")}
        return (
            Indexer(
                heads=size(named["index_n_heads"], self.heads),
                head_dim=size(named["index_head_dim"], self.head_dim),
                top_k=size(named["index_topk"], self.top_k),
                block=size(self.block_key, 1) if self.block_key else 0,
                beside=0 if self.rotated is None else 2 * self.rotated(config),
                layers=tuple(layer for layer, kind in enumerate(kinds) if kind == FULL),
                attending=tuple(layer for layer, kind in enumerate(kinds) if kind != NONE),
                pool=0 if self.pool is None else size(*self.pool),
                key_width=self.key_width,
            ),
        )


def scheduled_kinds(config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """The kinds of GLM-5's layers: a list, a pattern of letters, or every nth layer (`GlmMoeDsaConfig`).

    Raises:
        LayersError: they do not fit the layers.
    """
    return _first_full(*_schedule(config, num_layers))


def kinds_between(config: Mapping[str, Any], num_layers: int, states: Collection[int]) -> tuple[str, ...]:
    """The same where `states`, layers with a state, stand between: they hand no choice on (`Glm5NextTextAttention`).

    Raises:
        LayersError: they do not fit the layers, or a layer takes a choice that the one before it does not hand on.
    """
    kinds, key = _schedule(config, num_layers)
    found = tuple(NONE if layer in states else kind for layer, kind in enumerate(kinds))
    for layer, kind in enumerate(found):
        if kind == SHARED and (layer == 0 or found[layer - 1] != FULL):
            raise LayersError(
                f"{key}: layer {layer} is {SHARED}, and the layer before it has no indexer, so that transformers finds "
                f"no choice to take: write {FULL}",
                key,
            )
    return found


def _schedule(config: Mapping[str, Any], num_layers: int) -> tuple[tuple[str, ...], str]:
    """The kinds, and the key that says them."""
    for key in ("indexer_types", "index_topk_pattern"):
        if (given := config.get(key)) is not None:
            return _checked(key, given, num_layers), key
    every = max(_whole(config, "index_topk_freq", 1), 1)
    offset = _whole(config, "index_skip_topk_offset", 2)
    found = tuple(FULL if max(layer - offset + 1, 0) % every == 0 else SHARED for layer in range(num_layers))
    return found, "index_skip_topk_offset" if "index_skip_topk_offset" in config else "index_topk_freq"


def every_fourth(config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """The kinds of Hunyuan 4's layers: a list, or the first two and every fourth from there (`HYV4Config`).

    Raises:
        LayersError: they do not fit the layers.
    """
    if (given := config.get("indexer_types")) is not None:
        return _first_full(_checked("indexer_types", given, num_layers), "indexer_types")
    return tuple(FULL if layer == 0 or layer % 4 == 1 else SHARED for layer in range(num_layers))


def _whole(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise LayersError(f"{key} is {value!r}: it has to be a whole number", key)
    return value


def _checked(key: str, given: Any, num_layers: int) -> tuple[str, ...]:
    letters = {"F": FULL, "S": SHARED} if key == "index_topk_pattern" and isinstance(given, str) else {}
    if not isinstance(given, str | list | tuple) or (isinstance(given, str) and not letters):
        raise LayersError(f"{key} is {given!r}: it has to be a list with the kind of each layer", key)
    kinds = tuple(letters.get(one, one) if isinstance(one, str) else str(one) for one in given)
    if len(kinds) != num_layers:
        raise LayersError(f"{key} has {len(kinds)} entries for {num_layers} layers: write the kind of each", key)
    if others := sorted(set(kinds) - {FULL, SHARED}):
        raise LayersError(f"{key} has {', '.join(others)}: the kinds of layers here are {FULL} and {SHARED}", key)
    return kinds


def _first_full(kinds: tuple[str, ...], key: str) -> tuple[str, ...]:
    if kinds[0] != FULL:
        raise LayersError(f"{key}: the first layer is {SHARED}, and there is no choice before it to take", key)
    return kinds
