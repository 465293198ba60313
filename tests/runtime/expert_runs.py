"""Mixtures of experts in every combination of the axes, on live ranks and in one process."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from closeness import Margin, Noise, margins
from families import tiny_config
from ranks import run_ranks
from training_runs import compared, initial_model, make_plan, train_in_one_process, train_with_engine

from parcompile.model.families import FAMILIES
from parcompile.plan import Plan

STEPS = 3
AXES = ("tp", "cp", "pp", "ep", "dp")

MIXTRAL = tiny_config("mixtral", num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4)
DEEPSEEK = tiny_config("deepseek_v3", num_hidden_layers=4, first_k_dense_replace=1)
_DOUBLE_RING = {"cp_implementation": "double_ring", "hierarchical_cp_sizes": [2, 2]}
_BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
MODELS = {"mixtral": MIXTRAL, "deepseek_v3": DEEPSEEK}


class Case(NamedTuple):
    """A layout of one of the two models; `training` and `changes` (of the model) beside what all have."""

    model: str
    parallelism: dict[str, Any]
    training: dict[str, Any] = {}  # noqa: RUF012 -- never changed
    changes: dict[str, Any] = {}  # noqa: RUF012
    zero: int = 1

    @property
    def ranks(self) -> int:
        """Of the world: experts are laid over dp · cp."""
        return math.prod(self.parallelism.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))

    @property
    def text(self) -> str:
        """As a row of a table says it."""
        axes = " ".join(f"{axis}{self.parallelism[axis]}" for axis in AXES if self.parallelism.get(axis, 1) > 1)
        others = {name: value for name, value in self.parallelism.items() if name not in AXES}
        said = [f"{name} {value}" for name, value in _flat({**others, **self.training, **self.changes})]
        said += [f"ZeRO stage {self.zero}"] if self.zero != 1 else []
        return ", ".join([axes or "one rank", *(one.replace(" True", "") for one in said)])

    def plan(self) -> Plan:
        """The compiled plan."""
        config = MODELS.get(self.model) or tiny_config(self.model)
        whole = {key: value for key, value in {**config, **self.changes}.items() if value is not None}
        # Adam turns a gradient that is rounding noise into a full step: a large epsilon does not.
        training = {"micro_batch_size": 1, "optimizer": {"lr": 1e-3, "eps": 1e-4}, **self.training}
        extra = {"zero": {"stage": self.zero}}
        return make_plan(self.ranks, self.parallelism, model=whole, whole_model=True, training=training, extra=extra)


def _flat(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        yield from value.items() if isinstance(value, dict) else [(name, value)]


def subsets() -> list[Case]:
    """Every subset of the axes, each of size 2, that a plan can name and 8 ranks can run, for both models."""
    found = []
    for size in range(len(AXES) + 1):
        for axes in itertools.combinations(AXES, size):
            sizes = dict.fromkeys(axes, 2)
            if "ep" in axes and not {"cp", "dp"} & set(axes):
                continue  # experts are laid over dp · cp
            found += [Case(model, sizes) for model in MODELS]
    return [case for case in found if case.ranks <= 8]


def further() -> list[Case]:
    """Each way of context parallelism, sequence parallelism, recomputation, larger ep and what else meets experts."""
    return [
        *(Case("mixtral", {"cp": 2, "ep": 2, "cp_implementation": name}) for name in ("ulysses", "all_gather")),
        Case("mixtral", {"cp": 4, "ep": 2, "cp_implementation": "usp"}),
        Case("deepseek_v3", {"cp": 4, "ep": 4, "cp_layout": "striped", **_DOUBLE_RING}),
        Case("mixtral", {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}),
        Case("deepseek_v3", {"tp": 2, "cp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}),
        Case("deepseek_v3", {"tp": 2, "cp": 2, "ep": 2, "sequence_parallel": True}, {"sequence_length": 20}),
        Case("mixtral", {"tp": 2, "dp": 2, "ep": 4, "expert_tp": 1}),
        Case("mixtral", {"tp": 2, "dp": 2, "ep": 2, "expert_tp": 1}, zero=2),
        Case("gpt_oss", {"tp": 2, "dp": 2, "ep": 4, "expert_tp": 1}),
        Case("llama4_text", {"tp": 2, "dp": 2, "ep": 4, "expert_tp": 1}),
        Case("llama4_text", {"pp": 2, "cp": 2, "ep": 2}, {"activation_checkpointing": "full"}),
        Case("deepseek_v3", {"tp": 2, "cp": 2, "ep": 4, "expert_tp": 1, "sequence_parallel": True}),
        Case("deepseek_v3", {"tp": 2, "cp": 2, "dp": 2, "ep": 4, "expert_tp": 1}),
        Case("deepseek_v3", {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "expert_tp": 1, "sequence_parallel": True}),
        Case("mixtral", {"dp": 4, "ep": 4}),
        Case("deepseek_v3", {"dp": 4, "ep": 2}),
        Case("deepseek_v3", {"cp": 2, "dp": 4, "ep": 8}),
        Case("deepseek_v3", {"cp": 2, "dp": 4, "ep": 4, "order": "tp-cp-dp-ep-pp"}),
        Case("mixtral", {"dp": 2, "ep": 2}, {"activation_checkpointing": "full"}),
        Case("deepseek_v3", {"tp": 2, "dp": 2, "ep": 2}, {"activation_checkpointing": "full"}),
        Case("deepseek_v3", {"pp": 2, "dp": 2, "ep": 2}, {}, {"first_k_dense_replace": 2}),
        Case("mixtral", {"pp": 2, "cp": 2, "ep": 2, "virtual_pipeline_model_parallel_size": 2}),
        Case("mixtral", {"pp": 2, "cp": 2, "ep": 2}, {"micro_batch_size": 4}, _BALANCED),
        Case("mixtral", {"cp": 2, "ep": 2}, {"micro_batch_size": 4}, _BALANCED),
        Case("mixtral", {"dp": 2, "ep": 2}, {"global_batch_size": 8, "micro_batch_size": 2}),
        Case("mixtral", {"dp": 4, "ep": 2}, zero=0),
        Case("deepseek_v3", {"tp": 2, "cp": 2, "dp": 2, "ep": 4}, zero=0),
        Case("deepseek_v3", {"pp": 2, "dp": 2, "ep": 2}, {}, {"first_k_dense_replace": 2}, zero=0),
        Case("mixtral", {"dp": 4, "ep": 2}, zero=2),
        Case("deepseek_v3", {"tp": 2, "cp": 2, "dp": 2, "ep": 4}, zero=2),
    ]


def families() -> list[Case]:
    """Every family with experts, in one layout. Phi-MoE draws its experts at random, and not as plain torch does."""
    layout = {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}
    with_experts = [
        name for name, family in FAMILIES.items() if family.experts is not None and "ep" not in family.refused_axes
    ]
    # A number outside the tiny vocabulary is the default of some.
    outside = ("flex_olmo", "kimi_linear", "bailing_hybrid", "dots3_note_text", "glm5_next_text")
    changes = {name: {"pad_token_id": 1} for name in outside}
    names = [name for name in with_experts if name not in {*MODELS, "phimoe"}]
    # It has none unless they are switched on.
    names = ["gemma4_text, experts" if name == "gemma4_text" else name for name in names]
    return [Case(name, layout, {}, changes.get(name, {})) for name in names]


def compare(case: Case, *, steps: int = STEPS, built: Any = initial_model) -> list[Margin]:
    """How far live ranks are from one process."""
    plan = case.plan()
    ranks = run_ranks(case.ranks, train_with_engine, plan, not _balances(case), steps, 0.0, built)
    for rank in ranks[1:]:
        assert rank["losses"] == ranks[0]["losses"], "the ranks differ in the loss"
        assert rank["norms"] == ranks[0]["norms"], "the ranks differ in the norm"
    masked = not _balances(case)
    return compared(
        plan,
        ranks,
        lambda seed: train_in_one_process(plan, masked=masked, steps=steps, built=built, seed=seed),
    )


def _balances(case: Case) -> bool:
    """Padding counts in the balancing loss, and labels that are masked do not mask it: no label is masked then."""
    return bool(case.changes.get("output_router_logits"))


def one_sided(plan: Plan) -> torch.nn.Module:
    """Its routers choose among the first half of the experts only: with ep 2 no token goes to the second rank."""
    model = initial_model(plan)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer[: len(buffer) // 2] += 100
    return model


RESUMED = [
    Case("deepseek_v3", parallelism)
    for parallelism in (
        {},
        {"tp": 2},
        {"dp": 2, "ep": 2},
        {"cp": 2, "ep": 2},
        {"dp": 4, "ep": 2},
        {"dp": 4, "ep": 4},
        {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True},
        {"cp": 2, "dp": 2, "ep": 4},
        {"pp": 2, "dp": 2, "ep": 2},
        {"tp": 2, "pp": 2, "cp": 2, "ep": 2},
    )
]
"""Layouts between which runs go on, each to each."""


def resumed(case: Case, others: Sequence[Case] = tuple(RESUMED), *, saved: int = 1) -> list[Margin]:
    """How far losses and norms are from an uninterrupted run when each of `others` goes on: the worst of each."""
    from test_checkpoint import train

    with tempfile.TemporaryDirectory() as folder:
        whole = run_ranks(case.ranks, train, case.plan(), None, STEPS, {saved: folder})[0]
        found, noise = [], Noise(lambda seed: train_in_one_process(case.plan(), steps=STEPS, seed=seed))
        for other in others:
            part = run_ranks(other.ranks, train, other.plan(), folder, STEPS)[0]
            pair = ({key: one[key][saved - STEPS :] for key in ("losses", "norms")} for one in (part, whole))
            found.append(max(margins(*pair, rerun=noise), key=lambda one: one.ratio))
    return found
