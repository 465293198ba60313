"""The rows of data files: of text, JSON lines, parquet, and folders that `datasets` saved.

Rows of instruction data as tokens and labels: only answers are predicted, prompts are masked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parcompile.project import ANSWERS, PROMPTS, TURNS
from parcompile.runtime.errors import everywhere
from parcompile.runtime.labels import IGNORED_LABEL

FORMATS = (".txt", ".jsonl", ".parquet", ".idx")


def data_files(path: str | Path) -> list[Path]:
    """The files of a path, sorted: itself, or all of its folder that have one of `FORMATS`, of one of them only.

    Raises:
        RunError: there is none, or there are several formats.
    """
    path = Path(path)
    if path.suffix == ".bin" and path.is_file():
        return [path.with_suffix(".idx")]
    if not path.exists() and (index := Path(f"{path}.idx")).is_file():
        return [index]
    if path.is_file():
        if path.suffix not in FORMATS and path.suffix != ".json":
            raise everywhere(f"{path}: training data ends in {', '.join(FORMATS)} or .bin")
        return [path]
    if not path.is_dir():
        raise everywhere(f"there is no training data {path}: no file or folder has this name")
    if (path / "dataset_info.json").exists():
        return [path]
    if (path / "dataset_dict.json").exists():
        splits = sorted(one.parent for one in path.glob("*/dataset_info.json"))
        raise everywhere(f"{path} holds a data set for each split: name one of {', '.join(map(str, splits)) or 'them'}")
    found = sorted(one for one in path.rglob("*") if one.suffix in FORMATS)
    formats = sorted({one.suffix for one in found})
    if len(formats) != 1:
        held = f"files of several formats ({', '.join(formats)}): name one of them" if formats else "none of them"
        raise everywhere(f"{path}: training data are files of {', '.join(FORMATS)}; the folder holds {held}")
    return found


def rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a file, each with where it is, for messages. A text file is one row.

    Raises:
        RunError: the file is not what its ending says, or a package that reads it is missing.
    """
    try:
        if file.is_dir():
            yield from _numbered(file, _saved(file))
        elif file.suffix == ".txt":
            yield str(file), {"text": "".join(line for _, line in _lines(file))}
        elif file.suffix == ".parquet":
            yield from _numbered(file, _parquet(file))
        else:
            yield from _json(file)
    except OSError as error:
        raise everywhere(f"{file} cannot be read: {error.strerror or error}") from None


