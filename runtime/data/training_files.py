"""A data set of sequences for `PlanLoader`, read from a user's files: text, JSON lines, parquet, Megatron's tokens."""

from __future__ import annotations

import itertools
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parcompile.plan import Plan
from parcompile.runtime.labels import IGNORED_LABEL
from parcompile.user_files import read_start

from .conversations import Ids, is_instruction, shown, tokens_and_labels
from .rows_of_files import data_files, rows, unusable


def read_training_data(path: str | Path, plan: Plan, tokenizer: str | Path | None = None) -> SequencesOfFiles:
    """The sequences of a file or a folder of files, in an order drawn from the plan's seed, the same on every rank.

    Text (.txt, or rows with `text`) is one stream of tokens, cut into sequences; documents are separated by the
    end-of-sequence token. Rows with `messages`, `prompt` and `completion`, or `instruction` and `output` are
    conversations: only answers are predicted, and as many conversations as a sequence has room for share it, none of
    which attends to another. Rows with `input_ids` (and `labels`) are taken as they are, without what their
    `attention_mask` hides at the ends, and share sequences likewise. Of a row that has several of these, `input_ids`
    are read, else the conversation, else `text`; the summary says so. Megatron's NAME.bin is read where it is; all
    other data are tokenized by every rank as it starts.

    Args:
        path: a file, a folder of files of one format, a prefix of Megatron's files, or a folder that `datasets` saved.
        plan: the plan, for its sequence length, vocabulary and seed.
        tokenizer: a folder with a Hugging Face tokenizer. None: a token is a byte.

    Raises:
        RunError: which file and row cannot be used, and why.
    """
    spec, files = plan.spec, data_files(path)
    room, words = spec.training.sequence_length, None
    if tokenizer is not None:
        words = _tokenizer(Path(tokenizer))
    if files[0].suffix == ".idx":
        found: SequencesOfFiles = _Windows([megatron_tokens(file) for file in files], room, spec.training.seed)
        made = "they were written with the tokenizer of another model"
    else:
        found = _of_rows(files, words, room, spec.training.seed)
        made = f"{tokenizer} is the tokenizer of another model"
        if words is None:
            made = "without --tokenizer a token of text is a byte: name the tokenizer of the model"
    (smallest, largest), vocab_size = found.extremes(), spec.model.shape.vocab_size
    if smallest < 0 or largest >= vocab_size:
        raise unusable(
            f"{path} has the token {smallest if smallest < 0 else largest}, and the model's vocabulary {vocab_size} "
            f"(vocab_size): {made}"
        )
    return found


def _tokenizer(folder: Path) -> Any:
    """Read from a folder alone: nothing is downloaded, and no program in it is run."""
    if not folder.is_dir():
        raise unusable(f"there is no folder {folder} with a tokenizer (--tokenizer)")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        why = " ".join(str(error).split())
        raise unusable(
            f"{folder} holds no tokenizer that transformers reads (tokenizer.json, tokenizer_config.json): {why[:200]}"
        ) from None


def shuffled(count: int, seed: int) -> list[int]:
    """0 … count − 1 in an order drawn from the seed."""
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def packed(numbers: Sequence[int], lengths: Sequence[int], room: int, at_once: int = 64) -> list[list[int]]:
    """Documents in groups of at most `room` tokens: each into the first of `at_once` open groups that has room."""
    full: list[list[int]] = []
    open_groups: list[list[int]] = []
    left: list[int] = []
    for number in numbers:
        into = next((at for at, free in enumerate(left) if free >= lengths[number]), len(left))
        if into == len(left):
            open_groups.append([])
            left.append(room)
        open_groups[into].append(number)
        left[into] -= lengths[number]
        if len(left) > at_once:
            fullest = left.index(min(left))
            full.append(open_groups.pop(fullest))
            del left[fullest]
    return full + open_groups


