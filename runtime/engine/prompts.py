"""Prompts that a run continues while it trains: people read what the model has learnt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from parcompile.plan import Plan
from parcompile.runtime.data.training_files import read_tokenizer
from parcompile.runtime.errors import RunError


class Prompts:
    """Texts, and how the model goes on from them: the most likely token each time, the same in every layout.

    Args:
        texts: the prompts.
        plan: the plan of the run.
        tokenizer: a folder with a Hugging Face tokenizer. None: a token is a byte.
        new_tokens: the most tokens that a prompt is continued by; there are fewer where the model ends its text, or
            where prompt and text fill a sequence of the plan.

    Raises:
        RunError: the layers are in stages, or which prompt cannot be continued, and why.
    """

    def __init__(
        self, texts: Sequence[str], plan: Plan, tokenizer: str | Path | None = None, new_tokens: int = 64
    ) -> None:
        self.texts, self._words = tuple(texts), read_tokenizer(tokenizer)
        room, vocabulary = plan.spec.training.sequence_length, plan.spec.model.shape.vocab_size
        if texts and (pp := plan.spec.parallelism.pp) > 1:
            raise RunError(
                f"a plan with pp {pp} continues no prompts while it trains, since each stage has a part of the layers: "
                "leave the prompts out, and generate with the exported model",
                everywhere=True,
            )
        self._tokens = [self._encoded(text) for text in self.texts]
        for text, tokens in zip(self.texts, self._tokens, strict=True):
            wrong = ""
            if not tokens:
                wrong = "has no token: write some text"
            elif len(tokens) >= room:
                wrong = f"has {len(tokens)} tokens, and sequence_length is {room}: no token can follow"
            elif max(tokens) >= vocabulary:
                wrong = (
                    f"has the token {max(tokens)}, and the model's vocabulary {vocabulary}: name the model's tokenizer"
                )
            if wrong:
                raise RunError(f"the prompt {text[:40]!r} {wrong}", everywhere=True)
        self._new = [min(new_tokens, room - len(tokens)) for tokens in self._tokens]

    def continued(self, engine: Any) -> dict[str, str]:
        """What the model adds to each prompt. Every rank calls it, and gets the same."""
        found = {}
        for text, tokens, new in zip(self.texts, self._tokens, self._new, strict=True):
            given = torch.tensor([tokens], device=engine.device)
            whole = engine.module.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=new,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
            )
            found[text] = self._decoded(whole[0, len(tokens) :].tolist())
        return found

    def _encoded(self, text: str) -> list[int]:
        return list(text.encode()) if self._words is None else list(self._words.encode(text))

    def _decoded(self, tokens: list[int]) -> str:
        if self._words is not None:
            return str(self._words.decode(tokens, skip_special_tokens=True))
        return bytes(one for one in tokens if one < 256).decode("utf-8", "replace")
