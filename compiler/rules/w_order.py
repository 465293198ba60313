"""The order names each axis once, in a way that the targets know."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from parcompile.diagnostics import Edit, Fix, Path, Safety
from parcompile.layout.grid import AXES, Axis
from parcompile.spec.resolve import Resolution

from .places import also, axis_path
from .registry import Finding, rule

_ORDER = ("parallelism", "order")
_MEGATRON_ORDERS = (AXES, (Axis.TP, Axis.CP, Axis.EP, Axis.PP, Axis.DP))


@rule(
    "W004",
    "the order does not name every axis once",
    """The order lists the axes from the innermost to the outermost, each at most once; an axis may be left out only
    when its size is 1.""",
    wrong={"parallelism": {"cp": 2, "order": "tp-dp-pp"}},
    right={"parallelism": {"cp": 2, "order": "tp-cp-dp-pp"}},
    sources=("Megatron-LM parallel_state.py, RankGenerator",),
)
def order_names_each_axis_once(spec: Resolution) -> Iterator[Finding]:
    """Fires on repeated axes and on axes larger than 1 that are missing."""
    if not spec.given(*_ORDER):
        return
    named = str(spec.get(*_ORDER)).split("-")
    twice = [axis for axis in AXES if named.count(axis) > 1]
    if twice:
        once = "-".join(dict.fromkeys(named))
        yield Finding(
            f"{', '.join(twice)} stands twice in the order {'-'.join(named)}",
            _ORDER,
            help=f"name each axis once: {once}",
            fixes=(_reorder(once, Safety.CHANGES_COST),),
        )
    missing = [axis for axis in AXES if axis not in named and spec.axis(axis) > 1]
    if missing:
        sizes = ", ".join(f"{axis} {spec.axis(axis)}" for axis in missing)
        full = "-".join(chain(dict.fromkeys(named), missing))
        yield Finding(
            f"the order {'-'.join(named)} leaves out {sizes}",
            _ORDER,
            help=f"name every axis that is larger than 1, for example {full}",
            fixes=(_reorder(full, Safety.CHANGES_COST),),
            related=also(spec, *(axis_path(axis) for axis in missing)),
        )


@rule(
    "W006",
    "Megatron-LM needs pp as the outermost axis",
    """Megatron-LM builds one grid for dense layers and one for experts, and both have to give the same pipeline groups.
    With another axis outside pp that holds only when both grids have the same number of data-parallel ranks:
    dp = dp · cp / ep, that is cp = ep.""",
    wrong={
        "parallelism": {"cp": 2, "pp": 2, "order": "tp-cp-ep-pp-dp"},
        "training": {"gradient_accumulation_dtype": "fp32"},
    },
    right={
        "parallelism": {"cp": 2, "pp": 2, "order": "tp-cp-ep-dp-pp"},
        "training": {"gradient_accumulation_dtype": "fp32"},
    },
    sources=("Megatron-LM parallel_state.py",),
    targets=("megatron",),
)
def megatron_pipelines_are_outermost(spec: Resolution) -> Iterator[Finding]:
    """Fires when an axis larger than 1 stands outside pp and the two grids differ."""
    pp, cp, ep, order = spec.axis(Axis.PP), spec.axis(Axis.CP), spec.axis(Axis.EP), spec.order
    outside = [axis for axis in order[order.index(Axis.PP) + 1 :] if spec.axis(axis) > 1]
    if pp > 1 and outside and cp != ep:
        dp, inner = spec.axis(Axis.DP), (axis for axis in order if axis is not Axis.PP)
        yield Finding(
            f"the order {'-'.join(order)} with pp {pp}, and dp {dp} ≠ expert-dp {dp} · cp {cp} / ep {ep}",
            _ORDER,
            help="move pp to the end of the order",
            fixes=(_reorder("-".join((*inner, Axis.PP)), Safety.CHANGES_COST),),
            related=also(spec, ("parallelism", "pp")),
        )


@rule(
    "W007",
    "Megatron-LM's command line cannot express the order",
    """Megatron-LM's arguments know two orders: tp-cp-ep-dp-pp, and tp-cp-ep-pp-dp with --use-tp-pp-dp-mapping. Axes of
    size 1 do not matter.""",
    wrong={"parallelism": {"tp": 2, "cp": 2, "order": "cp-tp-dp-pp"}},
    right={"parallelism": {"tp": 2, "cp": 2, "order": "tp-cp-dp-pp"}},
    sources=("Megatron-LM training/initialize.py",),
    targets=("megatron",),
)
def megatron_knows_the_order(spec: Resolution) -> Iterator[Finding]:
    """Fires for every other order of the axes that are larger than 1."""
    larger = tuple(axis for axis in spec.order if spec.axis(axis) > 1)
    known = [tuple(axis for axis in order if axis in larger) for order in _MEGATRON_ORDERS]
    if larger not in known:
        right = "-".join(_MEGATRON_ORDERS[0])
        yield Finding(
            f"the order {'-'.join(larger)} is not {' or '.join(dict.fromkeys('-'.join(one) for one in known))}",
            _ORDER,
            help=f"write {right}",
            fixes=(_reorder(right, Safety.CHANGES_COST),),
        )


def _reorder(order: str, safety: Safety) -> Fix:
    path: Path = _ORDER
    return Fix(f"set order to {order}", safety, (Edit(path, order),))
