"""The rows of a user's data: of text, JSON lines, parquet, and folders that `datasets` saved.

Training reads them here, and so does who makes a project for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TURNS, PROMPTS, ANSWERS = (
    ("messages", "conversations"),
    ("prompt", "instruction"),
    ("completion", "response", "output"),
)


def is_instruction(row: Mapping[str, Any]) -> bool:
    """Whether a row has turns, or a prompt and an answer, in one of the usual forms."""

    def has(names: tuple[str, ...]) -> bool:
        return any(row.get(name) is not None for name in names)

    return has(TURNS) or (has(PROMPTS) and has(ANSWERS))


class DataError(ValueError):
    """Data cannot be read; the message is meant for the user."""


class MissingPackageError(DataError):
    """A package that reads them is not installed here."""


FORMATS = (".txt", ".jsonl", ".parquet", ".idx")


def data_files(path: str | Path) -> list[Path]:
    """The files of a path, sorted: itself, or all of its folder that have one of `FORMATS`, of one of them only.

    Raises:
        DataError: there is none, or there are several formats.
    """
    path = Path(path)
    if path.suffix == ".bin" and path.is_file():
        return [path.with_suffix(".idx")]
    if not path.exists() and (index := Path(f"{path}.idx")).is_file():
        return [index]
    if path.is_file():
        if path.suffix not in FORMATS and path.suffix != ".json":
            raise DataError(f"{path}: training data ends in {', '.join(FORMATS)}, .json or .bin")
        return [path]
    if not path.is_dir():
        raise DataError(f"there is no training data {path}: no file or folder has this name")
    if (path / "dataset_info.json").exists():
        return [path]
    if (path / "dataset_dict.json").exists():
        splits = sorted(one.parent for one in path.glob("*/dataset_info.json"))
        raise DataError(f"{path} holds a data set for each split: name one of {', '.join(map(str, splits)) or 'them'}")
    found = sorted(one for one in path.rglob("*") if one.suffix in FORMATS)
    formats = sorted({one.suffix for one in found})
    if len(formats) != 1:
        held = f"files of several formats ({', '.join(formats)}): name one of them" if formats else "none of them"
        raise DataError(f"{path}: training data are files of {', '.join(FORMATS)}; the folder holds {held}")
    return found


def rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a file, each with where it is, for messages. A text file is one row.

    Raises:
        DataError: the file is not what its ending says, or a package that reads it is missing.
    """
    try:
        if file.is_dir():
            yield from _numbered(file, _saved(file))
        elif file.suffix == ".txt":
            yield str(file), {"text": "".join(line for _, line in _lines(file))}
        elif file.suffix == ".parquet":
            yield from _numbered(file, _parquet(file))
        else:
            yield from _json(file)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None


def _numbered(file: Path, found: Iterator[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, row in enumerate(found):
        yield f"{file} row {number}", row


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1; a byte order mark at the beginning is no text."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            yield number, _decoded(line, number, file)


def _decoded(line: bytes, number: int, file: Path) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}:{number} is not UTF-8: byte {error.start + 1} of the line is 0x{line[error.start]:02x}; convert "
            "the file (iconv -f LATIN1 -t UTF-8)"
        ) from None


def _json(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """One object a line; a file that ends in .json may also be one list of them."""
    if file.suffix == ".json" and next((line for _, line in _lines(file) if line.strip()), "").lstrip()[:1] == "[":
        listed = _parsed("".join(line for _, line in _lines(file)), str(file), "the file is one list of objects")
        found = ((f"{file} row {number}", row) for number, row in enumerate(listed))
    else:
        lines = ((f"{file}:{number}", line) for number, line in _lines(file) if line.strip())
        found = ((where, _parsed(line, where, "each line is one object")) for where, line in lines)
    for where, row in found:
        if not isinstance(row, dict):
            raise DataError(f"{where} is no JSON object: {json.dumps(row)[:60]}")
        yield where, row


def _parsed(text: str, where: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f":{error.lineno}" if text.rstrip().count("\n") else ""
        raise DataError(f"{where}{line} is not JSON: {error.msg} at column {error.colno}; {expected}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON that can be read: {error}; {expected}") from None


def _parquet(file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        import pyarrow  # type: ignore[import-not-found, import-untyped, unused-ignore]
        from pyarrow import parquet  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise MissingPackageError(f"reading {file} needs pyarrow: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches():
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{file} is no parquet file: {error}") from None


def _saved(folder: Path) -> Iterator[Mapping[str, Any]]:
    try:
        import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise MissingPackageError(f"reading {folder} needs datasets: pip install datasets") from None
    try:
        yield from datasets.load_from_disk(str(folder)).with_format(None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} is no data set that save_to_disk wrote: {error}") from None


def holds_answers(data: Path) -> str | None:
    """Where the first row of a user's data is, if it is an instruction without `input_ids`; None of all else.

    Raises:
        DataError: as `data_files` and `rows`.
    """
    file = data_files(data)[0]
    if file.suffix in (".txt", ".idx"):
        return None
    where, row = next(rows(file), ("", {}))
    return where if "input_ids" not in row and is_instruction(row) else None
