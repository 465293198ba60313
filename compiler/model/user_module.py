"""A user module (no Hugging Face model): its parameters as the spec lists them, and the rules by which they are cut.

The compiler sees names and shapes. What the module computes with them it cannot know: that a column is followed by a
row, or that heads lie one after the other, is what the rules claim and what the runtime's self-check tries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from parcompile.diagnostics import closest

LAYER = "*"
"""Stands for the number of the layer in a name."""
ATTENTION = "attention"


class InjectionRule(NamedTuple):
    """What happens to a module or a parameter: "column", "row", "vocab", "partial" or "attention".

    `units` are the heads of each part of a fused weight, from which the sizes of the parts follow; empty when nothing
    was said.
    """

    kind: str
    units: tuple[int, ...] = ()


class InjectionProblem(NamedTuple):
    """A rule or a row that does not fit, with the key under `model` at which it stands."""

    message: str
    path: tuple[str, ...]
    help: str | None = None
    rename_to: str | None = None
    """The name that was probably meant."""


@dataclass(frozen=True, slots=True)
class UserModule:
    """`parameters` in the order in which the module registers them; `injection` by module or parameter name."""

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    injection: tuple[tuple[str, InjectionRule], ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> UserModule:
        """What a spec's section `model` says."""
        rules = []
        for name, given in config["injection"].items():
            entry: Mapping[str, Any] = {"rule": given} if isinstance(given, str) else given
            units = entry.get("units", ())
            rules.append((name, InjectionRule(entry["rule"], (units,) if isinstance(units, int) else tuple(units))))
        rows = tuple((name, tuple(shape)) for name, shape in config["parameters"].items())
        return cls(rows, tuple(rules))

    @property
    def prefix(self) -> str:
        """The names of the layers, up to their number."""
        return next(name.partition(LAYER)[0] for name, _ in self.parameters if LAYER in name)

    @property
    def attentions(self) -> tuple[str, ...]:
        """Names of the modules that attend."""
        return tuple(name for name, rule in self.injection if rule.kind == ATTENTION)

    def rule_of(self, parameter: str) -> InjectionRule | None:
        """The rule of a row: its own, or that of the module that it belongs to."""
        rules = dict(self.injection)
        found = rules.get(parameter) or rules.get(parameter.rpartition(".")[0])
        return None if found is None or found.kind == ATTENTION else found

    def problems(self, vocab_size: int) -> Iterator[InjectionProblem]:
        """Everything that does not fit, whatever tp is."""
        yield from self._rows()
        names = [name for name, _ in self.parameters]
        modules = {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)}
        if not self.attentions:
            yield InjectionProblem(
                "no rule says which modules attend",
                ("injection",),
                'add "layers.*.attention": "attention" with the name that the module has there',
            )
        for name, rule in self.injection:
            path = ("injection", name)
            if rule.kind == ATTENTION:
                # A module without parameters is in no row: its parent has to be.
                if name not in modules and name.rpartition(".")[0] not in {"", *modules}:
                    yield self._unknown(name, sorted(modules), path)
                continue
            owned = [row for row in self.parameters if row[0] == name or row[0].rpartition(".")[0] == name]
            if not owned:
                yield self._unknown(name, sorted({*modules, *names}), path)
            for row, shape in owned:
                if (sentence := _misfit(row, shape, rule, vocab_size)) is not None:
                    yield InjectionProblem(sentence, path)

    def _rows(self) -> Iterator[InjectionProblem]:
        repeated = [name.count(LAYER) for name, _ in self.parameters]
        for (name, _), count in zip(self.parameters, repeated, strict=True):
            if count and (count > 1 or f".{LAYER}." not in name):
                yield InjectionProblem(
                    f"{name}: one {LAYER}, between two dots, stands for the number of the layer", ("parameters", name)
                )
        if not any(repeated):
            yield InjectionProblem(
                f"no parameter has a {LAYER}: those of the layers are listed once, as in layers.{LAYER}.wq.weight",
                ("parameters",),
            )
            return
        first, last = repeated.index(1) if 1 in repeated else 0, len(repeated) - 1 - repeated[::-1].index(max(repeated))
        prefix = self.parameters[first][0].partition(LAYER)[0]
        for name, _ in self.parameters[first : last + 1]:
            if not name.startswith(f"{prefix}{LAYER}"):
                yield InjectionProblem(
                    f"{name} stands between parameters of {prefix}{LAYER}: a module has one stack of layers, and its "
                    "rows stand together, in the order in which they are registered",
                    ("parameters", name),
                )

    @staticmethod
    def _unknown(name: str, known: list[str], path: tuple[str, ...]) -> InjectionProblem:
        near = closest(name, known)
        hint = f"did you mean {near}?" if near else "rules name a module or a parameter of the table"
        return InjectionProblem(f"{name} is in no row of model.parameters", path, hint, near)


def _misfit(name: str, shape: tuple[int, ...], rule: InjectionRule, vocab_size: int) -> str | None:
    """Why a rule does not fit a row; None when it does."""
    bias = name.endswith(".bias")
    if rule.kind == "partial":
        return None
    if rule.kind == "vocab":
        if shape[0] == vocab_size:
            return None
        return f"{name} has {shape[0]} rows, vocab_size is {vocab_size}"
    if bias or (name.endswith(".weight") and len(shape) == 2):
        size = shape[0] if rule.kind == "column" else shape[-1]
        whole = sum(rule.units)
        if whole and size % whole and not (bias and rule.kind == "row"):
            heads = " + ".join(map(str, rule.units))
            return f"{name} is split along {size} = {heads} heads: {size} / {whole} is not whole"
        return None
    return f'{name} {list(shape)}: "{rule.kind}" is for linears, whose weight is [out, in]'
