"""Rows of instruction data as tokens and labels: only answers are predicted, prompts are masked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from parcompile.runtime.labels import IGNORED_LABEL

from .rows_of_files import unusable

_ROLES = {"human": "user", "gpt": "assistant"}
"""Of ShareGPT, and what they are called in chat templates."""
_GENERATION = re.compile(r"\{%-?\s*generation\b")
Ids = list[int]


def is_instruction(row: Mapping[str, Any]) -> bool:
    """Whether a row has a prompt and an answer, in one of the usual forms."""
    return bool({"messages", "conversations", "completion", "response", "output"} & row.keys())


def tokens_and_labels(row: Mapping[str, Any], tokenizer: Any, where: str) -> tuple[Ids, Ids]:
    """Token ids of a row, and their labels: -100 for all that is not an answer.

    Rows are `messages` (or ShareGPT's `conversations`), `prompt` with `completion` or `response`, or Alpaca's
    `instruction`, `input` and `output`. The tokenizer's chat template says how they are written; without one, a prompt
    and its answer follow each other, with the end-of-sequence token behind.

    Raises:
        RunError: the row is none of these, or the tokenizer cannot say which of its tokens are answers.
    """
    if tokenizer is None:
        raise unusable(f"{where} is a conversation: name the tokenizer with its chat template (--tokenizer)")
    messages = _messages(row, where)
    if tokenizer.chat_template is None:
        return _without_template(messages, tokenizer, where)
    if _GENERATION.search(str(tokenizer.chat_template)):
        found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        answers = found["assistant_masks"]
        return found["input_ids"], _masked(found["input_ids"], [bool(one) for one in answers])
    text, spans = _spans(messages, tokenizer, where)
    if not tokenizer.is_fast:
        raise unusable("masking prompts needs the places of tokens, of a fast tokenizer (tokenizer.json)")
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    answers = [any(start <= at < stop for start, stop in spans) for at, _ in found["offset_mapping"]]
    return found["input_ids"], _masked(found["input_ids"], answers)


def _messages(row: Mapping[str, Any], where: str) -> Sequence[Mapping[str, str]]:
    turns = row.get("messages") or row.get("conversations")
    if turns:
        if "from" in turns[0]:
            turns = [{"role": _ROLES.get(one["from"], one["from"]), "content": one["value"]} for one in turns]
        if not any(one.get("role") == "assistant" for one in turns):
            raise unusable(f"{where} has no message with the role assistant: nothing to train on")
        return turns
    prompt = row.get("prompt", row.get("instruction"))
    answer = next((row[name] for name in ("completion", "response", "output") if name in row), None)
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise unusable(
            f"{where} has {', '.join(row)}: expected messages, or prompt and completion, or instruction and output",
        )
    if row.get("input"):
        prompt = f"{prompt}\n\n{row['input']}"
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _without_template(messages: Sequence[Mapping[str, str]], tokenizer: Any, where: str) -> tuple[Ids, Ids]:
    if [one["role"] for one in messages] != ["user", "assistant"]:
        raise unusable(f"{where} has {len(messages)} messages, and the tokenizer has no chat template for them")
    prompt = tokenizer(messages[0]["content"])["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    answer = tokenizer(messages[1]["content"], add_special_tokens=False)["input_ids"] + end
    return prompt + answer, [IGNORED_LABEL] * len(prompt) + answer


def _spans(messages: Sequence[Mapping[str, str]], tokenizer: Any, where: str) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and where its answers are; of a template that rewrites earlier turns, the last."""

    def text(count: int, *, prompt: bool = False) -> str:
        found: str = tokenizer.apply_chat_template(messages[:count], add_generation_prompt=prompt, tokenize=False)
        return found

    whole, spans = text(len(messages)), []
    for number, one in enumerate(messages):
        if one["role"] != "assistant":
            continue
        before, behind = text(number, prompt=True), text(number + 1)
        if whole.startswith(behind) and behind.startswith(before):
            spans.append((len(before), len(behind)))
    if not spans:
        raise unusable(
            f"{where}: the chat template writes a prompt otherwise when an answer follows, so that the answer is not "
            "found: mark it in the template with {% generation %} … {% endgeneration %}",
        )
    return whole, spans


def _masked(ids: Ids, answers: Sequence[bool]) -> Ids:
    return [one if kept else IGNORED_LABEL for one, kept in zip(ids, answers, strict=True)]
