"""Random numbers from the keys of tokens: T tokens, F features of each."""

from __future__ import annotations

import torch
from torch import Tensor

from parcompile.runtime.ring_attention.kernels.kernel import WORD, combined

_FEATURES = 0x510E527F
_CHUNK_NUMEL = {"cpu": 2**18}
_LARGE_CHUNK_NUMEL = 2**22
"""Words take 8 bytes each and a few copies: so many are computed at a time. On CPUs they stay in the cache."""
_BITS = 23


def dropped(keys: Tensor, features: Tensor, chance: float) -> Tensor:
    """Which elements are dropped: bool [T, F] from keys [T] and the numbers of the features [F]."""
    found = torch.empty(len(keys), len(features), dtype=torch.bool, device=keys.device)
    border = round(chance * (WORD + 1))
    for tokens in _chunks(keys, features):
        torch.lt(_words(keys[tokens], features), border, out=found[tokens])
    return found


def uniform(keys: Tensor, features: Tensor) -> Tensor:
    """Numbers between 0 and 1, neither of which occurs: float32 [T, F]."""
    found = torch.empty(len(keys), len(features), device=keys.device)
    for tokens in _chunks(keys, features):
        # 2^23 numbers, the centres of equal intervals: every one of them is exact in float32.
        found[tokens] = ((_words(keys[tokens], features) >> (32 - _BITS)) + 0.5) * 2.0**-_BITS
    return found


def _words(keys: Tensor, features: Tensor) -> Tensor:
    return combined(keys.unsqueeze(1), features, _FEATURES)


def _chunks(keys: Tensor, features: Tensor) -> list[slice]:
    numel = _CHUNK_NUMEL.get(keys.device.type, _LARGE_CHUNK_NUMEL)
    step = max(1, numel // max(1, len(features)))
    return [slice(start, start + step) for start in range(0, len(keys), step)]