def _numbered(file: Path, found: Iterator[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, row in enumerate(found):
        yield f"{file} row {number}", row


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1; a byte order mark at the beginning is no text."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            yield number, _decoded(line, number, file)


def _decoded(line: bytes, number: int, file: Path) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise everywhere(
            f"{file}:{number} is not UTF-8: byte {error.start + 1} of the line is 0x{line[error.start]:02x}; convert "
            "the file (iconv -f LATIN1 -t UTF-8)"
        ) from None


def _json(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """One object a line; a file that ends in .json may also be one list of them."""
    if file.suffix == ".json" and next((line for _, line in _lines(file) if line.strip()), "").lstrip()[:1] == "[":
        listed = _parsed("".join(line for _, line in _lines(file)), str(file), "the file is one list of objects")
        found = ((f"{file} row {number}", row) for number, row in enumerate(listed))
    else:
        lines = ((f"{file}:{number}", line) for number, line in _lines(file) if line.strip())
        found = ((where, _parsed(line, where, "each line is one object")) for where, line in lines)
    for where, row in found:
        if not isinstance(row, dict):
            raise everywhere(f"{where} is no JSON object: {json.dumps(row)[:60]}")
        yield where, row


def _parsed(text: str, where: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f":{error.lineno}" if text.rstrip().count("\n") else ""
        raise everywhere(f"{where}{line} is not JSON: {error.msg} at column {error.colno}; {expected}") from None
    except (ValueError, RecursionError) as error:
        raise everywhere(f"{where} is not JSON that can be read: {error}; {expected}") from None


def _parquet(file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        import pyarrow  # type: ignore[import-not-found, import-untyped, unused-ignore]
        from pyarrow import parquet  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise everywhere(f"reading {file} needs pyarrow: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches():
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise everywhere(f"{file} is no parquet file: {error}") from None


def _saved(folder: Path) -> Iterator[Mapping[str, Any]]:
    try:
        import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise everywhere(f"reading {folder} needs datasets: pip install datasets") from None
    try:
        yield from datasets.load_from_disk(str(folder)).with_format(None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise everywhere(f"{folder} is no data set that save_to_disk wrote: {error}") from None


_ROLES = {"human": "user", "gpt": "assistant"}
"""Of ShareGPT, and what they are called in chat templates."""
_GENERATION = re.compile(r"\{%-?\s*generation\b")
Ids = list[int]


def tokens_and_labels(row: Mapping[str, Any], tokenizer: Any, where: str) -> tuple[Ids, Ids]:
    """Token ids of a row, and their labels: -100 for all that is not an answer.

    Rows are `messages` (or ShareGPT's `conversations`), `prompt` with `completion` or `response`, or Alpaca's
    `instruction`, `input` and `output`. The tokenizer's chat template says how they are written; without one, a prompt
    and its answer follow each other, with the end-of-sequence token behind.

    Raises:
        RunError: the row is none of these, or the tokenizer cannot say which of its tokens are answers.
    """
    if tokenizer is None:
        raise everywhere(f"{where} is a conversation: name the tokenizer with its chat template (--tokenizer)")
    messages = _messages(row, where)
    if tokenizer.chat_template is None:
        return _without_template(messages, tokenizer, where)
    if _GENERATION.search(str(tokenizer.chat_template)):
        found = _written(tokenizer, messages, where, return_dict=True, return_assistant_tokens_mask=True)
        answers = found["assistant_masks"]
        return found["input_ids"], _masked(found["input_ids"], [bool(one) for one in answers])
    text, spans = _spans(messages, tokenizer, where)
    if not tokenizer.is_fast:
        raise everywhere("masking prompts needs the offsets of tokens, which a fast tokenizer has (tokenizer.json)")
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    answers = [any(start <= at < stop for start, stop in spans) for at, _ in found["offset_mapping"]]
    return found["input_ids"], _masked(found["input_ids"], answers)


def _messages(row: Mapping[str, Any], where: str) -> Sequence[Mapping[str, Any]]:
    name = next((name for name in TURNS if row.get(name) is not None), None)
    if name is not None:
        turns = _turns(row[name], name, where)
        if not any(one["role"] == "assistant" for one in turns):
            raise everywhere(f"{where} has no message with the role assistant: nothing to train on")
        return turns
    asked, answered = (next((name for name in names if row.get(name) is not None), "") for names in (PROMPTS, ANSWERS))
    for name in (asked, answered):
        if not isinstance(row[name], str):
            raise everywhere(f"{where}: {name} is {shown(row[name])}: expected a text")
    prompt = f"{row[asked]}\n\n{row['input']}" if row.get("input") else row[asked]
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": row[answered]}]


def _turns(given: Any, name: str, where: str) -> list[Mapping[str, Any]]:
    """Messages with role and content; ShareGPT's have `from` and `value`."""
    if not isinstance(given, list | tuple):
        raise everywhere(f"{where}: {name} is {shown(given)}: expected a list of messages")
    found: list[Mapping[str, Any]] = []
    for number, one in enumerate(given):
        keys = ("from", "value") if isinstance(one, Mapping) and "role" not in one else ("role", "content")
        if not isinstance(one, Mapping) or not isinstance(one.get(keys[0]), str) or keys[1] not in one:
            raise everywhere(
                f'{where}: {name}[{number}] is {shown(one)}: expected {{"role": "user", "content": "..."}}, or '
                '{"from": "human", "value": "..."}'
            )
        found.append(
            {"role": _ROLES.get(one["from"], one["from"]), "content": one["value"]} if keys[0] == "from" else one
        )
    return found


def shown(value: Any) -> str:
    """A value of a row for a message, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _written(tokenizer: Any, messages: Sequence[Mapping[str, Any]], where: str, **options: Any) -> Any:
    """What the chat template makes of messages; a template is a program of the tokenizer's author, and may fail."""
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise everywhere(f"{where}: the tokenizer's chat template does not accept these messages ({why})") from None


def _without_template(messages: Sequence[Mapping[str, Any]], tokenizer: Any, where: str) -> tuple[Ids, Ids]:
    if [one["role"] for one in messages] != ["user", "assistant"]:
        roles = ", ".join(one["role"] for one in messages)
        raise everywhere(
            f"{where} has the messages {roles}, and the tokenizer has no chat template: without one a row is one user "
            "and one assistant; name a tokenizer with a chat template (--tokenizer)"
        )
    for one in messages:
        if not isinstance(one["content"], str):
            raise everywhere(f"{where}: the content of {one['role']} is {shown(one['content'])}: expected a text")
    prompt = tokenizer(messages[0]["content"])["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    answer = tokenizer(messages[1]["content"], add_special_tokens=False)["input_ids"] + end
    return prompt + answer, [IGNORED_LABEL] * len(prompt) + answer


def _spans(messages: Sequence[Mapping[str, Any]], tokenizer: Any, where: str) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and where its answers are; of a template that rewrites earlier turns, the last."""

    def text(count: int, *, prompt: bool = False) -> str:
        found: str = _written(tokenizer, messages[:count], where, add_generation_prompt=prompt, tokenize=False)
        return found

    whole, spans = text(len(messages)), []
    for number, one in enumerate(messages):
        if one["role"] != "assistant":
            continue
        before, behind = text(number, prompt=True), text(number + 1)
        if whole.startswith(behind) and behind.startswith(before):
            spans.append((len(before), len(behind)))
    if not spans:
        raise everywhere(
            f"{where}: the chat template writes a prompt otherwise when an answer follows, so that the answer is not "
            "found: mark it in the template with {% generation %} … {% endgeneration %}",
        )
    return whole, spans


def _masked(ids: Ids, answers: Sequence[bool]) -> Ids:
    return [one if kept else IGNORED_LABEL for one, kept in zip(ids, answers, strict=True)]