class SequencesOfFiles(ABC):
    """Sequences of the plan's length, by number; `summary` says what was read, in one line."""

    summary: str
    _order: list[int]

    def __len__(self) -> int:
        return len(self._order)

    def _shuffle(self, count: int, seed: int) -> None:
        self._order = shuffled(count, seed)

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`input_ids` and `labels` [S], and of packed documents `position_ids` and `attention_mask`."""

    @abstractmethod
    def extremes(self) -> tuple[int, int]:
        """The smallest and the largest token of all; of Megatron's files, of the first 16 million of each."""


class _Windows(SequencesOfFiles):
    """A stream of tokens, cut; a stream that is shorter than one sequence is padded with places that count nothing."""

    def __init__(self, parts: Sequence[NDArray[np.integer]], length: int, seed: int) -> None:
        self._parts, self._length = parts, length
        self._counts = [len(part) // length for part in parts]
        tokens = sum(map(len, parts))
        if not tokens:
            raise unusable("the training data hold no token: every text is empty")
        if not any(self._counts):
            self._parts = [np.concatenate([np.asarray(part) for part in parts])[:length]]
            self._counts = [1]
        self._shuffle(sum(self._counts), seed)
        self.summary = f"{tokens:,} tokens, {len(self):,} sequences of {length:,}"
        if tokens < length:
            self.summary += f", of which {length - tokens:,} are padding"

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, part = self._order[index], 0
        while number >= self._counts[part]:
            number, part = number - self._counts[part], part + 1
        cut = self._parts[part][number * self._length : (number + 1) * self._length]
        ids = torch.from_numpy(np.asarray(cut).astype(np.int64))
        padding = self._length - len(ids)
        if not padding:
            return {"input_ids": ids, "labels": ids}
        pad = torch.nn.functional.pad
        return {"input_ids": pad(ids, (0, padding)), "labels": pad(ids, (0, padding), value=IGNORED_LABEL)}

    def extremes(self) -> tuple[int, int]:
        return _extremes(part[: 2**24] for part in self._parts)


class _Packed(SequencesOfFiles):
    """Documents with labels, as many in a sequence as fit, none attending to another; the rest is padding."""

    def __init__(self, documents: Sequence[tuple[NDArray[Any], NDArray[Any]]], length: int, seed: int) -> None:
        self._documents, self._length = documents, length
        lengths = [len(ids) for ids, _ in documents]
        self._packs = packed(shuffled(len(documents), seed), lengths, length)
        self._shuffle(len(self._packs), seed)
        predicted = sum(int((labels != IGNORED_LABEL).sum()) for _, labels in documents)
        tokens = sum(lengths)
        self.summary = (
            f"{len(documents):,} conversations or documents, {tokens:,} tokens of which {predicted:,} are predicted, "
            f"{len(self):,} sequences of {length:,}"
        )

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.zeros(self._length, dtype=torch.long)
        labels = torch.full_like(ids, IGNORED_LABEL)
        positions, mask, at = torch.zeros_like(ids), torch.zeros_like(ids), 0
        for number in self._packs[self._order[index]]:
            tokens, targets = (torch.from_numpy(one.astype(np.int64)) for one in self._documents[number])
            place = slice(at, at + len(tokens))
            ids[place], labels[place], mask[place] = tokens, targets, 1
            positions[place] = torch.arange(len(tokens))
            at += len(tokens)
        positions[at:] = torch.arange(self._length - at)
        return {"input_ids": ids, "labels": labels, "position_ids": positions, "attention_mask": mask}

    def extremes(self) -> tuple[int, int]:
        return _extremes(one for ids, labels in self._documents for one in (ids, labels[labels != IGNORED_LABEL]))


def _extremes(parts: Iterable[NDArray[Any]]) -> tuple[int, int]:
    held = [(int(part.min()), int(part.max())) for part in parts if len(part)]
    return min(low for low, _ in held), max(high for _, high in held)


def _of_rows(files: Sequence[Path], tokenizer: Any, room: int, seed: int) -> SequencesOfFiles:
    stream: list[NDArray[Any]] = []
    documents: list[tuple[NDArray[Any], NDArray[Any]]] = []
    shortened = dropped = unread = 0
    end: Ids = list(b"\n\n")
    if tokenizer is not None:
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for file in files:
        for where, row in rows(file):
            known = "input_ids" in row or is_instruction(row)
            if (text := row.get("text")) is not None and not known:
                if not isinstance(text, str):
                    raise unusable(f"{where}: text is {shown(text)}: expected a text")
                if not text:
                    continue
                words = list(text.encode()) if tokenizer is None else tokenizer(text)["input_ids"]
                stream.append(np.array([*words, *end], np.int32))
                continue
            unread += text is not None
            ids, labels = _tokens(row, tokenizer, where)
            shortened += len(ids) > room
            if len(ids) > 1 and any(one != IGNORED_LABEL for one in labels[1:room]):
                documents.append((np.array(ids[:room], np.int32), np.array(labels[:room], np.int32)))
            else:
                dropped += 1
    if stream and documents:
        raise unusable(f"{files[0].parent}: some rows are text and others conversations: train on one of them")
    if stream:
        return _Windows([np.concatenate(stream)], room, seed)
    if not documents and not dropped:
        raise unusable(f"{files[0]} holds no row, or only empty texts")
    if not documents:
        raise unusable(f"{files[0]}: no row has a token to predict in its first {room} tokens")
    found = _Packed(documents, room, seed)
    if shortened:
        found.summary += f"; {shortened:,} are longer and end there"
    if dropped:
        found.summary += f"; {dropped:,} left out: nothing to predict in them"
    if unread:
        found.summary += f"; {unread:,} have text too, which is not read"
    return found


def _tokens(row: Mapping[str, Any], tokenizer: Any, where: str) -> tuple[Ids, Ids]:
    if "input_ids" in row:
        return _ready(row, where)
    if is_instruction(row):
        return tokens_and_labels(row, tokenizer, where)
    raise unusable(
        f"{where} has {', '.join(row) or 'nothing'}: expected text, messages, prompt and completion, instruction and "
        "output, or input_ids",
    )


def _ready(row: Mapping[str, Any], where: str) -> tuple[Ids, Ids]:
    """Tokens and labels that a row has as numbers, without the padding at its ends."""
    ids, columns = _numbers(row, "input_ids", where), {}
    for name in ("labels", "attention_mask"):
        columns[name] = ids if name == "labels" else [1] * len(ids)
        if row.get(name) is not None:
            columns[name] = _numbers(row, name, where)
        if len(columns[name]) != len(ids):
            raise unusable(
                f"{where}: {name} has {len(columns[name]):,} numbers, input_ids {len(ids):,}: they go in pairs"
            )
    labels, mask = columns["labels"], columns["attention_mask"]
    for name, bad in (
        ("input_ids", next((one for one in ids if not 0 <= one < 2**31), None)),
        ("labels", next((one for one in labels if one != IGNORED_LABEL and not 0 <= one < 2**31), None)),
        ("attention_mask", next((one for one in mask if one not in (0, 1)), None)),
    ):
        if bad is not None:
            allowed = {
                "labels": f"token ids, and {IGNORED_LABEL} where nothing is predicted",
                "attention_mask": "0 and 1",
            }
            raise unusable(f"{where}: {name} holds {bad}: expected {allowed.get(name, 'token ids, from 0 on')}")
    if 1 not in mask:
        return [], []
    kept = slice(mask.index(1), len(mask) - mask[::-1].index(1))
    if 0 in mask[kept]:
        raise unusable(
            f"{where}: attention_mask hides tokens between others; 0 is for padding at the ends of a row: write a row "
            "for each part"
        )
    return ids[kept], labels[kept]


def _numbers(row: Mapping[str, Any], name: str, where: str) -> Ids:
    found = row[name].tolist() if hasattr(row[name], "tolist") else row[name]
    if not isinstance(found, list | tuple) or any(type(one) is not int for one in found):
        raise unusable(f"{where}: {name} is {shown(found)}: expected a list of whole numbers")
    return list(found)


# Tokens that Megatron-LM's `tools/preprocess_data.py` wrote: NAME.bin and NAME.idx.

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
