"""Tokens as Megatron-LM keeps them: NAME.bin, and NAME.idx that says where each document begins.

NAME.idx: `MMIDIDX` and two zero bytes; version 1 (uint64), the code of the tokens' type (uint8), the number of
sequences and of borders of documents (uint64 each); then of each sequence its tokens (int32) and its first byte in
NAME.bin (int64), and the borders of documents as numbers of sequences, from 0 on (int64). Source:
`megatron/core/datasets/indexed_dataset.py`.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from parcompile.atomic import write_file
from parcompile.runtime.errors import everywhere
from parcompile.user_files import read_start

_MAGIC, _HEADER = b"MMIDIDX\x00\x00", struct.Struct("<9sQBQQ")
_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_UINT16, _INT32, _MOST_FOR_UINT16 = 8, 4, 65500
"""Codes of the types that are written: uint16 for vocabularies below this size (`DType.optimal_dtype`)."""


class MegatronTokens:
    """All tokens [n] of NAME.idx, one document behind the other, mapped from NAME.bin; `starts` [documents] of each.

    Raises:
        RunError: a file is missing, is none of this format, or does not hold what the index says.
    """

    tokens: NDArray[np.integer]
    starts: NDArray[np.int64]

    def __init__(self, index: Path) -> None:
        self.file, tokens = index, index.with_suffix(".bin")
        for file in (index, tokens):
            if not file.is_file():
                raise everywhere(f"{file} is missing: Megatron's data are NAME.bin and NAME.idx")
        head, _ = read_start(index, _HEADER.size)
        unpacked = _HEADER.unpack(head) if len(head) == _HEADER.size else (b"", 0, 0, 0, 0)
        magic, version, code, sequences, borders = unpacked
        if magic != _MAGIC or version != 1 or code not in _TYPES:
            raise everywhere(f"{index} is no index of Megatron's version 1 with tokens that are whole numbers")
        size = np.dtype(_TYPES[code]).itemsize
        if index.stat().st_size < _HEADER.size + 12 * sequences + 8 * borders:
            raise everywhere(f"{index} is incomplete: it begins as the index of {sequences:,} sequences")
        lengths = np.fromfile(index, np.int32, sequences, offset=_HEADER.size)
        listed, held = int(lengths.sum(dtype=np.int64)), tokens.stat().st_size
        if held != listed * size or (lengths < 0).any():
            raise everywhere(
                f"{tokens} holds {held:,} bytes; {index} lists {listed:,} tokens of {size} bytes: one of them is "
                "incomplete"
            )
        if not listed:
            raise everywhere(f"{tokens} holds no token")
        self.tokens = np.memmap(tokens, dtype=_TYPES[code], mode="r")
        starts = np.fromfile(index, np.int64, sequences, offset=_HEADER.size + 4 * sequences)
        ends = np.cumsum(lengths, dtype=np.int64)
        if (starts != (ends - lengths) * size).any():
            raise everywhere(f"{index} does not list the sequences of {tokens} in their order")
        numbers = np.fromfile(index, np.int64, borders, offset=_HEADER.size + 12 * sequences)
        if not borders or numbers[0] or numbers[-1] > sequences or (np.diff(numbers) < 0).any():
            raise everywhere(f"{index} does not divide its {sequences:,} sequences into documents")
        self.starts = np.append(0, ends)[numbers[: -1 if numbers[-1] == sequences else None]]


def write_megatron(documents: Iterable[tuple[str, Sequence[int]]], prefix: str | Path, vocab_size: int) -> str:
    """Writes documents as PREFIX.bin and PREFIX.idx, each as one sequence; says what was written, in one line.

    Documents are taken one by one. The index is written last: a pair that has one is whole.

    Args:
        documents: the tokens of each, with where it stands, for messages.
        prefix: the path without an ending.
        vocab_size: of the model, from which Megatron chooses the type of tokens.

    Raises:
        RunError: a file is there already or cannot be written, a token is none of the vocabulary, or there is none.
    """
    tokens, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    for file in (tokens, index):
        if os.path.lexists(file):
            raise everywhere(f"{file} exists already: name another prefix (--write)")
    code = _UINT16 if vocab_size < _MOST_FOR_UINT16 else _INT32
    new, size = Path(f"{prefix}.bin.new"), np.dtype(_TYPES[code]).itemsize
    try:
        stream = new.open("xb")
    except FileExistsError:
        raise everywhere(f"{new} exists: another program writes it, or was stopped as it did; remove it") from None
    except OSError as error:
        raise everywhere(f"{new} cannot be written: {error.strerror}") from None
    try:
        with stream:
            lengths = _write_tokens(documents, stream, code, vocab_size)
        starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64) * size
        parts = np.array(lengths, np.int32), starts, np.arange(len(lengths) + 1, dtype=np.int64)
        head = _HEADER.pack(_MAGIC, 1, code, len(lengths), len(lengths) + 1)
        new.rename(tokens)
        write_file(index, head + b"".join(part.tobytes() for part in parts))
    except BaseException as error:
        for file in (new, tokens):
            file.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise everywhere(f"{error.filename or prefix} cannot be written: {error.strerror}") from None
        raise
    written = f"{len(lengths):,} document{'s' * (len(lengths) != 1)}"
    return f"{sum(lengths):,} tokens of {written}, {size} bytes each"


def _write_tokens(
    documents: Iterable[tuple[str, Sequence[int]]], stream: BinaryIO, code: int, vocab_size: int
) -> Sequence[int]:
    """Lengths of the documents, whose tokens are written."""
    lengths = array("i")
    for where, ids in documents:
        for one in ids:
            if not 0 <= one < vocab_size:
                raise everywhere(f"{where} has the token {one}, and the model's vocabulary {vocab_size} (vocab_size)")
        stream.write(np.array(ids, _TYPES[code]).tobytes())
        lengths.append(len(ids))
    if not lengths:
        raise everywhere("the data hold no token: every document is empty")
    return lengths
