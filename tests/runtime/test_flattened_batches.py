"""Contract: documents are those that a flattening collator gives, and none of them leaks into another.

One document's tokens are changed: the logits of all others stay as they are, bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import assert_close
from ranks import run_ranks
from torch import Tensor
from training_runs import initial_model, make_plan

from parcompile.plan import Plan

LENGTHS = (5, 8, 3)


def collated(changed: int | None = None, **options: Any) -> dict[str, Any]:
    """transformers' flattening collator, with one document changed."""
    from transformers import DataCollatorWithFlattening

    ids = torch.randint(3, 61, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3)).split(LENGTHS)
    rows = [(one + (number == changed)) % 61 for number, one in enumerate(ids)]
    found: dict[str, Any] = DataCollatorWithFlattening(**options)([{"input_ids": one.tolist()} for one in rows])
    return found


FORMS: dict[str, dict[str, Any]] = {
    "position_ids": {},
    "cu_seq_lens_q": {"return_position_ids": False, "return_flash_attn_kwargs": True},
    "seq_idx": {"return_position_ids": False, "return_seq_idx": True},
    "all of them": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
}


def logits_of_ranks(rank: int, plan: Plan) -> dict[str, Any]:
    """[T, V] for each form and changed document: by a plan, and in an engine of one's own."""
    from parcompile.runtime import join, register_ring
    from parcompile.runtime.inject import inject
    from parcompile.runtime.loss import whole_sequences

    mesh = join(plan)
    ring, own = register_ring(mesh.group("cp")), initial_model(plan)
    own.set_attn_implementation("parcompile_ring")
    ring.check(own)
    planned, found = inject(initial_model(plan), mesh), {}
    with torch.no_grad():
        for form, options in FORMS.items():
            for changed in (None, *range(len(LENGTHS))):
                batch = collated(changed, **options)
                for name, given in (("plan", planned(**batch)), ("own", own(**ring.split(batch), use_cache=False))):
                    found[name, form, changed] = whole_sequences(given.logits, mesh)[0, :, :61], float(given.loss)
    return found


@pytest.mark.ranks
def test_no_document_of_a_flattened_batch_leaks() -> None:
    plan = make_plan(2, {"cp": 2}, training={"global_batch_size": 1})
    (found, _) = run_ranks(2, logits_of_ranks, plan)
    expected: dict[int | None, Tensor] = {}
    model = initial_model(plan)
    for changed in (None, *range(len(LENGTHS))):
        texts = collated(changed)["input_ids"].split(LENGTHS, 1)
        expected[changed] = torch.cat([model(input_ids=text).logits[0] for text in texts]).detach()
    for (name, form, changed), (logits, _) in found.items():
        assert_close(logits, expected[changed], about=f"{name} {form}")
        before = found[name, form, None][0].split(LENGTHS)
        for number, (one, other) in enumerate(zip(logits.split(LENGTHS), before, strict=True)):
            assert torch.equal(one, other) == (number != changed), (name, form, changed, number)
    assert len({loss for (name, _, changed), (_, loss) in found.items() if changed is None and name == "plan"}) == 1


def test_borders_that_contradict_themselves_are_refused() -> None:
    from parcompile.runtime.data.batches import with_positions

    whole = collated(return_flash_attn_kwargs=True)
    assert with_positions(whole).keys() == {"input_ids", "labels", "position_ids"}
    with pytest.raises(ValueError, match=r"position_ids begin anew at \[0, 5, 13\], the documents of the collator at "):
        with_positions({**whole, "cu_seq_lens_q": torch.tensor([0, 6, 16])})
    with pytest.raises(ValueError, match=r"cu_seq_lens_q \[0, 5\] must rise from 0 to 16, the tokens of 1 row"):
        with_positions({**whole, "cu_seq_lens_q": torch.tensor([0, 5])})
