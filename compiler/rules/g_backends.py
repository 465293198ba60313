"""Options that a spec holds for one backend, as they stand."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Safety
from parcompile.spec.resolve import Resolution

from . import Finding, removable, rule

_MEGATRON = ("backends", "megatron")


@rule("G001")
def verbatim_options_can_be_written(spec: Resolution) -> Iterator[Finding]:
    if not spec.given(*_MEGATRON):
        return
    # Only here: the parser's options are a large table.
    from parcompile.backends.megatron.read import refusal

    has_schedule, balances = spec.given("training", "lr_scheduler"), spec.given("training", "router", "aux_loss")
    for name, value in spec.get(*_MEGATRON).items():
        why = refusal(name, value, has_schedule=has_schedule, balances=balances)
        if why is not None:
            hint = "remove it, or write it as the message says"
            yield removable((*_MEGATRON, name), why, hint, (), Safety.CHANGES_NUMERICS)
