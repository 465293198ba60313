"""A module of the user: tp divides what its rules cut."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.layout.grid import Axis
from parcompile.spec.resolve import Resolution

from .arithmetic import listed, nearest_divisors
from .places import also
from .registry import Finding, rule
from .s_module import MODULE
from .t_tensor import tp_fixes

_TP = ("parallelism", "tp")
_UNEVEN = {"embed.weight": [1024, 64], "layers.*.up.weight": [258, 64], "head.weight": [1024, 64]}


@rule(
    "T011",
    "a module's weight does not divide over tp",
    """A linear is split evenly: what "column" or "row" splits has to be a multiple of tp. Heads are never split; fewer
    kv heads than ranks are replicated, other fused parts are not.""",
    wrong={
        "model": {
            **MODULE,
            "parameters": _UNEVEN,
            "injection": {"embed": "vocab", "layers.*.up": "column", "layers.*.core": "attention", "head": "vocab"},
        },
        "parallelism": {"tp": 4},
    },
    right={"model": MODULE, "parallelism": {"tp": 4}},
)
def module_divides(spec: Resolution) -> Iterator[Finding]:
    """Fires for each rule whose parts tp does not divide."""
    shape, tp = spec.shape, spec.axis(Axis.TP)
    if shape.user_module is None:
        return
    splits = [parameter.split for parameter in spec.parameters if parameter.split]
    cut = [part.units for split in splits for part in split.parts if not split.pads_vocabulary]
    near = nearest_divisors(tp, shape.num_attention_heads, *cut, count=4)
    reported = set()
    for parameter in spec.parameters:
        if parameter.split is None or parameter.split.pads_vocabulary:
            continue
        row = parameter.name.replace("{layer}", "*")
        name = row if row in dict(shape.user_module.injection) else row.rpartition(".")[0]
        # What rules T001 and T002 say of the heads is not said again.
        heads = (shape.num_attention_heads, shape.num_key_value_heads)
        for part in parameter.split.parts:
            if part.units % tp == 0 or name in reported or (part.units != part.size and part.units in heads):
                continue
            reported.add(name)
            what = f"{part.size}" if part.units == part.size else f"{part.units} heads"
            yield Finding(
                f"{row} is split along {what} on tp {tp}: {part.units} / {tp} is not whole; "
                f"nearest tp: {listed(near[:2])}",
                ("model", "injection", name),
                help="choose another tp, or remove the rules of the row and its columns to hold them whole",
                fixes=tp_fixes(spec, near),
                related=also(spec, _TP),
            )
