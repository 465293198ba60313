"""What other tools call the keys and values of a spec.

The names are those of Megatron-LM, DeepSpeed, Transformers, vLLM, torchtitan, nanotron and gpt-neox.
A user who brings a name from there is told the name here. Names are compared without case, `-` and `_`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from parcompile.diagnostics.diagnostic import closest
from parcompile.user_files import shipped


@functools.lru_cache(maxsize=4096)
def bare(name: str) -> str:
    """`name` without case and separators, for comparing."""
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


@functools.cache
def _names(*tables: str) -> Mapping[str, str]:
    """The names here by the bare names of other tools, in tables of `synonyms.json`."""
    stored = shipped("parcompile.schema", "synonyms.json")
    return {bare(other): name for table in tables for name, others in stored.get(table, {}).items() for other in others}


def known_key(schema: str, key: str) -> str | None:
    """The dotted path that another tool's `key` has under `schema`."""
    return _names(schema).get(bare(key))


def known_value(value: str) -> str | None:
    """The value here that another tool calls `value`."""
    return _names("values", "guesses").get(bare(value))


def is_exact(value: str) -> bool:
    """Whether another tool's `value` means one value here ("h100" may be an SXM or a PCIe card)."""
    return bare(value) in _names("values")


def near_key(schema: str, key: str) -> str | None:
    """The dotted path under `schema` for a misspelt key of another tool."""
    table = _names(schema)
    near = closest(key, table)
    return None if near is None else table[near]
