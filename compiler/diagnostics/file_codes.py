"""The pages of the codes that are no rules: J, the text of a file; K, its schema."""

from __future__ import annotations

from dataclasses import dataclass

from parcompile.user_files import shipped


@dataclass(frozen=True, slots=True)
class FileCode:
    """A code and its page. `wrong` and `right` are excerpts of a file, `format` that of both."""

    code: str
    title: str
    explanation: str
    wrong: str
    right: str
    format: str = "json"


FILE_CODES: dict[str, FileCode] = {
    code: FileCode(code, **stored) for code, stored in shipped("parcompile.diagnostics", "file_codes.json").items()
}
"""Every J and K code with its page."""
