"""Contract: an injected model takes what tokenizers, collators and trainers give a model of transformers.

Whole sequences with an attention mask, padded on the right or not, and labels that nobody has shifted. Two AdamW steps
in fp32: loss, gradient norm and parameters are those of transformers in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from closeness import assert_close
from family_runs import batch_of, family_plan, of_plan, train_on, train_plain
from ranks import run_ranks
from torch import Tensor
from training_runs import whole_parameters

from parcompile.plan import Plan

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {},
    "phi3": {},
    "gpt2": {},
    "opt": {},
    "bloom": {},
    "deepseek_v3": {},
    "mixtral": BALANCED,
    "qwen3_moe": BALANCED,
    "gpt_oss": {},
    "mamba2": {},
    "falcon_mamba": {},
    "jamba": {},
    "lfm2": {},
    "minimax": {},
}
"""Windows, learned positions, positions from the mask, biases by distance, latent attention, experts with a loss that
balances them, states of several kinds, convolutions."""
LENGTHS = torch.tensor([16, 9])


def batch(plan: Plan, *, padded: bool) -> dict[str, Tensor]:
    """As a collator gives it: rows as long as their longest, where a rank holds whole ones."""
    given = batch_of(plan)
    if not padded and plan.spec.parallelism.cp == 1:
        given = {name: one[:, :13] for name, one in given.items()}
    mask = torch.ones_like(given["input_ids"])
    if padded:
        mask = (torch.arange(16) < LENGTHS[:, None]).long()
    return {**given, "labels": given["labels"].masked_fill(mask == 0, -100), "attention_mask": mask}


def as_given(whole: dict[str, Tensor], _: Any) -> dict[str, Tensor]:
    return whole


def parts(whole: dict[str, Tensor], mesh: Any) -> dict[str, Tensor]:
    """This cp rank's tokens, with labels that were split before they were shifted."""
    from parcompile.runtime.ring_attention import split_sequence

    layout, cp, rank = mesh.plan.spec.parallelism.cp_layout, mesh.size("cp"), mesh.index("cp")
    return {name: split_sequence(one, 1, layout, cp, rank) for name, one in whole.items()}


FORMS: dict[str, Callable[..., dict[str, Tensor]]] = {"whole": as_given, "parts": parts}
LAYOUTS: dict[str, tuple[int, dict[str, Any], str, tuple[str, ...]]] = {
    "tp2, sequence parallel": (2, {"tp": 2, "sequence_parallel": True}, "whole", (*FAMILIES,)),
    "cp2, whole sequences": (2, {"cp": 2}, "whole", (*FAMILIES,)),
    "cp2, contiguous, parts": (2, {"cp": 2, "cp_layout": "contiguous"}, "parts", ("llama", "mixtral", "mamba2")),
    "cp4, zigzag, parts": (4, {"cp": 4, "cp_layout": "zigzag"}, "parts", ("llama", "mixtral", "opt", "gemma3_text")),
    "cp2, striped, parts": (2, {"cp": 2, "cp_layout": "striped"}, "parts", ("llama", "mixtral", "gpt2")),
    "pp2": (2, {"pp": 2}, "whole", ("llama", "mixtral", "gpt2", "bloom", "falcon_mamba", "lfm2")),
    "pp2 x cp2, parts": (4, {"pp": 2, "cp": 2}, "parts", ("llama", "mixtral", "opt")),
    "tp2 x cp2, sequence parallel": (4, {"tp": 2, "cp": 2, "sequence_parallel": True}, "whole", ("llama", "mixtral")),
}


