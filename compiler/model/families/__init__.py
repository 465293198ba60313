"""The family of each type: built-in ones of `families.json`, and those that plug-ins add.

Functions that several families share stand here, those of one in the modules beside.

Source: the modeling files and configuration classes of transformers 5.23; the tests compare every family with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from parcompile import entry_points
from parcompile.model.family import Family, by_type, family_from
from parcompile.model.layers import LayersError, whole
from parcompile.model.tables.reading import add_table

BUILT_IN: Mapping[str, Mapping[str, Any]] = dict(sorted(by_type("family").items()))
"""The families of this package by their types: what of each is not Llama's."""


@functools.cache
def _built_in(name: str) -> Family:
    """A module is imported when one of its types is asked for."""
    return family_from(BUILT_IN[name])


class _Families(Mapping[str, Family]):
    """The built-in families, and those that plug-ins add. A plug-in replaces none that is built in."""

    def __getitem__(self, name: str) -> Family:
        if name in BUILT_IN:
            return _built_in(name)
        found = _added(name)
        if not isinstance(found, Family) or name in _FAILED:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        yield from BUILT_IN
        yield from (name for name in added_families() if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


FAMILIES: Mapping[str, Family] = _Families()
"""The model types whose parameters the compiler knows exactly."""
_PLAIN = Family()


def family_of(name: str) -> Family:
    """The family of a model type; of a user module, which has none, what is Llama's."""
    return FAMILIES.get(name, _PLAIN)


def added_families() -> tuple[str, ...]:
    """The names of families that plug-ins offer, whether they can be loaded or not."""
    return tuple(name for name in entry_points.offers(entry_points.FAMILIES) if name not in BUILT_IN)


def family_problem(name: object) -> str | None:
    """What is wrong with the plug-in that offers this family; None when nothing is, or when there is none."""
    found = _added(name) if isinstance(name, str) and name not in BUILT_IN else None
    return found if isinstance(found, str) else _FAILED.get(name) if isinstance(name, str) else None


_FAILED: dict[str, str] = {}
"""What families of plug-ins failed with, by name."""


def try_family(name: object, work: Callable[[], None]) -> None:
    """Tries work that calls a plug-in's family; one that fails is no family from then on, and `family_problem` says it.

    Args:
        name: of any family; nothing is done for those of this package.
        work: raises nothing that a sound family causes.
    """
    if isinstance(name, str) and name not in BUILT_IN and name not in _FAILED and isinstance(_added(name), Family):
        try:
            entry_points.called(entry_points.FAMILIES, name, work)
        except entry_points.PluginError as error:
            _FAILED[name] = str(error)


@functools.cache
def _added(name: str) -> Family | str | None:
    """The family that a plug-in offers under a name, or why it cannot be used."""
    if name not in entry_points.offers(entry_points.FAMILIES):
        return None
    try:
        return entry_points.load(entry_points.FAMILIES, name, functools.partial(_as_family, name))
    except entry_points.PluginError as error:
        return f"{error}: {_ROWS}" if "Family" in str(error) and "unexpected keyword" in str(error) else str(error)


_OF_TABLES = (
    *("layer_shapes", "layer_blocks", "runs", "norm_gate", "shared_blocks", "layer_inputs"),
    *("initial_state", "hyper_streams", "layers_per_module", "paired_heads", "query_gate", "kv_heads"),
    *("values_of_layers", "square_mixtures", "low_rank", "mixture_rank", "parts"),
)
"""What only families whose rows come from derived tables have."""


_ROWS = 'names, shapes and biases of parameters stand in its table, as Family(table=table_like("llama")) has them'


def _as_family(name: str, given: object) -> Family:
    if not isinstance(given, Family):
        raise TypeError(f"it has to be a parcompile.plugins.Family, and is of type {type(given).__name__}")
    if own := [name for name in _OF_TABLES if getattr(given, name) != getattr(_PLAIN, name)]:
        raise ValueError(f"it sets {', '.join(own)}: a plug-in's family has attention, MLPs and experts only")
    if given.experts is not None and (given.experts.beside or given.experts.beside_mlp or given.experts.norm_after):
        raise ValueError("it sets beside, beside_mlp or norm_after of its experts: a plug-in's experts replace the MLP")
    if not given.table:
        raise ValueError(f"it has no table: {_ROWS}")
    add_table(name, given.table)
    return given


def by_step(config: Mapping[str, Any], count: int, *, dense: tuple[int, ...] = ()) -> list[int]:
    """The last layer of each `decoder_sparse_step`, without those of `mlp_only_layers`; `dense` is its default."""
    step, listed = whole(config, "decoder_sparse_step", 1), config.get("mlp_only_layers")
    without = dense if listed is None else listed
    if not isinstance(without, list | tuple):
        raise LayersError(f"mlp_only_layers is {listed!r}: it has to be a list of layers", "mlp_only_layers")
    return [layer for layer in range(step - 1, count, step) if layer not in without]


def by_frequency(config: Mapping[str, Any], count: int, *, first: int) -> list[int]:
    """The first layer of each `moe_layer_freq`, from `first_k_dense_replace` on, of which `first` is the default."""
    step = whole(config, "moe_layer_freq", 1)
    dense = whole(config, "first_k_dense_replace", first, least=0)
    return [layer for layer in range(0, count, step) if layer >= dense]
