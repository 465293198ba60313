"""Checks that the tensor-parallel plan of the model itself does not contradict the compiled one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from parcompile.model.blocks.experts import PASSED_ON
from parcompile.model.blocks.latent import PARTIAL_STYLES
from parcompile.model.family import types_with
from parcompile.runtime.errors import RunError
from parcompile.runtime.model.slices import Slices

EXPERTS = "moe_tp_experts"
"""The entry of a module whose experts are cut, each of them, over all tp ranks."""

_OWN = "local_params"
"""The entry of a module that has parameters of its own which are cut, each by an entry of its own."""

_GATHERED = "colwise_gather_output"
_SPLIT = "rowwise_split_input"
_TABLE = "embedding_colwise"
"""The entry of a table that transformers cuts by features, and the plan by rows."""
_COLUMN = ("colwise", _GATHERED, "packed_colwise", "embedding_rowwise")
_ROW = ("rowwise", _SPLIT, "packed_rowwise")
_PARTIAL = ("replicated_with_grad_allreduce", *PARTIAL_STYLES)
# Where transformers gathers a projection or cuts its input again, the plan keeps heads and widths apart: it cuts fused
# weights part by part, and a norm over all heads sums its squares over the ranks.
_WHOLE = ("index_qk_proj", "input_mix_weight_down")
"""Projections of whole features to whole features that transformers cuts between, and the plan does not."""
_KNOWN = (*_COLUMN, *_ROW, *_PARTIAL, EXPERTS, PASSED_ON, _OWN, _TABLE)

_FROM_THE_LEFT = types_with("experts_from_the_left")
"""Types whose stacks of experts are stored [experts, in, out]."""


def entries(model: nn.Module) -> dict[str, str]:
    """What of the model its own tensor-parallel plan names, a module or a parameter, with its entry."""
    plan: dict[str, str] = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    found = {}
    for name in names:
        local = name.removeprefix(f"{prefix}.")
        style = plan.get(re.sub(r"(?<=\.)\d+(?=\.)", "*", local))
        if style is not None:
            found[name] = style
    return found


def check_agreement(model: nn.Module, slices: Slices, whole: Sequence[nn.Module] = ()) -> None:
    """The model's own tensor-parallel plan, where it has one, cuts what the compiled plan cuts, along the same dim.

    In `whole` modules, which take their hidden states in together, transformers gathers each projection; the plan keeps
    their groups of heads apart, and cuts the last one along its inputs.

    Raises:
        RunError: it has an entry without a rule here, or they contradict each other.
    """
    named = entries(model)
    parameters = dict(model.named_parameters())
    apart = {id(child) for module in whole for child in module.modules()}
    for name, style in named.items():
        if style not in _KNOWN:
            raise RunError(
                f"{name} is {style!r} in the model's tensor-parallel plan, which is not injected", everywhere=True
            )
        if style in (EXPERTS, PASSED_ON, _OWN):
            continue
        if style == _GATHERED and id(model.get_submodule(name)) in apart:
            continue
        if style in _PARTIAL:
            kinds = [kind for kind in ("weight", "bias") if f"{name}.{kind}" in parameters]
            agrees = all(slices.of(f"{name}.{kind}").parameter.partial for kind in kinds)
            if not agrees:
                raise RunError(f"{name} is {style} for transformers, but not for the plan", everywhere=True)
            continue
        if style in (_GATHERED, _SPLIT) and name.rpartition(".")[2] in _WHOLE:
            continue
        weight = name if name in parameters else f"{name}.weight"
        if weight not in parameters and slices.has(weight) and not slices.holds(weight):
            continue  # on another stage, as the embedding of nemotron_h
        if weight not in parameters:
            raise RunError(f"{name} is {style} for transformers, but has no weight", everywhere=True)
        dims = parameters[weight].dim()
        if style == _TABLE:
            dims = 1  # its rows
        wanted = max(dims - 2, 0) if style in _COLUMN else dims - 1
        if slices.folds_experts and slices.of(weight).experts is not None:
            continue  # what transformers cuts over tp is dealt, whole
        stacked = name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
        if stacked and slices.model_type in _FROM_THE_LEFT:
            # "row because not linear": [experts, in, out] is named by how it is stored.
            wanted = dims - 1 if style in _ROW else dims - 2
        if style == "rowwise_split_input" and slices.of(weight).parameter.partial:
            continue  # a projection in front of experts, or behind them: whole on every rank, of a part of a sum
        if slices.of(weight).dim != wanted:
            raise RunError(
                f"{name} is {style} for transformers, but the plan splits dim {slices.of(weight).dim}", everywhere=True
            )
