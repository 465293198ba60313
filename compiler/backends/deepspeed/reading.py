"""Who can read the text of a configuration: DeepSpeed reads Hjson, all others plain JSON.

In Hjson there may be comments, a comma before a closing bracket, single quotes, keys without quotes, and line breaks
where commas are missing. The Trainer of transformers, accelerate and Lightning read the file before DeepSpeed does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from parcompile.diagnostics import Diagnostic, Severity

from .fillers import TITLES
from .surroundings import Surroundings

_TAKEN = ("J013", "J014", "J015")
_KEY_WITHOUT_QUOTES = "the key "


def judged(diagnostics: Iterable[Diagnostic], around: Surroundings) -> tuple[Diagnostic, ...]:
    """What is wrong with the text for those who read it here: nothing that all of them take."""
    found = []
    for one in diagnostics:
        if not _is_hjson(one):
            found.append(one)
        elif around.strict_json is not None:
            reader = TITLES[around.strict_json]
            found.append(replace(one, message=f"{one.message}: {reader} cannot read it, DeepSpeed itself can"))
        elif around.filler is None:
            message = f"{one.message}: DeepSpeed itself reads it, transformers, accelerate and Lightning do not"
            found.append(replace(one, message=message, severity=Severity.WARNING))
    return tuple(found)


def _is_hjson(one: Diagnostic) -> bool:
    return one.code in _TAKEN or (one.code == "J016" and one.message.startswith(_KEY_WITHOUT_QUOTES))
