"""Packed documents: every token has its place, ranks are even, and short documents stay whole."""

from __future__ import annotations

import pytest
import torch
from attention_cases import reference, relative_error
from closeness import assert_within
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from parcompile.runtime.ring_attention import (
    PackedCollator,
    PackedLoader,
    PackingCosts,
    pack_documents,
    pack_tensors,
    packed_attention,
    unpack_tensors,
)


def _documents(lengths: list[int]) -> list[Tensor]:
    """Token ids that are different everywhere."""
    return list(torch.arange(1, 1 + sum(lengths)).split(lengths))


_ANY_LENGTHS = st.lists(st.integers(1, 5) | st.integers(1, 400), min_size=1, max_size=20)


@settings(max_examples=150, deadline=None)
@given(_ANY_LENGTHS, st.integers(1, 8), st.sampled_from(["zigzag", "contiguous", "striped"]), st.sampled_from([0, 2e4]))
def test_every_token_has_one_place_with_its_label_and_position(
    lengths: list[int], cp: int, layout: str, wire_pairs: float
) -> None:
    documents, costs = _documents(lengths), PackingCosts(linear_pairs=100, wire_pairs=wire_pairs)
    batches = [PackedCollator(cp, rank, 0, layout=layout, costs=costs)(documents) for rank in range(cp)]
    packing = batches[0]["packing"]
    assert all(batch["packing"] == packing for batch in batches)
    assert {batch[name].shape for batch in batches for name in batch if name != "packing"} == {
        (1, packing.local_tokens)
    }
    for name in ("input_ids", "labels", "position_ids"):
        for got, document in zip(unpack_tensors([b[name][0] for b in batches], packing), documents, strict=True):
            wanted = {
                "input_ids": document,
                "labels": torch.cat([document[1:], torch.tensor([-100])]),
                "position_ids": torch.arange(len(document)),
            }[name]
            assert torch.equal(got, wanted)
    ids, labels = (torch.cat([batch[name][0] for batch in batches]) for name in ("input_ids", "labels"))
    assert (ids != 0).sum() == sum(lengths)
    assert (labels[ids == 0] == -100).all()
    assert packing.padding == pytest.approx(float((ids == 0).double().mean()))


@pytest.mark.parametrize(
    ("lengths", "dealt", "balance"),
    [
        # One long document: nothing else keeps all ranks busy.
        ([4096], 1, 1.0),
        # Many equal and short ones: no message is worth its while.
        ([128] * 64, 0, 1.0),
        # One long among many short: it is dealt out, they are not.
        ([8192] + [64] * 128, 1, 0.99),
    ],
)
def test_long_documents_are_dealt_out_and_short_ones_stay_whole(lengths: list[int], dealt: int, balance: float) -> None:
    packing = pack_documents(lengths, 8, costs=PackingCosts(linear_pairs=1000))
    assert len(packing.dealt) == dealt
    assert packing.balance() >= balance


def test_every_rank_can_be_padded_to_a_fixed_length() -> None:
    lengths = [100, 7, 30, 1]
    packing = pack_documents(lengths, 4, local_tokens=64)
    assert packing.local_tokens == 64
    assert {len(pack_tensors(_documents(lengths), packing, rank)) for rank in range(4)} == {64}
    with pytest.raises(ValueError, match=r"138 tokens in 4 documents take at least 3\d tokens .* > local_tokens 20"):
        pack_documents(lengths, 4, local_tokens=20)
    with pytest.raises(ValueError, match="documents of at least one token"):
        pack_documents([3, 0], 2)


def test_loaders_hand_out_every_document_once() -> None:
    documents = [{"input_ids": one, "kind": torch.full_like(one, 7)} for one in _documents([5, 9, 40, 3, 3, 8])]
    collators = [PackedCollator(2, rank, 0) for rank in range(2)]
    own = [list(PackedLoader(documents, 20, collator)) for collator in collators]
    torchs = [list(DataLoader(documents, batch_size=3, collate_fn=collator)) for collator in collators]
    assert [len(batches) for batches in own] == [3, 3]
    for by_rank in (own, torchs):
        ids = torch.cat([batch["input_ids"][0] for batches in by_rank for batch in batches])
        kinds = torch.cat([batch["kind"][0] for batches in by_rank for batch in batches])
        assert ids[ids != 0].sort().values.tolist() == list(range(1, 69))
        assert (kinds == torch.where(ids != 0, 7, 0)).all()


def test_packed_attention_of_one_rank_is_attention_of_each_document() -> None:
    lengths = [13, 1, 40]
    packing = pack_documents(lengths, 1)
    parts = [[torch.randn(n, 2, 8, dtype=torch.float64) for n in lengths] for _ in range(3)]
    packed = (pack_tensors(part, packing, 0).transpose(0, 1).unsqueeze(0) for part in parts)
    out = packed_attention(*packed, packing, rank=0)
    for number, got in enumerate(unpack_tensors([out[0].transpose(0, 1)], packing)):
        wanted = reference(*(part[number].transpose(0, 1).unsqueeze(0) for part in parts), causal=True)
        assert_within(relative_error(got.transpose(0, 1).unsqueeze(0), wanted), 1e-12)


def test_what_cannot_be_packed_is_named() -> None:
    packing = pack_documents([13, 50], 2, costs=PackingCosts(linear_pairs=0, wire_pairs=0))
    assert packing.dealt
    right, wrong = (torch.zeros(1, 1, length, 4) for length in (packing.local_tokens, packing.local_tokens + 1))
    with pytest.raises(ValueError, match=r"the packing has \d+ dealt \+ \d+ whole"):
        packed_attention(wrong, wrong, wrong, packing, rank=0)
    with pytest.raises(ValueError, match="would see their padding"):
        packed_attention(right, right, right, packing, rank=0, causal=False)
    with pytest.raises(ValueError, match=r"must have \d+ rows, the tokens of the rank, and 63 columns"):
        packed_attention(right, right, right, packing, rank=0, bias=torch.zeros(1, 1, 1, 1))
