"""docs/models.md: which model types work, and why others are refused. `python .ci/pages/models_page.py` writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from parcompile.model.catalogue import REASONS, ModelType, model_types, transformers_version
from parcompile.model.describing import AXES, kinds_of, presets_of, summary_of

_START = """\
# Models

Causal language models of transformers {version}, by model type, as `parcompile models` lists them; `parcompile models
NAME` tells of one. This page is written by `python .ci/pages/models_page.py` from the same data.

A type that works runs with {axes}, and a mixture of experts with ep.
In tp 2, cp 2, tp 2 × cp 2 with sequence parallelism, and pp 2, AdamW steps of a tiny model with its windows,
soft-caps, biases and norms switched on give the losses, gradient norms and parameters of the original in one process:
within 1e-5, or within ten times what a change of 1e-7 of the weights does to the original itself
(`tests/runtime/test_families.py`; `--family TYPE` or `--family all` takes a type in all of them). [Drawn
configurations](configurations.md) vary every key that changes numbers.
Everything else is refused: the compiler does not accept the model type (rule S003), or the runtime refuses the plan
(rule X004). The message gives the reason, what to do instead and the nearest type that works.

{summary}
"""


def reference() -> str:
    """The whole document."""
    types = list(model_types().values())
    works = [one for one in types if one.works]
    start = _START.format(version=transformers_version(), axes=AXES, summary=summary_of(types))
    return "\n".join([start, *_works(works), *_texts(types), *_refused(types)]) + "\n"


def _works(types: list[ModelType]) -> Iterator[str]:
    yield "## Types that work\n"
    yield "| model type | what it is made of | presets |"
    yield "|---|---|---|"
    for one in types:
        yield f"| {one.name} | {', '.join(kinds_of(one))} | {', '.join(presets_of(one.name))} |"


def _texts(types: list[ModelType]) -> Iterator[str]:
    chosen = [one for one in types if one.text_works]
    if not chosen:
        return
    yield "\n## Multimodal models whose text part works\n"
    yield "The text part is planned and trained alone; [the rest is left as it is](adapter.md#multimodal-models).\n"
    yield "| model type | its text part |"
    yield "|---|---|"
    for one in chosen:
        yield f"| {one.name} | {one.text} |"


def _refused(types: list[ModelType]) -> Iterator[str]:
    yield "\n## Types that are refused, by reason"
    titles = dict.fromkeys(reason.title for reason in REASONS.values())
    for title in titles:
        chosen = [one for one in types if one.reason and one.reason.title == title and not one.text_works]
        if chosen:
            yield f"\n### {title[0].upper()}{title[1:]}\n"
        for why in dict.fromkeys(one.reason.why for one in chosen if one.reason):
            names = [_name(one) for one in chosen if one.reason and one.reason.why == why]
            yield f"- {', '.join(names)} — {why[0].upper()}{why[1:]}."


def _name(one: ModelType) -> str:
    said = [f"text part {one.text}"] if one.text else []
    said += [f"nearest: {one.nearest}"] if one.nearest else []
    return f"{one.name} ({'; '.join(said)})" if said else one.name


if __name__ == "__main__":
    sys.stdout.write(reference())
