"""Mixtures of experts: routing, shared and zero experts, groups, and which layers have them.

What a family says of them (`Experts`), what a configuration makes of it (`MoeShape`), and what follows from both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parcompile.model.config_reader import ConfigReader
from parcompile.model.key_types import stored_groups
from parcompile.model.layers import LayerPeriod, LayersError
from parcompile.model.tables import alias_of

from .block import Exchange, Local, Small

CORRECTION_BIASES = ("e_score_correction_bias", "expert_bias")
"""What transformers calls the scores that a router adds for its choice, and does not learn."""
PASSED_ON = "moe_identity_expert"
"""The style of transformers' plans for experts that give what they take."""
_INDEX_BYTES, _SCORE_BYTES = 8, 4
"""Of an expert that a token chose: its index, and its score in fp32."""
_WIDTH_OF_A_RANK = 16
"""Of the experts of a small model."""


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Mixture of experts in place of the dense MLP."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    """Hidden width of one expert."""
    num_shared_experts: int = 0
    """Experts that every token passes through, as one MLP of this many widths."""
    shared_intermediate_size: int = 0
    """Hidden width of that MLP."""
    first_moe_layer: int = 0
    """Layers before this one keep the dense MLP."""
    layers: tuple[int, ...] | None = None
    """The layers with experts, where dense ones stand between them; None: all from the first on."""
    num_identities: int = 0
    """Further experts that give back what they take: the router chooses among them too."""
    hashed: tuple[int, ...] = ()
    """Layers whose router takes the experts of a token from a table, by the token's number."""
    taken_size: int | None = None
    """Features of a token that experts take, between two projections of their block; None: the hidden size."""

    @property
    def num_choices(self) -> int:
        """What the router chooses among."""
        return self.num_experts + self.num_identities

    @property
    def computed_per_token(self) -> float:
        """Experts of a token that compute, when every choice is as frequent as the others."""
        return self.num_experts_per_token * self.num_experts / self.num_choices

    def routed(self, num_layers: int) -> range | tuple[int, ...]:
        """The layers with experts, of a model of so many layers."""
        return range(min(self.first_moe_layer, num_layers), num_layers) if self.layers is None else self.layers

    def features(self, hidden: int) -> int:
        """Features of a token that routed experts take and give."""
        return self.taken_size or hidden

    def matmul_parameters(self, hidden: int, projections: int) -> float:
        """Of a layer, those that multiply each token: routed experts count as often as a token visits them."""
        routed = self.computed_per_token * self.intermediate_size * self.features(hidden)
        around = 0 if self.taken_size is None else 2 * hidden * self.taken_size
        return projections * (routed + self.shared_intermediate_size * hidden) + around + hidden * self.num_choices

    def looked_up(self, layers: range) -> int:
        """How many of these layers take the experts of a token from a table."""
        return len({*self.hashed} & {*layers})


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP: names of its modules, and of its configuration keys with defaults."""

    block: str = "mlp"
    interleaved: bool = False
    """The columns of gate and up alternate, in place of all gates first."""
    shared: str = ""
    shared_is_optional: bool = False
    """transformers builds none for a count of 0."""
    beside: str = ""
    """An MLP beside the block, as wide as the shared expert; it has a fused `input_linear` and an `output_linear`, or
    is `mlp` itself."""
    norm_after: str = ""
    """A norm at the end of the block, of what routed and shared experts give together."""
    count: tuple[str, int | None] = ("num_local_experts", 8)
    identities: tuple[str, int] | None = None
    """The key of how many further experts give back what they take, in place of computing."""
    per_token: tuple[str, int | None] = ("num_experts_per_tok", 2)
    width: tuple[str, int | None] = ("intermediate_size", None)
    shared_width: tuple[str, int | None] | None = None
    """The key of the shared expert's width."""
    shared_count: tuple[str, int] | None = None
    """The key of the number of shared experts, each as wide as the others."""
    dense_layers: tuple[str, int] | None = None
    """The key of how many first layers keep the dense MLP."""
    dense_by_default: int = 0
    """How many do where neither that key nor the list below is given."""
    dense_width: tuple[str, int | None] = ("intermediate_size", None)
    """The key of their width."""
    switch: str = ""
    """The key without which there are no experts."""
    period: LayerPeriod | None = None
    """Which layers have experts, where dense ones stand between them."""
    one_is_dense: bool = False
    """With one expert every layer has the dense MLP."""
    beside_mlp: bool = False
    """Router and experts stand in the layer itself, beside the dense MLP; the router sees a rank's own tokens."""
    norms: tuple[str, ...] = ()
    """Norms of the layer that it has with experts only."""
    by_layer: str | None = None
    """The key of a list that says "dense" or "sparse" for each layer, before all others."""
    layers: Callable[[Mapping[str, Any], int], Sequence[int]] | None = None
    """The layers with experts, from the configuration and the number of layers, where no such list says it."""
    hashed: Callable[[Mapping[str, Any], int], tuple[int, ...]] | None = None
    """The layers whose router looks the experts of a token up by its number."""
    taken: tuple[str, int] | None = None
    """The key of how many features of a token its experts take, where projections of the block stand around them."""
    normed: bool = False
    """What each expert gives is normed before it is weighted: ranks with slices of it add up in front of that."""

    @staticmethod
    def learns_not(name: str) -> bool:
        """Whether a parameter of the block has no gradient."""
        return name.rpartition(".")[2] in CORRECTION_BIASES

    @property
    def adds_mlp(self) -> bool:
        """Whether an MLP stands beside the block, which takes the hidden states in by itself."""
        return bool(self.beside) or self.beside_mlp

    @property
    def is_normed(self) -> bool:
        """Whether a norm of the block wants the sum of what experts give."""
        return bool(self.norm_after)

    def words(self, telling: int) -> list[str]:
        """What distinguishes a type that has them: 0 in front of the kind of attention, 1 behind it."""
        if telling == 0:
            return ["zero experts"] if self.identities else []
        return ["experts that are looked up by the numbers of tokens"] if self.hashed else []

    def part_of(self, own: str, mlp: str) -> tuple[bool, str] | None:
        """Of a parameter that layers call `own`: whether it is in the block or an MLP beside it, and its name there."""
        if self.beside_mlp:
            return (True, own) if own.startswith("experts.") else None
        if own.startswith(f"{self.block}."):
            return True, own.removeprefix(f"{self.block}.")
        if self.beside not in ("", mlp) and own.startswith(f"{self.beside}."):
            return False, own.removeprefix(f"{self.beside}.")
        return None

    def exchanges(self, moe: MoeShape, local: Local, rows: int) -> Iterator[Exchange]:
        """What a layer sends over tp beside what enters and leaves its blocks.

        Args:
            moe: the sizes.
            local: the micro-batch.
            rows: of tokens that go through the slices of experts of a rank; 0: its experts are whole.
        """
        if self.beside_mlp:
            # A router of the rank's own tokens: its choices enter the experts by themselves, scores with a gradient.
            chosen = local.split_tokens * moe.num_experts_per_token
            if local.sequence_parallel:
                yield Exchange("tp", "all-gather", chosen * _INDEX_BYTES)
                yield Exchange("tp", "all-gather", chosen * _SCORE_BYTES, back="reduce-scatter")
            else:
                yield Exchange("tp", "", chosen * _SCORE_BYTES, back="all-reduce")
        if self.normed and rows:
            # What slices of experts give is summed in front of its norm, and its gradient.
            yield Exchange("tp", "all-reduce", rows * moe.features(local.hidden) * local.width, back="all-reduce")

    def small(self, moe: MoeShape, config: Any, small: Small) -> Mapping[str, Any]:
        """A few narrow experts of every group."""
        width = _WIDTH_OF_A_RANK * small.tp
        found: dict[str, Any] = {self.width[0]: min(moe.intermediate_size, width)}
        if self.shared_width is not None:
            found[self.shared_width[0]] = min(moe.shared_intermediate_size, width)
        groups, chosen = getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None) or 1
        in_group = max(2, -(-moe.num_experts_per_token // chosen), -(-2 * moe.num_experts_per_token // groups))
        count = min(moe.num_experts, groups * in_group)
        if self.identities is not None:
            found[self.identities[0]] = min(moe.num_identities, count)
        for name in (self.count[0], alias_of(config.model_type, self.count[0])):
            if name is not None and (name == self.count[0] or name in small.written):
                found[name] = count
        return found


def experts_from(
    read: ConfigReader,
    experts: Experts,
    config: Mapping[str, Any],
    blocks: Collection[int] | None,
    layers_per_module: int,
) -> MoeShape | None:
    """The mixture of experts of a configuration; None where no layer has one.

    Args:
        read: the configuration under the names of its family.
        experts: what the family says of them.
        config: the same.
        blocks: the layers that are a block of experts, where each layer is one block.
        layers_per_module: of which the first has them.

    Raises:
        LayersError: a count, a width or a list of layers that the classes of transformers do not take.
    """
    if blocks is not None and not blocks:
        return None
    if experts.one_is_dense and read.aliased(*experts.count) == 1:
        return None
    if experts.period is not None and not experts.period.layers(config, read.size("num_hidden_layers")):
        return None
    width = read.size(*experts.width)
    shared = 0
    if experts.shared_count:
        alias = read.alias(experts.shared_count[0])
        shared = read.number(*experts.shared_count)
        if alias is not None and read.has(alias):
            if read.has(experts.shared_count[0]) and read.number(alias, 0) != shared:
                raise read.differing(experts.shared_count[0], shared, alias, read.number(alias, 0))
            shared = read.number(alias, 0)
    if experts.shared_count and not shared and not experts.shared_is_optional:
        key = experts.shared_count[0]
        raise LayersError(f"{key} is 0: transformers builds a shared expert of width 0, which is not split", key)
    shared_width = shared * width
    if experts.beside_mlp:
        shared, shared_width = 1, read.size(*experts.dense_width)  # every token passes the MLP, as a shared expert
    if experts.shared_width:
        shared_width = (read.number if experts.shared_is_optional else read.size)(*experts.shared_width) or 0
        shared_width *= max(shared, 1)
    first, layers = _layers(read, experts, config, layers_per_module)
    hashed = () if experts.hashed is None else experts.hashed(config, read.size("num_hidden_layers"))
    count = read.aliased(*experts.count)
    _check_groups(config, count, experts.count[0])
    return MoeShape(
        num_experts=count,
        num_identities=read.number(*experts.identities) if experts.identities else 0,
        num_experts_per_token=read.aliased(*experts.per_token),
        intermediate_size=width,
        num_shared_experts=shared or int(shared_width > 0),
        shared_intermediate_size=shared_width,
        first_moe_layer=first,
        layers=layers,
        hashed=hashed,
        taken_size=None if experts.taken is None else read.size(*experts.taken),
    )


def router_biases(names: Iterable[str]) -> list[str]:
    """Among parameters, the biases that a router adds for its choice; each last part of a name once."""
    return sorted({name.rpartition(".")[2] for name in names}.intersection(CORRECTION_BIASES))


_GROUPS_TOO = "num_expert_group"
"""What Kimi and Bailing call `n_group`, which it goes before."""


def _groups_of_experts(config: Mapping[str, Any]) -> tuple[str, Any, Any, int]:
    """The key of the number of groups, that number and `topk_group`, with what its class takes where nothing says them.

    And of how many experts' scores its class makes that of a group. None and None where it looks at no groups.
    """
    own = stored_groups(config.get("model_type"))
    said = {**own, **config}
    key = _GROUPS_TOO if own and config.get(_GROUPS_TOO) is not None else "n_group"
    by_method = "topk_method" in own
    if by_method and said["topk_method"] == "greedy":
        return key, None, None, 0
    return key, said.get(key), said.get("topk_group"), 2 if own and not by_method else 1


def _unsaid_of_method(config: Mapping[str, Any]) -> str | None:
    """The first key without a value that a router reads which chooses experts by `topk_method`; None where none is."""
    own = stored_groups(config.get("model_type"))
    said = {**own, **config}
    if "topk_method" not in own or said["topk_method"] == "greedy":
        return None
    return next((key for key in ("topk_method", "n_group", "topk_group") if said.get(key) is None), None)


def _check_groups(config: Mapping[str, Any], count: int, experts: str) -> None:
    """Of routers that choose groups of experts first: all are as large, and no more are chosen than there are."""
    if (unsaid := _unsaid_of_method(config)) is not None:
        raise LayersError(
            f"{unsaid} is null or missing: topk_method is greedy, or group_limited_greedy with n_group and topk_group",
            unsaid,
        )
    key, groups, chosen, least = _groups_of_experts(config)
    if not isinstance(groups, int):
        return
    if groups < 1 or count % groups:
        raise LayersError(f"{key} is {groups}: it has to divide {experts} {count}", key)
    if count // groups < least:
        raise LayersError(
            f"{key} is {groups}, {count // groups} of {experts} {count} in a group, which is scored by the best "
            f"{least} of its experts: write {count // least} or less",
            key,
        )
    if isinstance(chosen, int) and not 1 <= chosen <= groups:
        raise LayersError(f"topk_group is {chosen}: it has to be between 1 and {key} {groups}", "topk_group")


def _layers(
    read: ConfigReader, experts: Experts, config: Mapping[str, Any], layers_per_module: int
) -> tuple[int, tuple[int, ...] | None]:
    """The first layer with experts, and all of them where dense ones stand between or behind them."""
    if layers_per_module > 1:
        return 0, tuple(range(0, layers_per_module * read.size("num_hidden_layers"), layers_per_module))
    if experts.period is not None:
        periodic = experts.period.layers(config, read.size("num_hidden_layers"))
        return periodic[0], periodic
    if experts.by_layer and (kinds := [*map(str, config.get(experts.by_layer) or ())]):
        if others := sorted(set(kinds) - {"dense", "sparse"}):
            raise LayersError(
                f"{experts.by_layer} has {', '.join(others)}: the kinds of MLPs are dense and sparse", experts.by_layer
            )
        count, found = len(kinds), [layer for layer, kind in enumerate(kinds) if kind != "dense"]
    elif experts.layers is not None:
        count = read.size("num_hidden_layers")
        found = list(experts.layers(config, count))
    else:
        return _first_moe_layer(read, experts), None
    first = found[0] if found else count
    return first, None if found == list(range(first, count)) else tuple(found)


def _first_moe_layer(read: ConfigReader, experts: Experts) -> int:
    """The layers before it are dense, where nothing lists the layers with experts."""
    if experts.beside_mlp:
        return 0
    if experts.dense_layers:
        return read.number(*experts.dense_layers)
    if experts.dense_by_default:
        return experts.dense_by_default
    dense = sorted(read.layers("mlp_only_layers"))
    if dense != list(range(len(dense))):
        raise LayersError(
            f"mlp_only_layers {dense}: dense layers have to come before those with experts", "mlp_only_layers"
        )
    if read.number("decoder_sparse_step", 1) != 1:
        raise LayersError(
            "decoder_sparse_step has to be 1: every layer from the first with experts on has them",
            "decoder_sparse_step",
        )
    return len(dense)
