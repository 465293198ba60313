"""The resolved values of a spec, and where each comes from."""

from __future__ import annotations

import json

from parcompile.pipeline import Checked
from parcompile.spec.resolve import Unavailable


def values_of(checked: Checked) -> dict[str, dict[str, object]]:
    """Each resolved value by its dotted path: the value, its origin, how it came about, and its line."""
    resolution, document = checked.resolution, checked.document
    if resolution is None or document is None:
        return {}
    try:
        provenance = resolution.spec().provenance
    except Unavailable:
        provenance = dict(sorted(resolution.provenance.items()))
    values: dict[str, dict[str, object]] = {}
    for path, one in provenance.items():
        steps = tuple(path.split("."))
        line = document.position(steps).line if document.place(steps) is not None else None
        values[path] = {"value": one.value, "origin": one.origin.value, "detail": one.detail, "line": line}
    return values


def table_of(file: str, values: dict[str, dict[str, object]]) -> str:
    """The same as rows: path, value, where it comes from."""
    rows = []
    for path, one in values.items():
        text = json.dumps(one["value"], ensure_ascii=False, default=str)
        if len(text) > 40 or isinstance(one["value"], dict):
            continue
        how = str(one["origin"])
        if one["origin"] == "spec":
            how = f"line {one['line']}" if one["line"] else "the spec"
        elif one["detail"]:
            how += f": {one['detail']}"
        rows.append((path, text, how))
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [f"{path:<{widths[0]}}  {text:<{widths[1]}}  {how}".rstrip() for path, text, how in rows]
    return "\n".join([f"{file}:", *("  " + line for line in lines), ""])
