"""Options that a spec holds for one backend, as they stand."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Safety, Severity
from parcompile.spec.resolve import Resolution

from . import Finding, removable, rule

_MEGATRON = ("backends", "megatron")


@rule("G001")
def verbatim_options_can_be_written(spec: Resolution) -> Iterator[Finding]:
    """Names each option that is refused, and why."""
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


@rule("G002", severity=Severity.INFO)
def verbatim_options_are_named(spec: Resolution) -> Iterator[Finding]:
    """Says how many there are, and who reads them."""
    found = spec.get(*_MEGATRON) if spec.given(*_MEGATRON) else {}
    if found:
        options = f"{len(found)} option{'s' * (len(found) > 1)}"
        yield Finding(f"backends.megatron: only the target megatron reads its {options}: {', '.join(found)}", _MEGATRON)
