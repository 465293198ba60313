"""The two levels of a context-parallel implementation."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.layout.context_parallel import CpImplementation
from parcompile.layout.grid import Axis
from parcompile.spec.resolve import Resolution
from parcompile.spec.resolve.cp_implementation import AUTO

from .c_implementation import possible_sizes, resize
from .places import also
from .registry import Finding, rule

_CP = ("parallelism", "cp")
_SIZES = ("parallelism", "hierarchical_cp_sizes")


@rule(
    "W012",
    "the levels of cp do not multiply to it",
    """usp and double_ring split the context-parallel ranks into inner and outer ones:
    hierarchical_cp_sizes[0] · hierarchical_cp_sizes[1] = cp.""",
    wrong={"parallelism": {"cp": 8, "cp_implementation": "usp", "hierarchical_cp_sizes": [2, 2]}},
    right={"parallelism": {"cp": 8, "cp_implementation": "usp", "hierarchical_cp_sizes": [4, 2]}},
    sources=("Megatron-LM arguments.py, hierarchical_context_parallel_sizes",),
)
def levels_multiply_to_cp(spec: Resolution) -> Iterator[Finding]:
    """Fires for another product."""
    sizes, cp, name = spec.given_sizes, spec.axis(Axis.CP), spec.named_implementation
    if sizes is None or cp == 1 or sizes[0] * sizes[1] == cp:
        return
    kind = CpImplementation.USP if name == AUTO else CpImplementation(name)
    if not kind.has_levels:
        return  # C008: they have no effect
    yield Finding(
        f"hierarchical_cp_sizes {sizes[0]} · {sizes[1]} = {sizes[0] * sizes[1]} ≠ cp {cp}",
        _SIZES,
        help="remove it, and the cost model chooses the sizes",
        fixes=tuple(resize(one) for one in possible_sizes(spec, kind)),
        related=also(spec, _CP),
    )
