"""Optimizers and schedules: DeepSpeed constructs a class with `params`, so an unknown one stops the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from parcompile.backends.deepspeed.table import at, classes, facts, order
from parcompile.diagnostics import Path
from parcompile.schema.keys import Places, choice, unknown_key
from parcompile.schema.values import Findings, quoted
from parcompile.user_files import shipped

ADAM = ("adam", "adamw")
SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_STORED = shipped(__package__, "constructors.json")
CLASSES: Mapping[str, Mapping[str, str]] = _STORED["optimizers"]
"""How the name of each optimizer is written, and its classes; those from the package mup are not known here."""
_PASSED: Mapping[str, Sequence[str]] = _STORED["passed"]
"""Parameters that the engine passes itself: given twice, they stop the start."""


class Constructor(NamedTuple):
    """A class and the parameters that it takes. What a lenient one does not know, nobody looks at."""

    name: str
    takes: tuple[str, ...]
    requires: tuple[str, ...] = ()
    lenient: bool = False


def optimizers(version: str) -> tuple[str, ...]:
    """DeepSpeed's own optimizers in a known version, in lower case."""
    return tuple(at(facts()["optimizers"], version))


def torch_classes(module: str) -> Mapping[str, Mapping[str, Any]]:
    """The constructors of torch's `optim` or `lr_scheduler`."""
    found = facts()["torch"][module]
    assert isinstance(found, dict)
    return found


def on_host(tree: Mapping[str, Any]) -> bool:
    """Whether the optimizer steps on the host."""
    zero = tree.get("zero_optimization")
    offload = zero.get("offload_optimizer") if isinstance(zero, dict) else None
    if isinstance(zero, dict) and zero.get("cpu_offload") is True:
        return True
    return isinstance(offload, dict) and offload.get("device") in ("cpu", "nvme")


def optimizer(tree: Mapping[str, Any], version: str) -> Constructor | None:
    """The class that DeepSpeed makes the optimizer of; None when that cannot be told."""
    section = tree.get("optimizer")
    kind = section.get("type") if isinstance(section, dict) else None
    if not isinstance(kind, str):
        return None
    params = section.get("params") if isinstance(section, dict) else None
    low = kind.lower()
    if low not in optimizers(version):
        return _of_torch("optim", kind)
    if "class" not in CLASSES[low]:
        return None
    engine = tuple(classes(version)["engine"]) if low in (*ADAM, "muon") else ()
    if low in ADAM and isinstance(params, dict) and params.get("torch_adam") and params["torch_adam"] != "auto":
        name = "AdamW" if low == "adamw" or params.get("adam_w_mode", True) else "Adam"
        found = _of_torch("optim", name)
        return found and Constructor(found.name, tuple(dict.fromkeys((*found.takes, *engine))))
    if low == "adagrad" and not on_host(tree):
        return _of_torch("optim", "Adagrad")
    name = CLASSES[low].get("on_host" if on_host(tree) else "class", CLASSES[low]["class"])
    known = classes(version).get(name)
    if known is None:
        return None
    takes = [one for one in known if one not in _PASSED.get(name, ())]
    if low != "muon" and "foreach" in engine:
        engine = tuple(one for one in engine if one != "foreach")
    return Constructor(name, tuple(dict.fromkeys((*takes, *engine))), lenient=low == "muon")


def schedule(tree: Mapping[str, Any], version: str) -> Constructor | None:
    """The class that DeepSpeed makes the schedule of; None when that cannot be told."""
    section = tree.get("scheduler")
    kind = section.get("type") if isinstance(section, dict) else None
    if not isinstance(kind, str):
        return None
    known = classes(version).get(kind)
    if known is None:
        return _of_torch("lr_scheduler", kind)
    return Constructor(kind, tuple(known), tuple(name for name, one in known.items() if one.get("required")))


def _of_torch(module: str, name: str) -> Constructor | None:
    known = torch_classes(module).get(name)
    if known is None:
        return None
    takes = tuple(one for one in known if one != "**")
    return Constructor(f"torch's {name}", takes, tuple(one for one in takes if known[one].get("required")))


def wrong_parameters(findings: Findings, version: str, path: Path, places: Places) -> None:
    """What the class of an optimizer (`path` optimizer.params) or a schedule does not take, and what it needs."""
    tree, holder = findings.tree, findings.value(path)
    assert isinstance(tree, dict)
    found = optimizer(tree, version) if path[0] == "optimizer" else schedule(tree, version)
    if found is None or not isinstance(holder, dict):
        return
    for name in holder:
        if name not in found.takes:
            if name == "max_grad_norm":
                message = "max_grad_norm is no parameter of an optimizer in DeepSpeed, which refuses it"
                advice = 'write it at the top level as "gradient_clipping"'
                findings.say("K001", (*path, name), message, advice, at_key=True)
                continue
            consequence = (
                f": {found.name} does not take it" if not found.lenient else f": {found.name} never looks at it"
            )
            unknown_key((*path, name), found.takes, holder, findings, places, consequence=consequence)
    for name in found.requires:
        if name not in holder:
            message = f"{found.name} needs {quoted(name)}"
            findings.say("K002", (*path, name), message, f"add {quoted(name)}")


def wrong_type(findings: Findings, version: str, path: Path, kind: str) -> None:
    """An optimizer or a schedule that there is not."""
    if path[0] == "optimizer":
        names, torch = [CLASSES[one]["written"] for one in optimizers(version)], torch_classes("optim")
        if kind.lower() in optimizers(version) or kind in torch:
            return
        ended = removal(kind)
        if ended is not None:
            does = "refuses" if order(version) >= order(ended[1]) else "does not know"
            message = f"{kind} was removed in DeepSpeed {ended[1]}: {version} {does} it"
            if order(version) < order(ended[0]):
                message = f"{kind} is there since DeepSpeed {ended[0]}: {version} refuses it"
            findings.say("K010", path, message, "write AdamW, or use a version that has it")
            return
    else:
        torch = torch_classes("lr_scheduler")
        names = [name for name in classes(version) if name in SCHEDULES]
        if kind in torch or kind in names:
            return
    last = kind.rpartition(".")[2]
    if last != kind and (last in torch or last in names):
        message = f"{path[0]}.type: DeepSpeed takes the name of a class, not its path {quoted(kind)}"
        findings.say("K004", path, message, f"write {quoted(last)}")
        return
    choice(path, kind, [*names, *torch], [{"type": "string"}], findings)


def wrong_paths(findings: Findings, path: Path) -> None:
    """Classes of modules that DeepSpeed imports by their paths, and cannot: a name alone has no module."""
    classes_ = findings.value(path)
    for number, name in enumerate(classes_ if isinstance(classes_, list) else ()):
        if isinstance(name, str) and not all(name.rpartition(".")[::2]):
            message = f"{path[-1]}: {quoted(name)} has no module, and DeepSpeed imports classes by their paths"
            findings.say("K004", (*path, number), message, f"write {quoted(f'torch.nn.{name}')}, say")


def removal(kind: str) -> tuple[str, str] | None:
    """The first version with an optimizer and the first one without it again; None for one that is still there."""
    entry = facts()["optimizers"]
    stretches = entry if isinstance(entry[0], list) else [["", entry]]
    having = [first for first, names in stretches if kind.lower() in names]
    if not having:
        return None
    after = [first for first, names in stretches if order(first) > order(having[-1]) and kind.lower() not in names]
    return (having[0], after[0]) if after else (having[0], "999")
