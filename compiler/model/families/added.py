"""Families that plug-ins add to the built-in ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

from parcompile import entry_points
from parcompile.model.family import Family

from .compressed import COMPRESSED, INDEXED
from .dense import BIASED, DENSE, MUSE
from .dots3 import DOTS3
from .gemma import GEMMA
from .glm5_next import GLM5_NEXT
from .gpt import ALIBI, GPT
from .hybrids import HYBRIDS, KIMI_DELTA
from .latent import LATENT, LLAMA4, LONGCAT, MIMO
from .ngrams import NGRAMS
from .shared_experts import EXPERTS, SHARED_EXPERTS
from .state_space import ATTENTION_FREE, STATE_SPACE

BUILT_IN: Mapping[str, Family] = {
    **DENSE,
    **BIASED,
    **GPT,
    **ALIBI,
    **EXPERTS,
    **SHARED_EXPERTS,
    **LATENT,
    **INDEXED,
    **COMPRESSED,
    **DOTS3,
    **LONGCAT,
    **LLAMA4,
    **HYBRIDS,
    **KIMI_DELTA,
    **GLM5_NEXT,
    **STATE_SPACE,
    **ATTENTION_FREE,
    **GEMMA,
    **MIMO,
    **MUSE,
    **NGRAMS,
}
"""The families of this package."""


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
        return entry_points.load(entry_points.FAMILIES, name, _as_family)
    except entry_points.PluginError as error:
        return str(error)


_OF_TABLES = (
    *("recurrent", "layer_shapes", "layer_blocks", "runs", "norm_gate", "indexer", "shared_blocks", "layer_inputs"),
    *("initial_state", "hyper_streams", "layers_per_module", "paired_heads", "query_gate", "kv_heads"),
    *("values_of_layers", "square_mixtures", "low_rank", "mixture_rank", "parts"),
)
"""What only families whose rows come from derived tables have."""


def _as_family(given: object) -> Family:
    if not isinstance(given, Family):
        raise TypeError(f"it has to be a parcompile.plugins.Family, and is of type {type(given).__name__}")
    plain = Family()
    if own := [name for name in _OF_TABLES if getattr(given, name) != getattr(plain, name)]:
        raise ValueError(
            f"it sets {', '.join(own)}: the rows of a plug-in's family have attention, MLPs and experts only"
        )
    if given.experts is not None and (given.experts.beside or given.experts.beside_mlp or given.experts.norm_after):
        raise ValueError("it sets beside, beside_mlp or norm_after of its experts: a plug-in's experts replace the MLP")
    return given
