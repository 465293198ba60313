"""Text of artefacts with the same bytes on every machine, variables of ranks, and what a target cannot express."""

from __future__ import annotations

import enum
import functools
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

from parcompile.layout.shards import is_decayed
from parcompile.machines import find_accelerator
from parcompile.model.derived_rows import parameter_table
from parcompile.plan import Plan
from parcompile.spec import Parallelism, Spec
from parcompile.units import first_of
from parcompile.user_files import shipped, shipped_text

from .statements import Facts, Row, Values, filled, holds, made, rows_of

# JSON as it is written: the same bytes on every machine, short things on one line.

WIDTH = 120
"""Columns up to which a list or a small object stays on one line."""


def to_text(tree: object) -> str:
    """JSON with two spaces of indentation, keys in the order of the tree.

    Raises:
        ValueError: a number is not finite.
    """
    return _render(tree, 0) + "\n"


def _render(node: object, indent: int) -> str:
    if isinstance(node, dict) and node:
        parts = [f"{_scalar(str(key))}: {_render(value, indent + 2)}" for key, value in node.items()]
        return _joined(parts, "{", "}", indent, one_line=indent > 0)
    if isinstance(node, (list, tuple)) and node:
        if all(type(item) is int for item in node):
            return json.dumps(node)
        return _joined([_render(item, indent + 2) for item in node], "[", "]", indent, one_line=True)
    return _scalar(node)


def _joined(parts: list[str], start: str, stop: str, indent: int, *, one_line: bool) -> str:
    line = ", ".join(parts)
    if one_line and len(line) + indent + 2 <= WIDTH and "\n" not in line:
        return start + line + stop
    space = " " * (indent + 2)
    return f"{start}\n" + ",\n".join(space + part for part in parts) + f"\n{' ' * indent}{stop}"


