"""Files of trainers above transformers: their options are arguments of its Trainer under other names.

How a trainer calls the arguments that it hands to transformers' `Trainer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parcompile.backends.reading import is_among, leaves
from parcompile.user_files import shipped

_STORED = shipped("parcompile.backends.trainers", "tools.json")
DEFAULTS: Mapping[str, Any] = _STORED["defaults"]
"""Arguments of `TrainingArguments` that a spec has a place for, with their defaults."""

AUTOMODEL, MEGATRON_SWIFT = _STORED["automodel"], _STORED["megatron_swift"]
"""What is known of these two, which are no trainers above transformers'."""
REASONS: Mapping[str, str] = _STORED["reasons"]
ADAPTER, METHOD, QUANTISED = (REASONS[name] for name in ("adapter", "method", "quantised"))
CHANGING = frozenset({REASONS["tf32"], REASONS["setting"], ADAPTER, METHOD, QUANTISED})
"""Reasons that stand for another training."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A trainer.

    Attributes:
        name: as people call it.
        names: its own name for each argument that it renames, by that of transformers.
        defaults: its defaults where they are not those of transformers, by the name in transformers.
        model: its option that names the model.
        length: its option for the tokens of a sequence.
        settled: what there is to say of options that a spec has no place for.
        parallel: its options for the axes, by the axis.
        unplaced: defaults of options that a spec has no place for: a file may write out all of them.
    """

    name: str
    model: str
    length: str
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    parallel: Mapping[str, Sequence[str]] = field(default_factory=dict)
    settled: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unplaced: Mapping[str, Any] = field(default_factory=dict)

    def own(self, argument: str) -> str:
        """Its name for an argument of transformers."""
        return self.names.get(argument, argument)

    def all_defaults(self) -> dict[str, Any]:
        """The default of every option that is read, by the tool's own names."""
        return {self.own(name): value for name, value in {**DEFAULTS, **self.defaults}.items()}

    def reason(self, option: str) -> str | None:
        """Why an option has no place in a spec, where that is known."""
        return next((why for why, names in self.settled.items() if is_among(option.split(".")[0], names)), None)


def stored_tool(name: str) -> Tool:
    """A trainer from its entry in `tools.json`."""
    stored = _STORED["tools"][name]
    settled = {REASONS.get(why, why): names for why, names in stored["settled"].items()}
    return Tool(name, **{**stored, "settled": settled})


def options(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Options by dotted names, each as the file gives it; a nested DeepSpeed configuration keeps its "auto"."""
    nested = {"deepspeed": one} if isinstance(one := tree.get("deepspeed"), Mapping) and one else {}
    found = dict(leaves(tree, auto="the machine that it runs on")) | dict(leaves(nested))
    # axolotl takes bf16 where the machine computes in it, as every accelerator does that a spec names.
    return found | ({"bf16": True} if tree.get("bf16") == "auto" else {})
