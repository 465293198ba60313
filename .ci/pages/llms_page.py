"""docs/llms.txt: the pages of the documentation for language models. `python .ci/pages/llms_page.py` writes it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"

_START = """\
# parcompile

> One JSON spec in; a checked, costed, launchable parallel training plan out; and a runtime that executes exactly that
> plan inside a DeepSpeed engine: tensor, context (ring attention), pipeline, expert and data parallelism with ZeRO.

`parcompile check SPEC --format json` prints every mistake with its place and fixes, `parcompile explain CODE` explains
a code, `parcompile schema spec` prints the JSON Schema of a spec, and `import parcompile` offers the same to Python.

## Pages
"""


def reference() -> str:
    """The whole file: a line for each page, in the order of the site."""
    order = re.findall(r"(\w+)\.md$", (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    lines = [f"- [{title}]({name}.md): {first}" for name in order for title, first in [_summary(name)]]
    return "\n".join([_START, *lines]) + "\n"


def _summary(name: str) -> tuple[str, str]:
    """The title of a page and its first sentence."""
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    body = re.sub(r"```.*?```", "", text.partition("\n")[2], flags=re.DOTALL)
    prose = next(
        part
        for part in re.split(r"\n\s*\n", body)
        if part.strip() and not re.match(r"\s*(#|\||!\[|-|Regenerate)", part)
    )
    plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(prose.split()))
    sentence = re.match(r".+?[.:](?=\s|$)", plain)
    assert title is not None
    return title[1], (sentence[0] if sentence else plain).rstrip(":")


if __name__ == "__main__":
    sys.stdout.write(reference())