def _scalar(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair, which JSON can escape, has no UTF-8.
    is_whole = text.isascii() or text.encode(errors="ignore").decode() == text
    return text if is_whole else json.dumps(value)


# Who wrote an artefact: the lines that stand at the head of files which are not JSON.


def header(plan: Plan, about: str) -> str:
    """Comment lines with the plan's identity.

    The name is written as a JSON string: quotes and control characters of it are escaped, so it cannot end the comment.
    """
    name = json.dumps(plan.spec.name, ensure_ascii=True)
    identity = f"parcompile {plan.compiler_version}, spec {plan.spec_hash}"
    return f"# {about}\n# plan {name}, {plan.world_size} ranks\n# {identity}"


def from_template(name: str, plan: Plan, about: str = "", **more: object) -> str:
    """A file of `templates/`: a name in capitals between two @ stands for a value of the plan, or one of `more`."""
    sizes = {"NODES": plan.spec.cluster.nodes, "RANKS": plan.spec.cluster.gpus_per_node, "WORLD": plan.world_size}
    exports = "\n".join(f"# {one.why}\nexport {one.name}={shlex.quote(one.value)}" for one in variables(plan))
    values = {**sizes, "HEADER": header(plan, about), "EXPORTS": exports, **more}
    text = shipped_text("parcompile.backends", f"templates/{name}.txt")
    return re.sub("@([A-Z_]+)@", lambda match: str(values[match[1]]), text)


def slug(name: str) -> str:
    """The name as a DNS label: lower-case letters, digits and single hyphens, as Kubernetes and Slurm take them."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50].rstrip("-") or "unnamed"


@dataclass(frozen=True, slots=True)
class Loss:
    """Something that the target does differently. With a `fatal` one it cannot run the layout, and gets no files."""

    what: str
    why: str
    instead: str
    fatal: bool = False


def effective_order(parallelism: Parallelism) -> tuple[str, ...]:
    """The axes larger than 1, innermost first: the others stand nowhere."""
    sizes = {"tp": parallelism.tp, "cp": parallelism.cp, "dp": parallelism.dp, "pp": parallelism.pp}
    return tuple(axis for axis in parallelism.order if sizes.get(axis, 1) > 1)


def _follows(spec: Spec, known: str) -> bool:
    """Whether the axes stand in an order, such as "tp_cp_dp_pp"."""
    here = effective_order(spec.parallelism)
    return here == tuple(axis for axis in known.split("_") if axis in here)


def _decayed_otherwise(spec: Spec, left_out: str) -> list[str]:
    """The parameters that a tool decays and the plan does not, or the other way round; the tool leaves out these."""
    own, theirs = spec.training.optimizer.no_weight_decay, None if left_out == "none" else left_out
    table = parameter_table(spec.model.shape)
    return [row.name for row in table if is_decayed(row, own) is not is_decayed(row, theirs)]


def _recomputed(spec: Spec) -> str:
    kind = spec.training.activation_checkpointing
    return kind if isinstance(kind, str) else ", ".join(kind)


def end_of_schedule(spec: Spec) -> int | None:
    """The step at whose end a rate that falls has arrived at its lowest; None where none is given."""
    schedule, steps = spec.training.lr_scheduler, spec.training.train_steps
    return steps if schedule is None else schedule.end(steps)


_FACTS: Facts = {
    "follows.": _follows,
    "decayed_otherwise.": _decayed_otherwise,
    "order": lambda spec: "-".join(effective_order(spec.parallelism)),
    "recomputed": _recomputed,
    "recomputes_alike": lambda spec: isinstance(spec.training.activation_checkpointing, str),
}


def losses_of(name: str, spec: Spec, facts: Facts = _FACTS) -> Iterator[Loss]:
    """What `losses.json` has by this name, of a spec; `facts` are what its expressions read beside the spec."""
    values = Values(spec, {**_FACTS, **facts}, functools.partial(value_of, spec))
    for row in _rows(name):
        if holds(row, values):
            what, why, instead = (filled(row[key], values, _FORMATS) for key in ("what", "why", "instead"))
            yield Loss(what, why, instead, fatal=row.get("fatal", False))


@functools.cache
def _rows(name: str) -> tuple[Row, ...]:
    table = shipped("parcompile.backends", "losses.json")
    return tuple(rows_of(table[name], {}, table))


_FORMATS: Mapping[str, Callable[[Any], str]] = {"first two": lambda names: first_of(names, 2), "and": " and ".join}


def value_of(spec: Spec, name: str) -> Any:
    """A value of a spec by its path, where "shape" is the model's; enumerations as their text."""
    node: Any = spec
    for step in name.replace("shape.", "model.shape.").split("."):
        node = node.get(step) if isinstance(node, Mapping) else getattr(node, step, None)
    return node.value if isinstance(node, enum.Enum) else node


def file_tree(name: str, plan: Plan, facts: Facts = _FACTS) -> Any:
    """What `files.json` has by this name, with the values of a plan; `facts` are what it reads beside them."""
    of_plan: Facts = {
        "plan.": lambda _spec, key: getattr(plan, key),
        "tree.": lambda _spec, part: file_tree(part, plan, facts),
        "slug": lambda spec: slug(spec.name),
    }
    return tree_of(name, plan.spec, {**of_plan, **facts})


def tree_of(name: str, spec: Spec, facts: Facts = _FACTS) -> Any:
    """The same of a spec."""
    values = Values(spec, {**_FACTS, **facts}, functools.partial(value_of, spec))
    return made(shipped("parcompile.backends", "files.json")[name], values)


def option_names(name: str) -> tuple[str, ...]:
    """All options that `files.json` has by this name."""
    return tuple(_keys(shipped("parcompile.backends", "files.json")[name]))


def _keys(tree: Mapping[str, Any]) -> Iterator[str]:
    for key, value in tree.items():
        if key.startswith("..."):
            yield from _keys(value["is"])
        else:
            yield key


def yaml_file(plan: Plan, about: str, tree: Any, dumper: type[yaml.SafeDumper] = yaml.SafeDumper) -> str:
    """A tree as YAML, with the plan's identity at its head."""
    return f"{header(plan, about)}\n{yaml.dump(tree, Dumper=dumper, sort_keys=False)}"


class Variable(NamedTuple):
    """An environment variable and the reason for it."""

    name: str
    value: str
    why: str


def variables(plan: Plan) -> tuple[Variable, ...]:
    """What every rank of the plan needs in its environment, in a fixed order."""
    facts: Facts = {
        "starts_kernels_in_turn": lambda spec: find_accelerator(spec.cluster.accelerator).starts_kernels_in_turn
    }
    values = Values(plan.spec, facts, functools.partial(value_of, plan.spec))
    rows = shipped("parcompile.backends", "files.json")["variables"]
    return tuple(Variable(row["name"], row["value"], row["why"]) for row in rows if holds(row, values))


def gpu_resource(plan: Plan) -> str | None:
    """The Kubernetes resource that stands for one accelerator; None on CPUs."""
    accelerator = plan.spec.cluster.accelerator
    return None if accelerator == "cpu" else f"{find_accelerator(accelerator).vendor}.com/gpu"
