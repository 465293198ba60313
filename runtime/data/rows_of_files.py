"""Rows of instruction data as tokens and labels: only answers are predicted, prompts are masked."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parcompile.project.rows import ANSWERS, PROMPTS, TURNS, DataError
from parcompile.project.rows import data_files as files_of
from parcompile.project.rows import rows as rows_of
from parcompile.runtime.errors import everywhere
from parcompile.runtime.labels import IGNORED_LABEL


def data_files(path: str | Path) -> list[Path]:
    """The files of a path, as `parcompile.project.rows` finds them.

    Raises:
        RunError: there is none, or there are several formats.
    """
    with _everywhere():
        return files_of(path)


def rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a file, each with where it is, for messages. A text file is one row.

    Raises:
        RunError: the file is not what its ending says, or a package that reads it is missing.
    """
    with _everywhere():
        yield from rows_of(file)


@contextlib.contextmanager
def _everywhere() -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise everywhere(str(error)) from None


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
            "found: mark it in the template with {% generation %} … {% endgeneration %}"
        )
    return whole, spans


def _masked(ids: Ids, answers: Sequence[bool]) -> Ids:
    return [one if kept else IGNORED_LABEL for one, kept in zip(ids, answers, strict=True)]
