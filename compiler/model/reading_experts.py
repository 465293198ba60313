"""What a configuration says of its experts, and which layers have them."""

from __future__ import annotations

from .config_reader import Config, ConfigReader, ModelConfigError, differing
from .family import Experts, Family
from .key_types import groups_of_experts, unsaid_of_method
from .layer_blocks import LayerBlocks
from .layer_kind import LayersError
from .shape import MoeShape


def experts_from(read: ConfigReader, family: Family, config: Config, blocks: LayerBlocks | None) -> MoeShape | None:
    """The mixture of experts of a configuration; None where no layer has one.

    Raises:
        ModelConfigError: a count, a width or a list of layers that the classes of transformers do not take.
    """
    if family.experts is None or not _has_experts(read, family, family.experts, config, blocks):
        return None
    return _moe(read, family.experts, config, family.layers_per_module)


def _has_experts(
    read: ConfigReader, family: Family, experts: Experts, config: Config, blocks: LayerBlocks | None
) -> bool:
    if blocks is not None:
        return bool(blocks.experts)
    if experts.one_is_dense and read.aliased(*experts.count) == 1:
        return False
    if experts.period is not None and not _layers_of_period(read, experts):
        return False
    return not experts.switch or family.is_on(experts.switch, config)


def _moe(read: ConfigReader, experts: Experts, config: Config, layers_per_module: int) -> MoeShape:
    width = read.size(*experts.width)
    shared = 0
    if experts.shared_count:
        alias = read.alias(experts.shared_count[0])
        shared = read.number(*experts.shared_count)
        if alias is not None and read.has(alias):
            if read.has(experts.shared_count[0]) and read.number(alias, 0) != shared:
                raise differing(experts.shared_count[0], shared, alias, read.number(alias, 0))
            shared = read.number(alias, 0)
    if experts.shared_count and not shared and not experts.shared_is_optional:
        key = experts.shared_count[0]
        raise ModelConfigError(f"{key} is 0: transformers builds a shared expert of width 0, which is not split", key)
    shared_width = shared * width
    if experts.beside_mlp:
        shared, shared_width = 1, read.size(*experts.dense_width)  # every token passes the MLP, as a shared expert
    if experts.shared_width:
        shared_width = (read.number if experts.shared_is_optional else read.size)(*experts.shared_width) or 0
        shared_width *= max(shared, 1)
    first, layers = _layers(read, experts, config, layers_per_module)
    try:
        hashed = () if experts.hashed is None else experts.hashed(config, read.size("num_hidden_layers"))
    except LayersError as error:
        raise ModelConfigError(str(error), error.key) from error
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


def _check_groups(config: Config, count: int, experts: str) -> None:
    """Of routers that choose groups of experts first: all are as large, and no more are chosen than there are."""
    if (unsaid := unsaid_of_method(config)) is not None:
        raise ModelConfigError(
            f"{unsaid} is null or missing: topk_method is greedy, or group_limited_greedy with n_group and topk_group",
            unsaid,
        )
    key, groups, chosen, least = groups_of_experts(config)
    if not isinstance(groups, int):
        return
    if groups < 1 or count % groups:
        raise ModelConfigError(f"{key} is {groups}: it has to divide {experts} {count}", key)
    if count // groups < least:
        raise ModelConfigError(
            f"{key} is {groups}, {count // groups} of {experts} {count} in a group, which is scored by the best "
            f"{least} of its experts: write {count // least} or less",
            key,
        )
    if isinstance(chosen, int) and not 1 <= chosen <= groups:
        raise ModelConfigError(f"topk_group is {chosen}: it has to be between 1 and {key} {groups}", "topk_group")


def _layers_of_period(read: ConfigReader, experts: Experts) -> tuple[int, ...] | None:
    if experts.period is None:
        return None
    return read.layers_of(experts.period, read.size("num_hidden_layers"))


def _layers(
    read: ConfigReader, experts: Experts, config: Config, layers_per_module: int
) -> tuple[int, tuple[int, ...] | None]:
    """The first layer with experts, and all of them where dense ones stand between or behind them."""
    if layers_per_module > 1:
        return 0, tuple(range(0, layers_per_module * read.size("num_hidden_layers"), layers_per_module))
    if (periodic := _layers_of_period(read, experts)) is not None:
        return periodic[0], periodic
    if experts.by_layer and (kinds := read.words(experts.by_layer)):
        if others := sorted(set(kinds) - {"dense", "sparse"}):
            raise ModelConfigError(
                f"{experts.by_layer} has {', '.join(others)}: the kinds of MLPs are dense and sparse", experts.by_layer
            )
        count, found = len(kinds), [layer for layer, kind in enumerate(kinds) if kind != "dense"]
    elif experts.layers is not None:
        count = read.size("num_hidden_layers")
        try:
            found = list(experts.layers(config, count))
        except LayersError as error:
            raise ModelConfigError(str(error), error.key) from error
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
        raise ModelConfigError(
            f"mlp_only_layers {dense}: dense layers have to come before those with experts", "mlp_only_layers"
        )
    if read.number("decoder_sparse_step", 1) != 1:
        raise ModelConfigError(
            "decoder_sparse_step has to be 1: every layer from the first with experts on has them",
            "decoder_sparse_step",
        )
    return len(dense)
