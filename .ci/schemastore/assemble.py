"""The files of a pull request to SchemaStore, in its folders: `python .ci/schemastore/assemble.py FOLDER`.

FOLDER is a checkout of SchemaStore, or an empty folder. `catalog.json` holds the entries for its catalog.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from parcompile import schema
from parcompile.schema import draft07

HERE = Path(__file__).parent
SCHEMAS = {"parcompile": "spec", "deepspeed-config": "ds_config"}


def _of_everybody(node: Any) -> Any:
    """A schema that also takes "auto" where a tool in front of DeepSpeed replaces it, and has standard keywords only.

    The package's own schema says what DeepSpeed itself takes; `parcompile check` knows who replaces "auto" where.
    """
    if isinstance(node, list):
        return [_of_everybody(one) for one in node]
    if not isinstance(node, dict):
        return node
    found = {key: _of_everybody(value) for key, value in node.items() if not key.startswith("x-")}
    if "x-filled-by" not in node:
        return found
    said = {key: found.pop(key) for key in ("title", "description", "default") if key in found}
    return {**said, "anyOf": [found, {"const": "auto"}]}


def assemble(target: Path) -> None:
    """Writes schemas, positive and negative files, and the entries of the catalog."""
    entries = {Path(one["url"]).stem: one for one in json.loads((HERE / "catalog.json").read_text(encoding="utf-8"))}
    for name, source in SCHEMAS.items():
        twin = {**_of_everybody(draft07(schema.load(source))), "$id": entries[name]["url"]}
        file = target / "src" / "schemas" / "json" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(twin, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        for kind in ("test", "negative_test"):
            shutil.copytree(HERE / kind / name, target / "src" / kind / name, dirs_exist_ok=True)
    shutil.copy(HERE / "catalog.json", target / "parcompile-catalog-entries.json")


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
