"""Text to plain data with the line and column of every key and value, and a diagnostic for what is no JSON or YAML."""

from parcompile.diagnostics import Position

from .document import Document, Place, Result, SourceError, SourceText
from .reading import MAX_BYTES, STDIN, parse, parse_bytes, read_file, read_source
