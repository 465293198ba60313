"""Megatron-LM's words for a mixture of experts and for its router."""

from __future__ import annotations

import ast
from typing import Any

from parcompile.backends.architecture import Architecture, InexpressibleError, Router, refuse
from parcompile.backends.artefacts import tree_of
from parcompile.backends.reading import Arguments, Draft, Source, SpecPath
from parcompile.backends.statements import Facts
from parcompile.model.shape import MoeShape
from parcompile.spec import Spec
from parcompile.text.typed import decimal, number

SCOPES = {"sequence": "seq_aux_loss", "micro_batch_per_layer": "aux_loss", "global_batch": "global_aux_loss"}
"""Megatron-LM's words for the tokens over which a loss balances experts; it has none for all layers as one."""
_ROUTER: SpecPath = ("training", "router")


def write(found: Architecture, spec: Spec) -> Arguments:
    """The options of experts and of the router with its losses; none for a dense model.

    Experts with a capacity are padded to fixed sizes, unless a bias moves: it would count padding, which every expert
    has as much of as it lacks. Without a rate the bias stays as it was loaded.

    Raises:
        InexpressibleError: Megatron-LM has no option for something.
    """
    moe, router, training = spec.model.shape.moe, found.router, spec.training.router
    if moe is None or router is None:
        return {}
    layers, kind, frequency = spec.model.shape.num_hidden_layers, None, None
    if training is not None and training.aux_loss:
        kind = SCOPES.get(training.aux_loss_scope)
    if moe.layers is not None:
        frequency = str([int(layer in moe.layers) for layer in range(layers)])
    elif moe.first_moe_layer:
        frequency = f"([0]*{moe.first_moe_layer}+[1]*{layers - moe.first_moe_layer})"
    facts: Facts = {
        "router.": lambda _spec, key: getattr(router, key),
        "balancing": lambda _spec: kind or "none",
        "layer_frequency": lambda _spec: frequency,
    }
    refuse("megatron.experts", spec, facts)
    options: Arguments = tree_of("megatron.experts", spec, facts)
    return options


def read(source: Source, *, ffn: int, layers: int) -> tuple[Router | None, MoeShape | None]:
    """The router and the sizes of the experts; None for a dense model.

    Raises:
        InexpressibleError: experts in a way that a spec has no word for.
        UndecidedError: the file does not say a value.
    """

    def value(name: str) -> Any:
        return source.value(name, ("model",))

    count = value("num_experts")
    if not count:
        return None, None
    width, topk = value("moe_ffn_hidden_size") or ffn, int(value("moe_router_topk"))
    shared, first = value("moe_shared_expert_intermediate_size") or 0, _first_layer(value("moe_layer_freq"), layers)
    score = str(value("moe_router_score_function"))
    router = Router(
        score=score,
        normalized=value("moe_router_pre_softmax") is not True or score != "softmax",
        scale=float(value("moe_router_topk_scaling_factor") or 1.0),
        groups=int(value("moe_router_num_groups") or 1),
        groups_per_token=int(value("moe_router_group_topk") or 1),
        correction_bias=value("moe_router_enable_expert_bias") is True,
        shared_gate=value("moe_shared_expert_gate") is True,
        shared=bool(shared),
        dense_layers=first > 0,
    )
    moe = MoeShape(
        num_experts=int(count),
        num_experts_per_token=topk,
        intermediate_size=int(width),
        num_shared_experts=shared // width if width else 0,
        shared_intermediate_size=int(shared),
        first_moe_layer=first,
    )
    return router, moe


