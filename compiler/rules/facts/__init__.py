"""What expressions of `rules.json` read beside the values of a spec: facts about it by their names.

Each public function of the modules here is one; `FACTS` has what is short or stands elsewhere beside them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from parcompile.backends.deepspeed import NO_NVME, refusal, refused_scaling
from parcompile.cost.step import timing
from parcompile.diagnostics import Path
from parcompile.layout.groups import Axis
from parcompile.layout.sequence import CpLayout
from parcompile.model.catalogue import CORRECTED, router_scores
from parcompile.model.derived_rows import dense_mlps
from parcompile.model.families import family_of
from parcompile.rules import layout_change, nearest_multiples
from parcompile.rules.context import exchange, named, possible_sizes, why_no_levels
from parcompile.rules.h_memory import estimated, workload
from parcompile.rules.l_stages import stages_without_choice, uneven_stages
from parcompile.rules.t_tensor import fixes_of_tp, groups_of_heads, legal_tp
from parcompile.rules.w_world import leaving_experts, leaving_groups, timed, traffic
from parcompile.spec.rampup import MOST_INCREMENTS
from parcompile.spec.resolve import Resolution

from . import batches, experts, layers, refusals


def _waste(spec: Resolution, switch: str) -> Iterator[tuple[int, float, float]]:
    """Tokens of a micro-batch with which a switch that is to save memory does not, and the peak with and without it."""
    work = workload(spec)
    if not getattr(work, switch) or (switch == "tiled_mlp" and not dense_mlps(work.shape)):
        return
    off: dict[str, Any] = {switch: False}
    taken, without = (estimated(one).peak.total_bytes for one in (work, replace(work, **off)))
    if without < taken or (switch == "tiled_mlp" and work.mlp_tiles == 1):
        yield work.local_tokens, taken, without


def _paths_of_auto(node: object, path: Path = ("deepspeed",)) -> Iterator[Path]:
    """Where DeepSpeed would be handed the word "auto" as it is."""
    if node == "auto":
        yield path
    elif isinstance(node, Mapping):
        for key, value in node.items():
            if refusal((*path[1:], key)) is None:
                yield from _paths_of_auto(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _paths_of_auto(value, (*path, index))


FACTS: Mapping[str, Callable[[Resolution], Any]] = {
    **{
        name: found
        for module in (batches, experts, layers, refusals)
        for name, found in inspect.getmembers(module, inspect.isfunction)
        if found.__module__ == module.__name__ and not name.startswith("_")
    },
    **{axis.value: functools.partial(lambda axis, spec: spec.axis(axis), axis) for axis in Axis},
    "machines": lambda spec: spec.cluster,
    "layout_change": lambda spec: layout_change(spec).value,
    "near_lengths": lambda spec: nearest_multiples(spec.sequence_length, layers.length_divisor(spec)),
    "balance": lambda spec: float(spec.context_parallel.balance(CpLayout.CONTIGUOUS)),
    "offload_optimizer": lambda spec: spec.offload_of("optimizer"),
    "offload_param": lambda spec: spec.offload_of("param"),
    "no_nvme": lambda _: NO_NVME,
    "peak": lambda spec: estimated(workload(spec)).peak,
    "router_is_corrected": lambda spec: spec.shape.model_type in CORRECTED,
    "has_dense_mlps": lambda spec: bool(dense_mlps(spec.shape)),
    "has_dense_layers": lambda spec: bool(spec.shape.dense(range(spec.shape.num_hidden_layers))),
    "eval_total": lambda spec: spec.eval_batch("global_batch_size", spec.global_batch_size),
    "eval_micro": lambda spec: spec.eval_batch("micro_batch_size", spec.micro_batch_size),
    "end_of_ramp": lambda spec: (
        None if (ramp := batches.whole_ramp(spec)) is None else ramp.sizes(spec.global_batch_size)[-1]
    ),
    "most_increments": lambda _: MOST_INCREMENTS,
    "halo": lambda spec: max(
        filter(None, (part.halo() for part in spec.shape.parts)), key=lambda one: one.tokens, default=None
    ),
    "router_scores": lambda spec: router_scores(spec.shape.model_type),
    "family": lambda spec: family_of(spec.shape.model_type),
    "ranks_of_kv_heads": lambda spec: [spec.axis(Axis.TP) // one for one in layers.spread_kv_heads(spec)],
    "has_levels": lambda spec: layers.levelled(spec).has_levels,
    "possible_levels": lambda spec: [list(one) for one in possible_sizes(spec, layers.levelled(spec))],
    "reduction": lambda spec: str(spec.if_given("deepspeed", "gradient_allreduce_op")).lower(),
    "refused_scaling": lambda spec: refused_scaling(**refusals.scaling(spec)),
    "heads_to_cut": lambda spec: next(
        (one for one in spec.shape.head_counts if one % spec.axis(Axis.TP)), spec.shape.num_attention_heads
    ),
    "groups_of_heads": groups_of_heads,
    "legal_tp": legal_tp,
    "fixes_of_tp": lambda spec: fixes_of_tp(spec, legal_tp(spec)[:4]),
    "paths_of_auto": lambda spec: _paths_of_auto(spec.get("deepspeed")),
    "named_cp": named,
    "exchange": exchange,
    "why_no_levels": why_no_levels,
    "waste_of_linear_loss": functools.partial(_waste, switch="linear_loss"),
    "waste_of_tiles": functools.partial(_waste, switch="tiled_mlp"),
    "uneven_stages": uneven_stages,
    "stages_without_choice": stages_without_choice,
    "leaving_groups": leaving_groups,
    "leaving_experts": leaving_experts,
    "traffic": traffic,
    "seconds_of_step": lambda spec: timing(timed(spec)).step.seconds,
}
