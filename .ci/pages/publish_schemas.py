"""A hook of mkdocs: the JSON Schemas and their draft-07 twins in the site, where their `$id` says that they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parcompile import schema
from parcompile.schema import draft07

FOLDER = "schemas/v1"


def on_post_build(config: dict[str, Any]) -> None:
    """Writes them when the pages are built."""
    folder = Path(config["site_dir"]) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name in schema.names():
        (folder / f"{name}.schema.json").write_text(schema.text(name), encoding="utf-8")
        twin = json.dumps(draft07(schema.load(name)), indent=2, ensure_ascii=False)
        (folder / f"{name}.draft-07.schema.json").write_text(twin + "\n", encoding="utf-8")
