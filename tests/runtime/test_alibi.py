"""ALiBi biases as features of queries and keys, and chunks as documents, are what transformers adds and masks."""

from __future__ import annotations

import pytest
import torch

from parcompile.runtime.inject.attention import biased
from parcompile.runtime.inject.ring_place import chunked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_products_are_the_biases_at_any_position(dtype: torch.dtype) -> None:
    """Slopes that are powers of two, as 8 heads have them, are exact in bfloat16, and so is their bias."""
    slopes, scaling, length = torch.tensor([0.5, 0.25, 0.125, 0.0625]), 0.25, 3000
    query, key = torch.zeros(1, 4, length, 16, dtype=dtype), torch.zeros(1, 2, length, 16, dtype=dtype)
    longer_query, longer_key = biased(query, key, slopes, scaling)
    products = longer_query[:, :, 7].float().unsqueeze(2) @ longer_key.repeat_interleave(2, 1).float().mT
    expected = slopes[:, None] * torch.arange(length)
    assert torch.equal(products[0, :, 0] * scaling, expected)
    assert longer_key.shape[-1] % 8 == 0


def test_chunks_are_borders_beside_those_of_documents() -> None:
    assert chunked(None, 2, 16, 6) == [[0, 6, 12, 16]] * 2
    assert chunked([[0, 5, 16], [0, 12, 16]], 2, 16, 6) == [[0, 5, 11, 16], [0, 6, 12, 16]]
