"""Which causal language models of the installed transformers the adapter takes; writes docs/models.md.

    python benchmarks/models.py > docs/models.md

For each model type that `AutoModelForCausalLM` can build: whether the compiler knows its parameters and the runtime
injects it, and if not, what stands in the way. Those that work are measured by

    python benchmarks/models.py --prove [FAMILY ...]

in tp 2, cp 2, tp 2 × cp 2 with sequence parallelism and pp 2, each against one process; most of them also by
tests/runtime/test_families.py.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from parcompile.model.families import FAMILIES
from parcompile.rules.x_runtime import RUNTIME_FAMILIES

INJECTED_STYLES = {
    "colwise",
    "colwise_gather_output",
    "packed_colwise",
    "rowwise",
    "rowwise_split_input",
    "packed_rowwise",
    "replicated_with_grad_allreduce",
    "moe_tp_experts",
    "mla_kv_a_proj",
}

PROVED = ("tp2", "cp2", "tp2 × cp2, sequence parallel", "pp2")

HEAD = """# Models

Causal language models of transformers {version}, by model type.
Regenerate with `python benchmarks/models.py > docs/models.md`.

"works": in tp 2, cp 2 and tp 2 × cp 2 with sequence parallelism, two AdamW steps of a tiny model with its windows,
soft-caps, biases and norms switched on give the losses, gradient norms and parameters of the original in one process
within 1e-5 (`python benchmarks/models.py --prove`; most of it is in `tests/runtime/test_families.py`). Everything else
is refused: the compiler does not accept the model type (rule S003), or the runtime refuses the plan (rule X004).

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
        return f"refused: {without_plan(family)}"
    strange = sorted(set(plan.values()) - INJECTED_STYLES)
    if strange:
        return f"refused: its tensor-parallel plan has entries without a rule here ({', '.join(strange)})"
    return "refused: the compiler has no parameter table for it yet"


def without_plan(family: str) -> str:
    """What else stands in the way of a model type for which transformers has no tensor-parallel plan."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
            attends = getattr(model, "_supports_attention_backend", False)
        except Exception as error:
            return f"transformers cannot load its model here ({type(error).__name__})"
    if not attends:
        return "its attention, if it has any, does not go through transformers' attention interface"
    return "transformers has no tensor-parallel plan for it, and the compiler no parameter table"


def prove(families: list[str]) -> int:
    """Runs each family in each layout and prints the largest relative differences; the number of those that fail."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime"))
    from family_runs import family_plan, train_injected, train_plain
    from ranks import run_ranks
    from test_families import LAYOUTS, TOLERANCE, relative
    from training_runs import whole_parameters

    expected, failed = {family: train_plain(family_plan(family, 1, {})) for family in families}, 0
    for layout, (world_size, parallelism, _) in LAYOUTS.items():
        if layout not in PROVED:
            continue
        plans = [family_plan(family, world_size, parallelism) for family in families]
        ranks = run_ranks(world_size, train_injected, plans, timeout=600)
        for place, family in enumerate(families):
            own, plain = [rank[place] for rank in ranks], expected[family]
            if "error" in own[0]:
                differences = [own[0]["error"]]
            else:
                whole = whole_parameters(plans[place], own)
                found = [max(relative(rank[key], plain[key]) for rank in own) for key in ("losses", "norms")]
                pairs = [(whole[name] - value, value) for name, value in plain["parameters"].items()]
                found.append(max(float(difference.norm() / value.norm()) for difference, value in pairs))
                failed += max(found) > TOLERANCE
                differences = [f"{value:.1e}" for value in found]
            failed += len(differences) == 1
            print(f"{family:20} {layout:30} {' '.join(differences)}", flush=True)
    return failed


def main() -> None:
    """Prints the page, or proves what it says."""
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["--prove"]:
        sys.exit(prove(sys.argv[2:] or list(RUNTIME_FAMILIES)))
    known = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *FAMILIES})
    lines = [f"| {family} | {verdict(family)} |" for family in known]
    works = sum(line.endswith("| works |") for line in lines)
    print(HEAD.format(version=transformers.__version__, works=works, all=len(known)) + "\n".join(lines))


if __name__ == "__main__":
    main()
