"""The rows of data files: of text, JSON lines, parquet, and folders that `datasets` saved."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from parcompile.runtime.errors import RunError


def unusable(message: str) -> RunError:
    """Every rank reads the same files, and finds the same."""
    return RunError(message, everywhere=True)


FORMATS = (".txt", ".jsonl", ".parquet", ".idx")


def data_files(path: str | Path) -> list[Path]:
    """The files of a path, sorted: itself, or all of its folder that have one of `FORMATS`, of one of them only.

    Raises:
        RunError: there is none, or there are several formats.
    """
    path = Path(path)
    path = path.with_suffix(".idx") if path.suffix == ".bin" or not path.exists() else path
    if path.is_file():
        if path.suffix not in FORMATS and path.suffix != ".json":
            raise unusable(f"{path}: training data ends in {', '.join(FORMATS)} or .bin")
        return [path]
    if not path.is_dir():
        raise unusable(f"there is no training data {path.with_suffix('')}: no file or folder of it")
    if (path / "dataset_info.json").exists():
        return [path]
    found = sorted(one for one in path.rglob("*") if one.suffix in FORMATS)
    formats = sorted({one.suffix for one in found})
    if len(formats) != 1:
        held = f"files of several formats ({', '.join(formats)}): name one of them" if formats else "none of them"
        raise unusable(f"{path}: training data are files of {', '.join(FORMATS)}; the folder holds {held}")
    return found


def rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a file, each with where it is, for messages. A text file is one row.

    Raises:
        RunError: the file is not what its ending says, or a package that reads it is missing.
    """
    if file.is_dir():
        yield from _numbered(file, _saved(file))
    elif file.suffix == ".txt":
        yield str(file), {"text": file.read_text(encoding="utf-8")}
    elif file.suffix == ".parquet":
        yield from _numbered(file, _parquet(file))
    else:
        yield from _json_lines(file)


def _numbered(file: Path, found: Iterator[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, row in enumerate(found):
        yield f"{file} row {number}", row


def _json_lines(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """One object a line; a file that ends in .json may also be one list of them."""
    with file.open(encoding="utf-8") as stream:
        if file.suffix == ".json" and stream.read(1) == "[":
            stream.seek(0)
            yield from ((f"{file} row {number}", row) for number, row in enumerate(json.load(stream)))
            return
        stream.seek(0)
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise unusable(f"{file}:{number} is not JSON: {error}; each line is one object") from None
            if not isinstance(row, dict):
                raise unusable(f"{file}:{number} is no JSON object: {line.strip()[:60]}")
            yield f"{file}:{number}", row


def _parquet(file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise unusable(f"reading {file} needs pyarrow: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches():
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise unusable(f"{file} is no parquet file: {error}") from None


def _saved(folder: Path) -> Iterator[Mapping[str, Any]]:
    try:
        import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise unusable(f"reading {folder} needs datasets: pip install datasets") from None
    yield from datasets.load_from_disk(str(folder))
