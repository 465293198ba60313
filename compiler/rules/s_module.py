"""A user module: its rules fit its parameters, and tp divides what they cut."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Safety
from parcompile.model.hf_config import InjectionError, shape_from_config
from parcompile.spec.resolve import Resolution, Unavailable

from .registry import Finding, rule

_TP = ("parallelism", "tp")
_ROWS = {
    "embed.weight": [1024, 64],
    "layers.*.attention.wq.weight": [64, 64],
    "layers.*.attention.wo.weight": [64, 64],
    "head.weight": [1024, 64],
}
RULES = {
    "embed": "vocab",
    "layers.*.attention": "attention",
    "layers.*.attention.wq": "column",
    "layers.*.attention.wo": "row",
    "head": "vocab",
}
MODULE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "parameters": _ROWS,
    "injection": RULES,
}


@rule(
    "S008",
    "an injection rule does not fit the module",
    """Each rule names a module or a parameter of model.parameters; "column" and "row" are for linears (weight
    [out, in]), "vocab" for tables of vocab_size rows, "attention" for the modules that attend. Rows of the layers stand
    together, with * in the place of their number.""",
    wrong={"model": {**MODULE, "injection": {**RULES, "layers.*.attention.wk": "column"}}},
    right={"model": MODULE},
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
