"""Which causal language models of the installed transformers the adapter takes; writes docs/models.md.

    python benchmarks/models.py > docs/models.md

For each model type that `AutoModelForCausalLM` can build: whether the compiler knows its parameters and the runtime
injects it, and if not, what stands in the way. Those that work are measured by tests/runtime/test_families.py.
"""

from __future__ import annotations

import contextlib
import io
import warnings

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from parcompile.model.families import FAMILIES
from parcompile.rules.runtime import RUNTIME_FAMILIES

INJECTED_STYLES = {
    "colwise",
    "colwise_gather_output",
    "packed_colwise",
    "rowwise",
    "rowwise_split_input",
    "packed_rowwise",
    "replicated_with_grad_allreduce",
    "moe_tp_experts",
}

HEAD = """# Models

Causal language models of transformers {version}, by model type.
Regenerate with `python benchmarks/models.py > docs/models.md`.

"works": in tp 2, cp 2 and tp 2 × cp 2 with sequence parallelism, two AdamW steps of a tiny model with its windows,
soft-caps, biases and norms switched on give the losses, gradient norms and parameters of the original in one process
within 1e-5 (`tests/runtime/test_families.py`). Everything else is refused: the compiler does not accept the model type
(rule S003), or the runtime refuses the plan (rule X004).

{works} of {all} model types work.

| model type | |
|---|---|
"""


def verdict(family: str) -> str:
    """One line on a model type."""
    if family in RUNTIME_FAMILIES:
        return "works"
    if family in FAMILIES:
        return "refused by the runtime (X004): it has no tensor-parallel plan that is injected; the compiler plans it"
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            plan = getattr(CONFIG_MAPPING[family], "base_model_tp_plan", None)
    except Exception as error:
        return f"refused: transformers cannot load its configuration here ({type(error).__name__})"
    if not plan:
        return "refused: transformers has no tensor-parallel plan for it"
    strange = sorted(set(plan.values()) - INJECTED_STYLES)
    if strange:
        return f"refused: its tensor-parallel plan has entries without a rule here ({', '.join(strange)})"
    return "refused: the compiler has no parameter table for it yet"


def main() -> None:
    """Prints the page."""
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    known = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *FAMILIES})
    lines = [f"| {family} | {verdict(family)} |" for family in known]
    works = sum(line.endswith("| works |") for line in lines)
    print(HEAD.format(version=transformers.__version__, works=works, all=len(known)) + "\n".join(lines))


if __name__ == "__main__":
    main()
