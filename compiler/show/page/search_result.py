"""What a search found, as `parcompile search --format json` prints it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parcompile.layout.grid import Axis
from parcompile.show.pictures.front import draw
from parcompile.show.pictures.shapes import NARROW, WIDE
from parcompile.show.pictures.svg import inline
from parcompile.units import format_bytes, format_seconds
from parcompile.user_files import MAX_INDEX_BYTES, parse_json, read_text

from .html import Html, folded, joined, table, tag

_VIRTUAL = "num_virtual_stages_per_pipeline_rank"
SHOWN = 20
"""Layouts that are shown at once; the others are in a part that opens."""


class SearchError(ValueError):
    """A file that is no search's result; the message is meant for the user."""


def read_search(file: Path) -> dict[str, Any]:
    """The result in a file.

    Raises:
        SearchError: it cannot be read, or holds something else.
    """
    try:
        tree = parse_json(read_text(file, MAX_INDEX_BYTES))
    except OSError as error:
        raise SearchError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SearchError(f"{file} is not valid JSON: {error}") from None
    try:
        section(tree, {})
    except (KeyError, TypeError, AttributeError, ValueError):
        raise SearchError(f"{file} is not what `parcompile search SPEC --format json` prints") from None
    return dict(tree)


def section(tree: Mapping[str, Any], plan: Mapping[str, object]) -> Html:
    """The chosen layout, the next ones, and why every other one lost; the row of `plan`'s layout is marked.

    Raises:
        KeyError, TypeError: the tree is not a search's.
    """
    fitting, large, refused = tree["fitting"], tree["too_large"], tree["refused"]
    counts = Counter(one["code"] for one in refused)
    words = (
        f"{len(fitting) + len(large):,} layouts were predicted: {len(fitting):,} fit, {len(large):,} do not; "
        f"{len(refused):,} settings of the axes were refused by rules."
    )
    parts = [tag("p", words), *_front(tree)]
    for title, found in (("Layouts that fit, the chosen one first", fitting), ("Layouts that do not fit", large)):
        if found:
            parts.append(_layouts(title, found[:SHOWN], plan))
        if len(found) > SHOWN:
            rest = _layouts(title, found[SHOWN:], plan)
            parts.append(folded(f"{len(found) - SHOWN:,} more", rest))
    if refused:
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(counts.items()))
        rows = [("layout", "rule", "why"), *((_name(one["layout"]), one["code"], one["message"]) for one in refused)]
        parts.append(folded(f"Refused by rules ({codes})", table(rows, caption="Settings that rules refuse")))
    return joined(parts)


def _front(tree: Mapping[str, Any]) -> list[Html]:
    """Time against memory, wide and narrow."""
    if not tree["fitting"]:
        remedies = "".join(f" It would with {_settings(one)}." for one in tree.get("remedies", ()))
        return [tag("p", f"Nothing fits.{remedies}")]
    if "pareto_front" not in tree:
        return []  # written by a version that did not say
    wide, narrow = (draw(tree, width) for width in (WIDE, NARROW))
    return [
        tag("div", Html(inline(wide)), class_="picture wide"),
        tag("div", Html(inline(narrow)), class_="picture narrow"),
        tag("p", wide.description, class_="note"),
    ]


def _settings(remedy: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in remedy["settings"].items())


def _layouts(title: str, found: list[dict[str, Any]], plan: Mapping[str, object]) -> Html:
    rows: list[tuple[str, ...]] = [("layout", "step", "tokens/s per GPU", "memory", "fits", "why it lost")]
    for one in found:
        chance = one["probability_to_fit"]
        layout = {_VIRTUAL: 1, **one["layout"]}
        same = plan and all({_VIRTUAL: 1, **plan}.get(name) == value for name, value in layout.items())
        here = " (this plan)" if same else ""
        rows.append(
            (
                _name(one["layout"]) + here,
                format_seconds(one["step_seconds"]),
                f"{one['tokens_per_second_per_gpu']:,.0f}",
                format_bytes(one["peak_bytes"]),
                "-" if chance is None else f"{chance:.0%}",
                one["reason"] or "chosen",
            )
        )
    return table(rows, caption=title)


def _name(layout: Mapping[str, object]) -> str:
    """A layout in few words: its axes, then what else it sets."""
    axes = [f"{axis} {layout[axis]}" for axis in (Axis.TP, Axis.CP, Axis.EP, Axis.PP, Axis.DP) if axis in layout]
    more = []
    for name, value in layout.items():
        if name in _WORDS and value not in (False, "none"):
            more.append(_WORDS[name].format(", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value))
    return ", ".join([" · ".join(axes), *more])


_WORDS = {
    _VIRTUAL: "{} virtual stages",
    "num_layers_in_first_pipeline_stage": "{} layers in the first stage",
    "num_layers_in_last_pipeline_stage": "{} in the last",
    "account_for_embedding_in_pipeline_split": "embedding as a layer",
    "account_for_loss_in_pipeline_split": "loss as a layer",
    "micro_batch_size": "micro {}",
    "sequence_parallel": "sequence parallel",
    "activation_checkpointing": "recompute {}",
    "gradient_accumulation_dtype": "sums in {}",
    "order": "order {}",
    "cp_implementation": "{}",
}
"""How a table says what a search may set besides the axes."""
