"""What an optimizer reads of its settings."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Safety
from parcompile.spec import OPTIMIZER_KEYS
from parcompile.spec.resolve import Resolution

from . import Finding, removable, rule

_OPTIMIZER = ("training", "optimizer")


@rule("P008")
def settings_are_the_optimizers(spec: Resolution) -> Iterator[Finding]:
    kind = str(spec.get(*_OPTIMIZER, "type"))
    known = OPTIMIZER_KEYS[kind]
    for key in dict.fromkeys(key for keys in OPTIMIZER_KEYS.values() for key in keys):
        path = (*_OPTIMIZER, key)
        if key not in known and spec.given(*path):
            owners = ", ".join(name for name, keys in OPTIMIZER_KEYS.items() if key in keys)
            message, hint = f"optimizer {kind} has no {key}: it is of {owners}", f"remove it, or choose one of {owners}"
            yield removable(path, message, hint, (), Safety.CHANGES_COST)
    if kind == "sgd" and spec.optimizer.nesterov and not spec.optimizer.momentum:
        path = (*_OPTIMIZER, "nesterov")
        yield Finding("nesterov with momentum 0: torch's SGD refuses it", path, help='set "momentum", such as 0.9')