def read_training(source: Source, draft: Draft, router: Router) -> None:
    """The losses of the routers, the move of their bias, and how many rows experts take.

    Raises:
        InexpressibleError: experts are chosen in a way that a spec has no word for.
        UndecidedError: the file does not say a value.
    """
    rate = source.number("moe_router_bias_update_rate", _RATE)
    if router.correction_bias and rate:
        draft.set(_RATE, rate, said=source.has("moe_router_bias_update_rate"))
    if z_loss := source.number("moe_z_loss_coeff", _Z):
        draft.set(_Z, z_loss, said=True)
    _read_capacity(source, draft, moves=router.correction_bias and bool(rate))
    balancing, coefficient = source.value(_TYPE, _SCOPE), source.value(_COEFFICIENT, _AUX)
    balancing = balancing[0] if isinstance(balancing, list) and len(balancing) == 1 else balancing
    coefficient = coefficient[0] if isinstance(coefficient, list) and len(coefficient) == 1 else coefficient
    if balancing in ("sinkhorn", "quantile_balancing"):
        raise InexpressibleError(f"{_TYPE} {balancing}", "a spec's routers take the highest scores")
    scope = {theirs: ours for ours, theirs in SCOPES.items()}.get(str(balancing))
    if not (any(coefficient) if isinstance(coefficient, list) else coefficient) or balancing == "none":
        source.ignore((_TYPE, _COEFFICIENT), "no loss balances experts")
    elif scope is None or isinstance(coefficient, list):
        source.lose(_COEFFICIENT, "a spec has one loss that balances experts", changes=True)
        source.ignore(_TYPE, "a spec has one loss that balances experts")
    else:
        draft.set(_AUX, number(coefficient, _COEFFICIENT), said=True)
        draft.set(_SCOPE, scope, said=source.has(_TYPE))


def _read_capacity(source: Source, draft: Draft, *, moves: bool) -> None:
    factor, policy, pads = (source.value(name, _CAPACITY) for name in (_FACTOR, _POLICY, _PAD))
    # Megatron-LM takes a negative one for none.
    if factor is None or number(factor, _FACTOR) <= 0:
        source.ignore((_FACTOR, _POLICY, _PAD), "no choice is refused")
        return
    draft.set(_CAPACITY, number(factor, _FACTOR), said=True)
    if policy != "probs":
        source.lose(_POLICY, "a spec's experts keep the choices with the highest weights", changes=True)
    if pads is True and moves:
        source.lose(_PAD, "its bias counts padding as choices, that of a plan does not", changes=True)


_FACTOR, _POLICY = "moe_expert_capacity_factor", "moe_token_drop_policy"
_PAD = "moe_pad_expert_input_to_capacity"
_CAPACITY: SpecPath = (*_ROUTER, "expert_capacity")
_TYPE, _COEFFICIENT = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
_AUX, _SCOPE, _Z, _RATE = ((*_ROUTER, name) for name in ("aux_loss", "aux_loss_scope", "z_loss", "bias_update_rate"))


def _first_layer(frequency: Any, layers: int) -> int:
    """The first layer with experts, when all after it have them.

    Raises:
        InexpressibleError: the pattern is another one.
    """
    pattern = layer_pattern(frequency, layers)
    dense = pattern.index(1) if 1 in pattern else layers
    if any(one != 1 for one in pattern[dense:]):
        raise InexpressibleError(
            f"moe_layer_freq {frequency}", "a spec has experts in every layer from the first with them on"
        )
    return dense


def layer_pattern(frequency: Any, layers: int) -> list[int]:
    """For each layer 1 or 0, as Megatron-LM evaluates it: every N-th from the first on, or a list expression.

    Raises:
        InexpressibleError: it cannot be evaluated.
    """
    text = str(frequency).strip()
    if every := decimal(text):
        return [int(layer % every == 0) for layer in range(layers)]
    try:
        found = _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(one, int) for one in found):
        raise InexpressibleError(f"moe_layer_freq {frequency}", "it is no number and no list expression")
    return found


def _evaluated(node: ast.expr) -> Any:
    """Lists and whole numbers with + and *; nothing is executed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        return [_evaluated(one) for one in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _evaluated(node.left), _evaluated(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        sizes = [one if isinstance(one, int) else len(one) for one in (left, right)]
        if sizes[0] * sizes[1] > 1_000_000:
            raise ValueError("too long")
        return left * right
    raise ValueError(ast.dump(node))
