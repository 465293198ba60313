"""A gpt-neox configuration on its own: how its values have to fit together. Names and types are checked before.

Most of it stands in `rules.json`; here is what its expressions read, and the rules that name what there is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from parcompile.backends.gpt_neox import ATTENTION_KINDS, REPLACED, fields
from parcompile.backends.gpt_neox.beside import Beside
from parcompile.backends.kinds import GPT_NEOX, NEOX_KEYS
from parcompile.diagnostics import Path, closest
from parcompile.lint.registry import Settings, file_rule
from parcompile.lint.stored import register
from parcompile.rules import Finding


class NeoxSettings(Settings):
    """The values of a gpt-neox configuration; `fork` is what the gpt-neox of the file takes, where it is at hand."""

    def __init__(self, tree: object, invalid: frozenset[Path], fork: Beside | None = None) -> None:
        super().__init__(tree, invalid)
        self.fork = fork or Beside(fields(), (), REPLACED)


def _fork(settings: Settings) -> Beside:
    return settings.fork if isinstance(settings, NeoxSettings) else NeoxSettings({}, frozenset()).fork


_PIPELINE = re.compile(r"\"is_pipe_parallel\",\s*self\.pipe_parallel_size >(=?) (\d)")
_SPLITS = ("train", "valid", "test")


def _least_stages(settings: Settings) -> int:
    """From so many stages on it is a pipeline: to some versions one of one stage is none."""
    said = _PIPELINE.search(_fork(settings).checks)
    return int(said[2]) + (not said[1]) if said else 1


def _lacks_heads(settings: Settings) -> bool:
    kinds = settings.get("attention_config")
    return isinstance(kinds, list) and not {"mamba", "rwkv"}.isdisjoint(str(kinds).replace("'", " ").split())


def _asks_all_for_whole_heads(settings: Settings) -> bool:
    """Whether the gpt-neox of the file divides hidden_size also where mamba has no heads, as before 2025."""
    checks = _fork(settings).checks
    return "num_attention_heads != 0" in checks and "num_attention_heads != 0 and not" not in checks


def _layers_with_kinds(settings: Settings) -> int | None:
    """For how many layers attention_config has kinds; None where "all" fills what is left."""
    config, count = settings.get("attention_config"), 0
    if not isinstance(config, list):
        return None
    for entry in config if any(not isinstance(one, str) for one in config) else [[config, 1]]:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list) and type(entry[1]) is int):
            return None
        count += len(entry[0]) * entry[1]
    return count


@file_rule("F205", GPT_NEOX)
def names_are_known(settings: Settings) -> Iterator[Finding]:
    """Fires for an optimizer, and for each kind of attention."""
    fork = _fork(settings)
    optimizers = [str(one) for one in fork.fields["optimizer_type"].choices] if "optimizer_type" in fork.fields else []
    kind = settings.get("optimizer", "type")
    if isinstance(kind, str) and optimizers and kind.lower() not in optimizers:
        yield _unknown_name("optimizer", kind, optimizers, ("optimizer", "type"))
    config = settings.get("attention_config")
    for number, entry in enumerate(config if isinstance(config, list) else ()):
        own = entry[0] if isinstance(entry, list) and entry and isinstance(entry[0], list) else [entry]
        for name in own:
            known = fork.attention or ATTENTION_KINDS
            if isinstance(name, str) and name not in known:
                yield _unknown_name("kind of attention", name, known, ("attention_config", number))


def _unknown_name(what: str, name: str, known: Sequence[str], path: tuple[str | int, ...]) -> Finding:
    near = closest(name, known)
    help_ = f"did you mean {near}?" if near else f"write one of {', '.join(known)}"
    return Finding(f"gpt-neox has no {what} {name!r}", path, help=help_)


def _lone_data_paths(settings: Settings) -> tuple[str, str] | None:
    """The first of three lists of data that is given, and those that are not, whose single files are not either."""
    names = [f"{one}_data_paths" for one in _SPLITS]
    given = [name for name in names if isinstance(settings.get(name), list)]
    lacking = [name for name in names if name not in given]
    return (given[0], " and ".join(lacking)) if given and lacking and not any(map(settings.get, lacking)) else None


def _asks_for_data(settings: Settings) -> bool:
    checks = _fork(settings).checks
    return not checks or "has_separate_path" in checks


_FACTS: Mapping[str, Callable[[Settings], Any]] = {
    "told_by": lambda settings: next((key for key in settings.tree if key in NEOX_KEYS), ""),
    "least_stages": _least_stages,
    "lacks_heads": _lacks_heads,
    "wants_whole_heads": lambda settings: not _lacks_heads(settings) or _asks_all_for_whole_heads(settings),
    "steps": lambda settings: settings.number("lr_decay_iters") or settings.number("train_iters"),
    "layers_with_kinds": _layers_with_kinds,
    "checks": lambda settings: _fork(settings).checks,
    "asks_for_data": _asks_for_data,
    "lone_data_paths": _lone_data_paths,
}
register(__package__, GPT_NEOX, _FACTS)
