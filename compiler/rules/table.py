"""The rules of specs that stand in a table, `rules.json`, by code; `stored.py` has the words of a row.

A rule has `severity`, `targets` and `run_by` as `rule` takes them. A row may go `over` the values of a
list, which have a name in its expressions. They read a `Resolution`: "training.seed" is a value of the spec or its
default, "given.training.seed" whether it is written, "tp" the size of an axis, "config.use_cache" a key of the model's
configuration, and "where.head_dim.hidden_size" the path of the first of these keys that the spec gives. Another name is
one of `_FACTS` or an attribute, and of None it is None.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from parcompile.backends.deepspeed import NO_NVME
from parcompile.backends.statements import Row, Values, holds, rows_of
from parcompile.diagnostics import Severity
from parcompile.layout.groups import DENSE_AXES, Axis, Grid, expert_grid
from parcompile.layout.sequence import CpLayout
from parcompile.layout.shards import keeps_places
from parcompile.machines import accelerators
from parcompile.model.catalogue import CORRECTED
from parcompile.model.derived_rows import dense_mlps
from parcompile.model.tables.expression import compiled
from parcompile.spec.resolve import Resolution
from parcompile.user_files import shipped

from . import Finding, also, layout_change, model_path, nearest_multiples, rule
from .d_deepspeed import plan_overlaps
from .h_memory import estimated, workload
from .m_experts import near_ep
from .stored import finding

_SECTIONS = frozenset(("training", "parallelism", "zero", "cluster", "model", "deepspeed", "backends"))


def _length_divisor(spec: Resolution) -> int:
    """What the sequence length has to be a multiple of, for cp and sequence parallelism together."""
    cp, tp = spec.axis(Axis.CP), spec.axis(Axis.TP)
    chunks = spec.cp_layout.chunks_per_rank if cp > 1 else 1
    return cp * (math.lcm(chunks, tp) if spec.sequence_parallel else chunks)


def _stride_of_cp(spec: Resolution) -> int:
    """Ranks from one of a cp group to the next."""
    order = spec.order
    return math.prod(spec.axis(axis) for axis in DENSE_AXES if order.index(axis) < order.index(Axis.CP))


def _starts_kernels_in_turn(spec: Resolution) -> bool:
    machine = accelerators().get(spec.cluster.accelerator)  # none, where a file that cannot be used is named
    return machine is not None and machine.starts_kernels_in_turn


def _experts_keep_places(spec: Resolution) -> bool:
    dense = Grid.of(spec.order, {axis: spec.axis(axis) for axis in DENSE_AXES})
    return keeps_places(dense, expert_grid(dense, spec.axis(Axis.EP), spec.expert_tp))


def _recomputed(spec: Resolution) -> list[str]:
    given = spec.activation_checkpointing
    return [given] if isinstance(given, str) else list(given)


_FACTS: Mapping[str, Callable[[Resolution], Any]] = {
    **{axis.value: functools.partial(lambda axis, spec: spec.axis(axis), axis) for axis in Axis},
    "machines": lambda spec: spec.cluster,
    "layout_change": lambda spec: layout_change(spec).value,
    "length_divisor": _length_divisor,
    "near_lengths": lambda spec: nearest_multiples(spec.sequence_length, _length_divisor(spec)),
    "stride_of_cp": _stride_of_cp,
    "balance": lambda spec: float(spec.context_parallel.balance(CpLayout.CONTIGUOUS)),
    "recomputed": _recomputed,
    "offload_optimizer": lambda spec: spec.offload_of("optimizer"),
    "offload_param": lambda spec: spec.offload_of("param"),
    "no_nvme": lambda _: NO_NVME,
    "near_ep": near_ep,
    "peak": lambda spec: estimated(workload(spec)).peak,
    "plan_overlaps": plan_overlaps,
    "router_is_corrected": lambda spec: spec.shape.model_type in CORRECTED,
    "starts_kernels_in_turn": _starts_kernels_in_turn,
    "experts_keep_places": _experts_keep_places,
    "has_dense_mlps": lambda spec: bool(dense_mlps(spec.shape)),
    "has_dense_layers": lambda spec: bool(spec.shape.dense(range(spec.shape.num_hidden_layers))),
}


_UNBOUND: Mapping[str, Any] = {}


def value_of(spec: Resolution, name: str, bound: Mapping[str, Any] = _UNBOUND) -> Any:
    """What a name of an expression stands for, where those of `over` are bound to values.

    Raises:
        Unavailable: it is a value that is itself wrong, or follows from one.
    """
    head, *rest = name.split(".")
    if head in _SECTIONS:
        return spec.get(head, *rest)
    if head == "given":
        return spec.given(*rest)
    if head == "where":
        return ".".join(model_path(spec, *rest))
    if head == "config":
        return spec.model_config.get(*rest)
    found = bound[head] if head in bound else _FACTS[head](spec) if head in _FACTS else getattr(spec, head)
    for step in rest:
        found = None if found is None else getattr(found, step)
    return found


def _register() -> None:
    """Registers every rule of the table of specs."""
    for code, stored in shipped(__package__, "rules.json").items():
        words = stored.get("words", {})
        (when,) = rows_of([{"when": stored.get("when", "True")}], words)
        rows = tuple(rows_of(stored["finds"], words))
        check = functools.partial(_found, when, rows, once=stored.get("is_once", False))
        check.__module__ = __name__
        targets, run_by = tuple(stored.get("targets", ["all"])), tuple(stored.get("run_by", []))
        rule(code, severity=Severity(stored.get("severity", "error")), targets=targets, run_by=run_by)(check)


def _found(when: Row, rows: tuple[Row, ...], spec: Resolution, *, once: bool) -> Iterator[Finding]:
    """What the rows of a rule find, up to the first that needs a value which is itself wrong."""
    values = Values(spec, {}, functools.partial(value_of, spec))
    for row in rows if holds(when, values) else ():
        for bound in _bound(row, spec, values):
            if holds(row, bound):
                yield finding(row, bound, lambda path: also(spec, path))
                if once:
                    return


def _bound(row: Row, spec: Resolution, values: Values) -> Iterator[Values]:
    """The values of a row: one for each of what it goes over, which has a name in them."""
    if "over" not in row:
        yield values
    for name, found in row.get("over", {}).items():
        yield from (
            Values(spec, {}, functools.partial(value_of, spec, bound={name: one})) for one in compiled(found)(values)
        )


_register()