def train(rank: int, plans: list[Plan], form: str) -> list[list[dict[str, Any]]]:
    from parcompile.runtime import join

    mesh, found = join(max(plans, key=lambda plan: len(plan.groups.names))), []
    for plan in plans:
        found.append([])
        for padded in (True, False):
            try:
                _, said = train_on(plan, of_plan(mesh, plan), whole=batch(plan, padded=padded), split=FORMS[form])
                found[-1].append({"rank": rank, **said})
            except Exception as error:
                found[-1].append({"rank": rank, "error": f"{type(error).__name__}: {error}"})
    found.append([{"said": _said(mesh, plans[0], wrong)} for wrong in (13, 16 // mesh.size("cp"))])
    return found


def _said(mesh: Any, plan: Plan, length: int) -> str:
    """What a rank says of whole rows of another length than the plan's."""
    from parcompile.runtime import RunError
    from parcompile.runtime.data import ready_inputs

    try:
        ready_inputs({name: one[:, :length] for name, one in batch(plan, padded=True).items()}, of_plan(mesh, plan))
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_and_labels_as_collators_give_them_train_as_in_transformers(layout: str) -> None:
    size, parallelism, form, families = LAYOUTS[layout]
    plans = [family_plan(family, size, parallelism, **FAMILIES[family]) for family in families]
    ranks = run_ranks(size, train, plans, form, timeout=580)
    wrong = []
    for place, plan in enumerate(plans):
        for kind, padded in enumerate((True, False)):
            here = [rank[place][kind] for rank in ranks]
            if errors := [one["error"] for one in here if "error" in one]:
                wrong.append((plan.spec.name, padded, errors[0]))
                continue
            rerun = partial(_plain, plan, padded)
            found = {**{key: here[0][key] for key in ("losses", "norms")}, "parameters": whole_parameters(plan, here)}
            assert_close(found, rerun(None), rerun=rerun, about=f"{plan.spec.name}, {padded=}")
    assert not wrong
    other, same = ([rank[-1][kind]["said"] for rank in ranks] for kind in (0, 1))
    if "cp" in parallelism:
        assert all("called with 13 tokens: under cp" in said for said in other)
        assert all("was given the same" in said for said in same)


def _plain(plan: Plan, padded: bool, seed: int | None) -> dict[str, Any]:
    return train_plain(plan, seed=seed, batch=batch(plan, padded=padded))


class OneRank:
    """A mesh of one rank, without process groups."""

    def __init__(self) -> None:
        self.plan = family_plan("llama", 1, {})

    def size(self, _: str) -> int:
        return 1

    def index(self, _: str) -> int:
        return 0

    def parallel_group(self, _: str) -> None:
        return None


IDS = torch.arange(16).repeat(2, 1)
RIGHT = (torch.arange(16) < LENGTHS[:, None]).long()
PACKED = torch.cat([torch.arange(6), torch.arange(10)])[None]


def ready(**given: Any) -> dict[str, Any]:
    from parcompile.runtime.data import ready_inputs

    return ready_inputs({"input_ids": IDS, **given}, OneRank())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_mask": RIGHT.flip(1)}, "row 1 of the attention_mask has padding before or between tokens"),
        ({"attention_mask": torch.ones(2, 1, 16, 16)}, r"an attention_mask of shape \[2, 1, 16, 16\]"),
        ({"attention_mask": {"full_attention": None}}, "an attention_mask that is a dict"),
        ({"attention_mask": RIGHT, "labels": IDS}, "row 1 has the label 10 at position 10, .* is 0 from position 9 on"),
        ({"attention_mask": RIGHT, "shift_labels": IDS}, "row 1 has the label 9 at position 10"),
        ({"attention_mask": torch.ones(2, 16), "position_ids": PACKED}, "Leave out the mask"),
    ],
)
def test_what_a_mask_hides_beyond_padding_is_refused_with_the_way_out(given: dict[str, Any], message: str) -> None:
    from parcompile.runtime import RunError

    with pytest.raises(RunError, match=message):
        ready(**given)


def test_labels_count_as_they_are_given_and_documents_are_kept_apart() -> None:
    found = ready(labels=IDS, position_ids=PACKED)
    assert torch.equal(found["shift_labels"][:, :-1], IDS[:, 1:])
    assert bool((found["shift_labels"][:, -1] == -100).all())
    assert found["documents"] == [[0, 6, 16]] * 2
    # The token before the padding may predict it: transformers counts that too.
    labels = IDS.masked_fill(torch.arange(16) > LENGTHS[:, None], -100)
    found = ready(labels=labels, attention_mask=RIGHT)
    assert torch.equal(found["real_tokens"], RIGHT.bool())
    assert "attention_mask" not in found
    again = ready(**{name: value for name, value in found.items() if name != "input_ids"})
    assert again.keys() == found.keys()
    assert all(torch.equal(again[name], value) for name, value in found.items() if isinstance(value, Tensor))
