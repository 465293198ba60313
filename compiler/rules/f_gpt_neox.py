"""A gpt-neox configuration on its own: DeepSpeed's keys in it are checked, gpt-neox's own are not known here."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.backends.kinds import NEOX_KEYS
from parcompile.diagnostics import Severity

from .file_registry import GPT_NEOX, Settings, file_rule
from .registry import Finding


@file_rule(
    "F201",
    GPT_NEOX,
    "a gpt-neox configuration is checked in part",
    """A gpt-neox file holds DeepSpeed's keys beside its own. The values of DeepSpeed's are checked; keys that DeepSpeed
    does not know are taken for gpt-neox's, a misspelt one too.""",
    wrong={"pipe_parallel_size": 1, "model_parallel_size": 2, "train_micro_batch_size_per_gpu": 4},
    right={"train_micro_batch_size_per_gpu": 4},
    severity=Severity.INFO,
)
def keys_of_its_own(settings: Settings) -> Iterator[Finding]:
    """Says it, at the key by which the file is told."""
    told = next((key for key in settings.tree if key.replace("-", "_") in NEOX_KEYS), "")
    if told:
        yield Finding(
            "this is a gpt-neox configuration; only its DeepSpeed keys are checked",
            (told,),
            help="`parcompile import` turns it into a spec, which is checked whole",
        )
