"""A data set of sequences for `PlanLoader`, read from a user's files: text, JSON lines, parquet, Megatron's tokens.

Which samples a step of a run has, and of which documents they are: `parcompile data`.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parcompile.doctor.metrics import RUN
from parcompile.plan import Plan
from parcompile.project.rows import is_instruction
from parcompile.runtime.errors import everywhere
from parcompile.runtime.labels import IGNORED_LABEL
from parcompile.spec import RampupBatchSize
from parcompile.user_files import parse_json, read_text

from .megatron_files import MegatronTokens
from .rows_of_files import Ids, data_files, rows, shown, tokens_and_labels
from .sequences import Mixture, Packed, Places, SequencesOfFiles, Windows


def read_training_data(
    path: str | Path | Sequence[str], plan: Plan, tokenizer: str | Path | None = None
) -> SequencesOfFiles:
    """The sequences of a file or a folder of files, in an order drawn from the plan's seed, the same on every rank.

    Text (.txt, or rows with `text`) is one stream of tokens, cut into sequences; documents are separated by the
    end-of-sequence token. Rows with `messages`, `prompt` and `completion`, or `instruction` and `output` are
    conversations: only answers are predicted, and as many conversations as a sequence has room for share it, none of
    which attends to another. Rows with `input_ids` (and `labels`) are taken as they are, without what their
    `attention_mask` hides at the ends, and share sequences likewise. Of a row that has several of these, `input_ids`
    are read, else the conversation, else `text`; the summary says so. Megatron's NAME.bin is read where it is; all
    other data are tokenized by every rank as it starts.

    Args:
        path: a file, a folder of files of one format, a prefix of Megatron's files, or a folder that `datasets` saved;
            or several of them, each behind its weight: ["0.3", "code", "0.7", "books.jsonl"] is a `Mixture`.
        plan: the plan, for its sequence length, vocabulary and seed.
        tokenizer: a folder with a Hugging Face tokenizer. None: a token is a byte.

    Raises:
        RunError: which file and row cannot be used, and why.
    """
    if not isinstance(path, str | Path):
        if len(path) > 1:
            weights, paths = _weighted(path)
            return Mixture(paths, [read_training_data(one, plan, tokenizer) for one in paths], weights)
        (path,) = path
    spec, files = plan.spec, data_files(path)
    room, words = spec.training.sequence_length, read_tokenizer(tokenizer)
    if files[0].suffix == ".idx":
        read = [MegatronTokens(file) for file in files]
        parts, starts = [one.tokens for one in read], [one.starts for one in read]
        found: SequencesOfFiles = Windows(parts, starts, _places_in(read), room, spec.training.seed)
        made = "they were written with the tokenizer of another model"
    else:
        found = _of_rows(files, words, room, spec.training.seed)
        made = f"{tokenizer} is the tokenizer of another model"
        if words is None:
            made = "without --tokenizer a token of text is a byte: name the tokenizer of the model"
    (smallest, largest), vocab_size = found.extremes(), spec.model.shape.vocab_size
    if smallest < 0 or largest >= vocab_size:
        raise everywhere(
            f"{path} has the token {smallest if smallest < 0 else largest}, and the model's vocabulary {vocab_size} "
            f"(vocab_size): {made}"
        )
    return found


def read_tokenizer(folder: str | Path | None) -> Any:
    """Read from a folder alone: nothing is downloaded, and no program in it is run. None is for bytes as tokens.

    Raises:
        RunError: the folder holds none.
    """
    if folder is None:
        return None
    folder = Path(folder)
    if not folder.is_dir():
        raise everywhere(f"there is no folder {folder} with a tokenizer (--tokenizer)")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        why = " ".join(str(error).split())
        raise everywhere(
            f"{folder} holds no tokenizer that transformers reads (tokenizer.json, tokenizer_config.json): {why[:200]}"
        ) from None


def _places_in(files: Sequence[MegatronTokens]) -> Places:
    ends = list(itertools.accumulate(len(one.starts) for one in files))

    def look(numbers: Collection[int]) -> Mapping[int, tuple[str, str]]:
        found = {}
        for number in numbers:
            file = int(np.searchsorted(ends, number, side="right"))
            name = str(files[file].file)
            found[number] = name, f"{name} document {number - ends[file] + len(files[file].starts)}"
        return found

    return look


def _places_of_rows(files: Sequence[Path], ordinals: Sequence[int]) -> Places:
    """Of documents that are these rows of the files, counted through; the files are read again."""

    def look(numbers: Collection[int]) -> Mapping[int, tuple[str, str]]:
        wanted = {ordinals[number]: number for number in numbers}
        every = ((str(file), where) for file in files for where, _ in rows(file))
        return {wanted[at]: place for at, place in enumerate(every) if at in wanted}

    return look


_LEAST_SHARE = 1e-9
"""Of a data set: an epoch holds all of it, and of the others a billion times as much."""


def _weighted(given: Sequence[str]) -> tuple[list[float], list[str]]:
    """Weights and paths of data sets that are given in turn, as to Megatron's `--data-path`.

    Raises:
        RunError: a weight is no number above 0 or far less than the others, or a path has none.
    """
    weights, paths = [], list(given[1::2])
    for text in given[::2]:
        try:
            weights.append(float(text))
        except ValueError:
            weights.append(math.nan)
        if not 0 < weights[-1] < math.inf:
            raise everywhere(
                f"{text!r} is where a weight belongs, and is not a number above 0: write 0.3 code 0.7 books.jsonl"
            )
    if len(paths) < len(weights):
        raise everywhere(f"the weight {given[-1]} has no data behind it: write 0.3 code 0.7 books.jsonl")
    if (whole := sum(weights)) == math.inf:
        raise everywhere("the weights add up to more than a number holds: write 0.3 code 0.7 books.jsonl")
    if (least := min(weights)) < _LEAST_SHARE * whole:
        raise everywhere(f"the weight {least:g} is less than a billionth of all, {whole:g}: leave its data set out")
    return weights, paths


def _of_rows(files: Sequence[Path], tokenizer: Any, room: int, seed: int) -> SequencesOfFiles:
    stream: list[NDArray[Any]] = []
    documents: list[tuple[NDArray[Any], NDArray[Any]]] = []
    ordinals = array("q")
    shortened = dropped = unread = 0
    for ordinal, (where, row) in enumerate(itertools.chain.from_iterable(map(rows, files))):
        if (words := _text(row, tokenizer, where)) is not None:
            if words:
                stream.append(np.array(words, np.int32))
                ordinals.append(ordinal)
            continue
        unread += row.get("text") is not None
        ids, labels = _tokens(row, tokenizer, where)
        shortened += len(ids) > room
        if len(ids) > 1 and any(one != IGNORED_LABEL for one in labels[1:room]):
            documents.append((np.array(ids[:room], np.int32), np.array(labels[:room], np.int32)))
            ordinals.append(ordinal)
        else:
            dropped += 1
    places = _places_of_rows(files, ordinals)
    if stream and documents:
        raise everywhere(f"{files[0].parent}: some rows are text and others conversations: train on one of them")
    if stream:
        starts = np.cumsum([0, *map(len, stream[:-1])], dtype=np.int64)
        return Windows([np.concatenate(stream)], [starts], places, room, seed)
    if not documents and not dropped:
        raise everywhere(f"{files[0]} holds no row, or only empty texts")
    if not documents:
        raise everywhere(f"{files[0]}: no row has a token to predict in its first {room} tokens")
    found = Packed(documents, places, room, seed)
    if shortened:
        found.summary += f"; {shortened:,} are longer and end there"
    if dropped:
        found.summary += f"; {dropped:,} left out: nothing to predict in them"
    if unread:
        found.summary += f"; {unread:,} have text too, which is not read"
    return found


def _text(row: Mapping[str, Any], tokenizer: Any, where: str) -> Ids | None:
    """The tokens of a row of text, with the one that separates it from the next; None where it is none."""
    text = row.get("text")
    if text is None or "input_ids" in row or is_instruction(row):
        return None
    if not isinstance(text, str):
        raise everywhere(f"{where}: text is {shown(text)}: expected a text")
    if not text:
        return []
    if tokenizer is None:
        return list(f"{text}\n\n".encode())
    return [*tokenizer(text)["input_ids"], *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]


def _tokens(row: Mapping[str, Any], tokenizer: Any, where: str) -> tuple[Ids, Ids]:
    if "input_ids" in row:
        return _ready(row, where)
    if is_instruction(row):
        return tokens_and_labels(row, tokenizer, where)
    raise everywhere(
        f"{where} has {', '.join(row) or 'nothing'}: expected text, messages, prompt and completion, instruction and "
        "output, or input_ids"
    )


def _ready(row: Mapping[str, Any], where: str) -> tuple[Ids, Ids]:
    """Tokens and labels that a row has as numbers, without the padding at its ends."""
    ids, columns = _numbers(row, "input_ids", where), {}
    for name in ("labels", "attention_mask"):
        columns[name] = ids if name == "labels" else [1] * len(ids)
        if row.get(name) is not None:
            columns[name] = _numbers(row, name, where)
        if len(columns[name]) != len(ids):
            raise everywhere(
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
            raise everywhere(f"{where}: {name} holds {bad}: expected {allowed.get(name, 'token ids, from 0 on')}")
    if 1 not in mask:
        return [], []
    kept = slice(mask.index(1), len(mask) - mask[::-1].index(1))
    if 0 in mask[kept]:
        raise everywhere(
            f"{where}: attention_mask hides tokens between others; 0 is for padding at the ends of a row: write a row "
            "for each part"
        )
    return ids[kept], labels[kept]


def _numbers(row: Mapping[str, Any], name: str, where: str) -> Ids:
    found = row[name].tolist() if hasattr(row[name], "tolist") else row[name]
    if not isinstance(found, list | tuple) or any(type(one) is not int for one in found):
        raise everywhere(f"{where}: {name} is {shown(found)}: expected a list of whole numbers")
    return list(found)


def documents_of(path: str | Path, tokenizer: str | Path | None = None) -> Iterator[tuple[str, Ids]]:
    """The tokens of each document of text or `input_ids`, with where it stands, for Megatron's files.

    Raises:
        RunError: the data have labels of their own or are Megatron's, or as for `read_training_data`.
    """
    files, words = data_files(path), read_tokenizer(tokenizer)
    if files[0].suffix == ".idx":
        raise everywhere(f"{path} is Megatron's already: copy the files")
    for where, row in itertools.chain.from_iterable(map(rows, files)):
        if (ids := _text(row, words, where)) is None:
            ids, labels = _tokens(row, words, where)
            if ids != labels:
                raise everywhere(
                    f"{where} masks labels, as conversations do: Megatron's files hold tokens alone, and all of them "
                    "would be predicted; write text or input_ids without labels"
                )
        if ids:
            yield where, ids


def samples_before(step: int, plan: Plan, run: Path | None = None) -> int:
    """How many samples the steps before `step` (from 1 on) took.

    Args:
        step: of the run, as its output counts them.
        plan: that the step ran under.
        run: the folder with the run's run.json, which names the batch size of all its steps; None: that of the plan.

    Raises:
        RunError: run.json cannot be read, or says that the step ran under another plan.
    """
    if run is None:
        return plan.spec.training.samples_after(step - 1)
    file = run / RUN
    try:
        said = [
            (int(one["after_step"]), str(one["plan"]), int(one["global_batch_size"]), _ramp(one))
            for one in parse_json(read_text(file))["plans"]
        ]
    except OSError as error:
        raise everywhere(
            f"{file} cannot be read: {error.strerror}; --run names the folder that a run wrote it to"
        ) from None
    except (ValueError, TypeError, KeyError):
        raise everywhere(
            f"{file} does not name plans with after_step and global_batch_size: it is damaged, or of an earlier version"
        ) from None
    if not said or said[0][0]:
        raise everywhere(f"{file} does not begin with the first step: what came before step {step} is not known")
    begun = [one for one in said if one[0] < step]
    if begun[-1][1] != plan.plan_hash:
        raise everywhere(
            f"step {step} ran under plan {begun[-1][1][:12]} ({file}), and this is plan {plan.plan_hash[:12]}: name "
            "the one that ran"
        )
    ends = [*(after for after, *_ in begun[1:]), step - 1]
    taken = 0
    for (after, _, batch, ramp), end in zip(begun, ends, strict=True):
        taken = taken + (end - after) * batch if ramp is None else ramp.samples_after(end - after, batch, taken)
    return taken


def _ramp(ran: Mapping[str, Any]) -> RampupBatchSize | None:
    """How the batch of a plan of run.json grew.

    Raises:
        TypeError, ValueError, KeyError: it is damaged.
    """
    if (given := ran.get("rampup_batch_size")) is None:
        return None
    found = RampupBatchSize(*(int(given[key]) for key in ("start", "increment", "samples")))
    if not found.fits(int(ran["global_batch_size"])):
        raise ValueError(given)
    return found


def ledger(step: int, plan: Plan, data: SequencesOfFiles, before: int) -> dict[str, Any]:
    """The samples of a step as JSON, in the order of their numbers; `before` of them were taken by earlier steps.

    A sample is sequence `sequence` of the data, walked for the time `epoch` (from 1 on). The rank `dp_rank` of dp takes
    it in its micro-batch `micro_batch`. Of a document it has the tokens from the first number to below the second.
    """
    training, dp = plan.spec.training, plan.spec.parallelism.dp
    numbers = range(before, before + training.batch(before))
    parts = data.parts([number % len(data) for number in numbers])
    rows: list[Mapping[str, Any]] = []
    for place, (number, documents) in enumerate(zip(numbers, parts, strict=True)):
        turn, index = place // training.micro_batch_size, number % len(data)
        row = {"sample": number, "epoch": number // len(data) + 1, "sequence": index}
        if isinstance(data, Mixture):
            row |= dict(zip(("data_set", "sequence_in_set"), data.source(index), strict=True))
        row |= {"dp_rank": turn % dp, "micro_batch": turn // dp}
        said = [{"file": one.file, "document": one.document, "tokens": [one.first, one.end]} for one in documents]
        rows.append({**row, "documents": said})
    return {"format": 1, "step": step, "plan": plan.plan_hash, "sequences": len(data), "samples": rows}


def text(found: Mapping[str, Any]) -> str:
    """The ledger as a table, a line for each document of each sample."""
    samples = found["samples"]
    lines = [("sample", "epoch", "dp", "micro-batch", "tokens", "of document")]
    for one in samples:
        head = tuple(str(one[name]) for name in ("sample", "epoch", "dp_rank", "micro_batch"))
        for document in one["documents"]:
            first, end = document["tokens"]
            lines.append((*head, f"{first:,}-{end - 1:,}", document["document"]))
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    rows = ("  ".join([*map(str.rjust, line, widths), line[5]]) for line in lines)
    first, last = samples[0]["sample"], samples[-1]["sample"]
    begin = f"step {found['step']}: samples {first:,} to {last:,}; an epoch has {found['sequences']:,}"
    return "\n".join([begin, *rows])
