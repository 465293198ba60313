"""Text to plain data with the line and column of every key and value, and a diagnostic for what is no JSON or YAML.

Files, standard input and strings to documents.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path as FilePath

from parcompile.diagnostics import Position, closest
from parcompile.units import MIB

from .document import Document, Place, Result, SourceError, SourceText
from .json_text import parse_json

MAX_BYTES = 8 * MIB
"""Larger files are not read: a spec has a few kilobytes."""
STDIN = "<stdin>"

_UTF_8_BOM = b"\xef\xbb\xbf"
_NO_TEXT = {
    b"\x1f\x8b": "compressed (gzip)",
    b"PK\x03\x04": "compressed (zip)",
    b"BZh": "compressed (bzip2)",
    b"\xfd7zXZ": "compressed (xz)",
    b"\x28\xb5\x2f\xfd": "compressed (zstd)",
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
"""How files begin that are no UTF-8, and what they are."""


def read_file(path: str | os.PathLike[str]) -> Result:
    """Read and parse a file, "-" being standard input.

    Raises:
        SourceError: The file cannot be opened or read.
    """
    name = os.fspath(path)
    if name == "-":
        return parse_bytes(sys.stdin.buffer.read(MAX_BYTES + 1), STDIN)
    if FilePath(name).suffix.lower() == ".toml":
        raise SourceError(f"{name}: parcompile reads JSON and YAML, no TOML; `parcompile import` reads torchtitan's")
    return parse_bytes(*_content(name))


def read_source(name: str) -> SourceText:
    """The text of a file in any other language.

    Raises:
        SourceError: The file cannot be opened, is too large or is no UTF-8.
    """
    read = parse_bytes(*_content(name), parsed=False)
    if read.diagnostics:
        raise SourceError(f"{name}: {read.diagnostics[0].message}")
    return read.source


def _content(name: str) -> tuple[bytes, str, int]:
    """The bytes of a file, its name and its size."""
    try:
        # A pipe or a device may block, or never end: its kind is asked for before it is opened.
        if not stat.S_ISREG(os.stat(name).st_mode) and not os.path.isdir(name):  # noqa: PTH112, PTH116 -- see below
            raise SourceError(f"{name}: this is no regular file; pipe it to standard input and name it -")
        with open(name, "rb") as stream:  # noqa: PTH123 - a name with a NUL byte must fail in here
            content = stream.read(MAX_BYTES + 1)
            size = os.fstat(stream.fileno()).st_size
    except FileNotFoundError:
        raise SourceError(_missing(name)) from None
    except IsADirectoryError:
        raise SourceError(f"{name}: this is a directory, not a file") from None
    except PermissionError:
        raise SourceError(f"{name}: no permission to read this file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SourceError(f"{name}: cannot be read: {reason}") from None
    return content, name, size


def parse_bytes(content: bytes, file: str, size_bytes: int | None = None, *, parsed: bool = True) -> Result:
    """Decode and parse the bytes of a file. `size_bytes` is the file's size when `content` may be cut short."""
    if len(content) > MAX_BYTES:
        size = f"has {max(size_bytes or 0, len(content)):,} bytes" if size_bytes else "is too large"
        message = f"the file {size}; at most {MAX_BYTES:,} are read"
        return _refused(SourceText(file, ""), "J002", message, "a spec has a few kilobytes: is this the right file?")
    bom = content.startswith(_UTF_8_BOM)
    body = content[len(_UTF_8_BOM) :] if bom else content
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        return _not_utf8(body, file, error)
    if "\0" in text[:64] and (wide := _looks_wide(body)):
        return _no_text(file, wide)
    return parse(text, file, bom=bom) if parsed else Result(SourceText(file, text, bom), None)


def parse(text: str, file: str, format: str | None = None, *, bom: bool = False) -> Result:  # noqa: A002
    """Parse text as "json" or "yaml"; None tells by the file's name, then by how the text starts."""
    if text.startswith("\ufeff"):
        text, bom = text[1:], True
    source = SourceText(file, text, bom)
    if (format or detect_format(file, text)) == "yaml":
        from .yaml_parser import parse_yaml

        return parse_yaml(source)
    return parse_json(source)


def detect_format(file: str, text: str) -> str:
    """By the file's suffix, "json" or "yaml"; without a known one, by the first character that says something."""
    suffix = FilePath(file).suffix.lower()
    if suffix in (".yaml", ".yml"):
        return "yaml"
    if suffix == ".json":
        return "json"
    start = text.lstrip()[:2]
    if not start or start[0] in '{["' or start in ("//", "/*"):
        return "json"
    return "yaml"


def _missing(name: str) -> str:
    folder = FilePath(name).parent
    try:
        near = closest(FilePath(name).name, sorted(os.listdir(folder))[:1000])  # noqa: PTH208
    except OSError:
        return f"{name}: there is no such file (and no folder {folder})"
    return f"{name}: there is no such file" + (f"; did you mean {folder / near}?" if near else "")


def _looks_wide(body: bytes) -> str | None:
    sample = body[:64]
    odd, even = sample[1::2].count(0), sample[0::2].count(0)
    if max(odd, even) * 2 >= len(sample[1::2]):
        return "UTF-32" if odd and even else "UTF-16"
    return None


def _refused(source: SourceText, code: str, message: str, advice: str, offset: int = 0) -> Result:
    return Result(source, None, (source.problem(code, message, offset, advice=advice),))


def _no_text(file: str, kind: str) -> Result:
    what, advice = (kind, "unpack it first") if "(" in kind else (f"{kind}, not UTF-8", "save it as UTF-8")
    return _refused(SourceText(file, ""), "J001", f"the file is {what}", advice)


def _not_utf8(body: bytes, file: str, error: UnicodeDecodeError) -> Result:
    kind = next((kind for mark, kind in _NO_TEXT.items() if body.startswith(mark)), None) or _looks_wide(body)
    if kind is not None:
        return _no_text(file, kind)
    source = SourceText(file, body.decode("utf-8", errors="replace"))
    offset = len(body[: error.start].decode("utf-8", errors="replace"))
    byte = body[error.start]
    guess = bytes([byte]).decode("cp1252", errors="replace")
    hint = f"; in Windows-1252 it would be {guess}" if guess.isprintable() and guess != "\ufffd" else ""
    message = f"the byte 0x{byte:02X} is not UTF-8{hint}"
    return _refused(source, "J001", message, "save the file as UTF-8", offset)
