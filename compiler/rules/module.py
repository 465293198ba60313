"""A module of one's own: its rules fit its parameters, and tp divides what they cut."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Safety
from parcompile.model.hf_config import InjectionError, shape_from_config
from parcompile.resolve import Resolution, Unavailable

from .arithmetic import listed, nearest_divisors
from .places import also
from .registry import Finding, rule
from .tensor import tp_fixes

_TP = ("parallelism", "tp")
_ROWS = {
    "embed.weight": [1024, 64],
    "layers.*.attention.wq.weight": [64, 64],
    "layers.*.attention.wo.weight": [64, 64],
    "head.weight": [1024, 64],
}
_RULES = {
    "embed": "vocab",
    "layers.*.attention": "attention",
    "layers.*.attention.wq": "column",
    "layers.*.attention.wo": "row",
    "head": "vocab",
}
_MODULE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "parameters": _ROWS,
    "injection": _RULES,
}
_UNEVEN = {"embed.weight": [1024, 64], "layers.*.up.weight": [258, 64], "head.weight": [1024, 64]}


@rule(
    "S008",
    "an injection rule does not fit the module",
    """Each rule names a module or a parameter of model.parameters; "column" and "row" are for linears (weight
    [out, in]), "vocab" for tables of vocab_size rows, "attention" for the modules that attend. Rows of the layers stand
    together, with * in the place of their number.""",
    wrong={"model": {**_MODULE, "injection": {**_RULES, "layers.*.attention.wk": "column"}}},
    right={"model": _MODULE},
)
def rules_fit_the_module(spec: Resolution) -> Iterator[Finding]:
    """Fires for every rule and row that does not fit."""
    try:
        shape_from_config(spec.model_config)
    except InjectionError as error:
        for problem in error.problems:
            path, meant = ("model", *problem.path), problem.rename_to
            fixes: tuple[Fix, ...] = ()
            if meant is not None and meant not in spec.get("model", "injection"):
                fixes = (Fix(f"rename {path[-1]} to {meant}", Safety.CHANGES_COST, (Edit(path, rename_to=meant),)),)
            yield Finding(problem.message, path, help=problem.help, fixes=fixes)
    except ValueError:
        raise Unavailable("model") from None


@rule(
    "T011",
    "a module's weight does not divide over tp",
    """A linear is cut evenly: what "column" or "row" cuts has to be a multiple of tp. Heads are never cut; fewer kv
    heads than ranks are replicated, other fused parts are not.""",
    wrong={
        "model": {
            **_MODULE,
            "parameters": _UNEVEN,
            "injection": {"embed": "vocab", "layers.*.up": "column", "layers.*.core": "attention", "head": "vocab"},
        },
        "parallelism": {"tp": 4},
    },
    right={"model": _MODULE, "parallelism": {"tp": 4}},
)
def module_divides(spec: Resolution) -> Iterator[Finding]:
    """Fires for each rule whose parts tp does not divide."""
    shape, tp = spec.shape, spec.axis("tp")
    if shape.own is None:
        return
    splits = [parameter.split for parameter in spec.parameters if parameter.split]
    cut = [part.units for split in splits for part in split.parts if not split.pads_vocabulary]
    near = nearest_divisors(tp, shape.num_attention_heads, *cut, count=4)
    reported = set()
    for parameter in spec.parameters:
        if parameter.split is None or parameter.split.pads_vocabulary:
            continue
        row = parameter.name.replace("{layer}", "*")
        name = row if row in dict(shape.own.injection) else row.rpartition(".")[0]
        # What rules T001 and T002 say of the heads is not said again.
        heads = (shape.num_attention_heads, shape.num_key_value_heads)
        for part in parameter.split.parts:
            if part.units % tp == 0 or name in reported or (part.units != part.size and part.units in heads):
                continue
            reported.add(name)
            what = f"{part.size}" if part.units == part.size else f"{part.units} heads"
            yield Finding(
                f"{row} is cut along {what} on tp {tp}: {part.units} / {tp} is not whole; "
                f"nearest tp: {listed(near[:2])}",
                ("model", "injection", name),
                help="choose another tp, or leave out the rules of a row and of its columns: they are then held whole",
                fixes=tp_fixes(spec, near),
                related=also(spec, _TP),
            )
