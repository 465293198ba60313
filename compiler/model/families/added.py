"""The family of each type: built-in ones by the modules that `families.json` names, and those that plug-ins add."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping

from parcompile import entry_points
from parcompile.model.family import Family, by_type, family_from
from parcompile.model.tables.reading import add_table

_DATA = by_type("family")
"""The families that are data alone: what of them is not Llama's."""
_MODULES = by_type("module")
"""Where in this folder the others stand, which have functions."""


class _BuiltIn(Mapping[str, Family]):
    """The families of this package. A module is imported when one of its types is asked for."""

    def __getitem__(self, name: str) -> Family:
        return _built_in(name)

    def __contains__(self, name: object) -> bool:
        return name in _DATA or name in _MODULES

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*_DATA, *_MODULES}))

    def __len__(self) -> int:
        return len({*_DATA, *_MODULES})


@functools.cache
def _built_in(name: str) -> Family:
    if name in _DATA:
        return family_from(_DATA[name])
    families: Mapping[str, Family] = importlib.import_module(f"{__package__}.{_MODULES[name]}").FAMILIES
    return families[name]


BUILT_IN: Mapping[str, Family] = _BuiltIn()
"""The families of this package, by their types."""


class _Families(Mapping[str, Family]):
    """The built-in families, and those that plug-ins add. A plug-in replaces none that is built in."""

    def __getitem__(self, name: str) -> Family:
        if name in BUILT_IN:
            return BUILT_IN[name]
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
    plain = Family()
    if own := [name for name in _OF_TABLES if getattr(given, name) != getattr(plain, name)]:
        raise ValueError(f"it sets {', '.join(own)}: a plug-in's family has attention, MLPs and experts only")
    if given.experts is not None and (given.experts.beside or given.experts.beside_mlp or given.experts.norm_after):
        raise ValueError("it sets beside, beside_mlp or norm_after of its experts: a plug-in's experts replace the MLP")
    if not given.table:
        raise ValueError(f"it has no table: {_ROWS}")
    add_table(name, given.table)
    return given
