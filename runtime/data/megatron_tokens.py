"""Tokens that Megatron-LM's `tools/preprocess_data.py` wrote: NAME.bin and NAME.idx.

The format is that of megatron/core/datasets/indexed_dataset.py: a header of 34 bytes, then the lengths (int32)
and the offsets (int64) of all sequences. The file of tokens is read where it is; nothing of it is held in memory.
"""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from parcompile.user_files import read_start

from .rows_of_files import unusable

_MAGIC, _HEADER = b"MMIDIDX\x00\x00", struct.Struct("<9sQBQQ")
_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def megatron_tokens(index: Path) -> NDArray[np.integer]:
    """All tokens [n] of NAME.idx, one document behind the other, mapped from NAME.bin.

    Raises:
        RunError: a file is missing, is none of this format, or does not hold what the index says.
    """
    tokens = index.with_suffix(".bin")
    for file in (index, tokens):
        if not file.is_file():
            raise unusable(f"{file} is missing: Megatron's data are NAME.bin and NAME.idx")
    head, _ = read_start(index, _HEADER.size)
    magic, version, code, sequences, _ = _HEADER.unpack(head) if len(head) == _HEADER.size else (b"", 0, 0, 0, 0)
    if magic != _MAGIC or version != 1 or code not in _TYPES:
        raise unusable(f"{index} is no index of Megatron's version 1 with tokens that are whole numbers")
    size = np.dtype(_TYPES[code]).itemsize
    if index.stat().st_size < _HEADER.size + 12 * sequences:
        raise unusable(f"{index} is incomplete: it begins as the index of {sequences:,} sequences")
    lengths = np.fromfile(index, np.int32, sequences, offset=_HEADER.size)
    listed, held = int(lengths.sum(dtype=np.int64)), tokens.stat().st_size
    if held != listed * size or (lengths < 0).any():
        raise unusable(
            f"{tokens} holds {held:,} bytes; {index} lists {listed:,} tokens of {size} bytes: one of them is incomplete"
        )
    if not listed:
        raise unusable(f"{tokens} holds no token")
    found = np.memmap(tokens, dtype=_TYPES[code], mode="r")
    starts = np.fromfile(index, np.int64, sequences, offset=_HEADER.size + 4 * sequences)
    ends = list(itertools.accumulate(lengths.tolist(), initial=0))[:-1]
    if starts.tolist() != [end * found.itemsize for end in ends]:
        raise unusable(f"{index} does not list the sequences of {tokens} in their order")
    return found
