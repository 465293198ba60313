"""Mixtures of experts, and latent attention."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.layout.groups import Axis
from parcompile.layout.shards import expert_rows, shared_tokens
from parcompile.model.catalogue import router_scores
from parcompile.spec.resolve import Resolution

from . import Finding, also, model_path, nearest_divisors, removable, rule, settable

_ROUTER = ("training", "router")
_CAPACITY = (*_ROUTER, "expert_capacity")
_AUX, _SCOPE, _Z = ((*_ROUTER, name) for name in ("aux_loss", "aux_loss_scope", "z_loss"))
_EXPERT_TP = ("parallelism", "expert_tp")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def near_ep(spec: Resolution) -> tuple[int, ...]:
    """Other sizes of ep. The experts that give back what they take are dealt too."""
    moe = spec.shape.moe
    counts = () if moe is None else filter(None, (moe.num_experts, moe.num_identities))
    return nearest_divisors(spec.axis(Axis.EP), *counts, count=4)


@rule("M005")
def experts_divide_over_their_tp(spec: Resolution) -> Iterator[Finding]:
    expert_tp, tp, moe = spec.expert_tp, spec.axis(Axis.TP), spec.shape.moe
    if expert_tp is None:
        return
    if moe is None:
        message = f"expert_tp {expert_tp}, but {spec.shape.model_type} has no experts"
        related = also(spec, model_path(spec, "model_type"))
        yield removable(_EXPERT_TP, message, "remove expert_tp", related, Safety.CHANGES_COST)
        return
    sizes = {"tp": tp, "the width of an expert": moe.intermediate_size}
    wrong = {name: size for name, size in sizes.items() if size % expert_tp}
    if wrong:
        names = " and ".join(f"{name} {size}" for name, size in wrong.items())
        why = ", ".join(f"{size} / {expert_tp}" for size in wrong.values())
        message = f"expert_tp {expert_tp} does not divide {names}: {why} {'are' if len(wrong) > 1 else 'is'} not whole"
        related, hint = also(spec, ("parallelism", "tp")), "write 1, or leave expert_tp out"
        yield removable(_EXPERT_TP, message, hint, related, Safety.CHANGES_COST)


@rule("M002")
def enough_experts(spec: Resolution) -> Iterator[Finding]:
    moe = spec.shape.moe
    if moe is None or moe.num_experts_per_token <= moe.num_choices:
        return
    path = model_path(spec, "num_experts_per_tok", *_EXPERTS)
    message = f"num_experts_per_tok {moe.num_experts_per_token} > {moe.num_choices} experts"
    values = [moe.num_choices] if path[-1] == "num_experts_per_tok" else []
    related = also(spec, *(("model", name) for name in _EXPERTS if name != path[-1]))
    yield settable(path, values, message, f"write {moe.num_choices} or less", related, Safety.CHANGES_NUMERICS)


@rule("M006")
def losses_of_routers_fit(spec: Resolution) -> Iterator[Finding]:
    weights = {path: spec.get(*path) for path in (_AUX, _Z) if spec.given(*path) and spec.get(*path)}
    if spec.given(*_SCOPE) and not spec.get(*_AUX):
        message = f"aux_loss_scope {spec.get(*_SCOPE)} has no effect: aux_loss is 0"
        yield removable(_SCOPE, message, "set aux_loss, or remove aux_loss_scope")
    kind, related = spec.shape.model_type, also(spec, model_path(spec, "model_type"))
    scope = (Edit(_SCOPE, remove=True),) if spec.given(*_SCOPE) else ()
    without_aux = Fix("remove aux_loss", Safety.CHANGES_NUMERICS, (Edit(_AUX, remove=True), *scope))
    without_z = Fix.removing(_Z, Safety.CHANGES_NUMERICS)
    for path, weight in weights.items():
        if not spec.shape.has_moe:
            why = f"{kind} has no experts, and so no router"
        elif router_scores(kind) is None:
            why = f"the class of {kind} does not give the logits of its routers with the function that scores them"
        else:
            continue
        fix = without_aux if path == _AUX else without_z
        yield Finding(f"{path[-1]} {weight}, but {why}", path, f"remove {path[-1]}", (fix,), related)
    if _AUX in weights and spec.shape.has_moe and (found := _own_loss(spec)) is not None:
        yield Finding(
            f"aux_loss {weights[_AUX]} beside output_router_logits of the model: two losses would balance experts",
            _AUX,
            help="keep one of them: output_router_logits is aux_loss router_aux_loss_coef with scope micro_batch",
            fixes=(without_aux,),
            related=also(spec, found),
        )


def _own_loss(spec: Resolution) -> tuple[str, ...] | None:
    """Where the model asks for the balancing loss of its class; None where it does not."""
    return model_path(spec, "output_router_logits") if spec.model_config.get("output_router_logits") else None


@rule("M009", severity=Severity.INFO)
def what_a_capacity_refuses_is_shown(spec: Resolution) -> Iterator[Finding]:
    moe = spec.shape.moe
    if moe is None or moe.num_identities or not spec.given(*_CAPACITY):
        return
    factor, cp, tp = spec.get(*_CAPACITY), spec.axis(Axis.CP), spec.axis(Axis.TP)
    count, chosen = moe.num_experts, moe.num_experts_per_token
    _, tokens = shared_tokens(spec.micro_batch_size * spec.sequence_length // cp, tp, 0)
    rows = expert_rows(factor, tokens, chosen, count)
    means = "another layout refuses other choices"
    instead = f"at {count} / {chosen} = {count / chosen:g} or more none is refused, as without the key"
    if rows == tokens:
        means = "no choice is refused"
        instead = "write less, or leave it out: with ep, as much is sent as if each token had chosen every expert"
    yield Finding(
        f"an expert takes min(⌈{factor} · {tokens} · {chosen} / {count}⌉, {tokens}) = {rows} rows of the {tokens} "
        f"tokens that a rank has of a micro-batch (micro_batch_size {spec.micro_batch_size} · sequence_length "
        f"{spec.sequence_length} / cp {cp} / tp {tp}): {means}",
        _CAPACITY,
        help=instead,
    )
