"""How much text and work the variables of a script may take. A few lines can ask for more than any machine has."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LENGTH = 2**20
"""Characters of one value. Linux starts no program with a word of more than 2**17."""
MAX_WORK = 200_000
"""Parts that are put together, and blocks of 16 characters in them: a second or so. Scripts take a few thousand."""
MAX_MATCHED = 4096
"""Characters of a value that a pattern is taken off: trying every place takes the square of it."""
_BLOCK = 16


class ShellLimitError(Exception):
    """A script asks for more than is followed. The message is meant for the user.

    `start` is where the statement stands that did; None where that is in another file.
    """

    def __init__(self, message: str, start: int | None = None) -> None:
        super().__init__(message)
        self.start = start


@dataclass
class Work:
    """What was done for a script so far."""

    done: int = 0

    def spend(self, length: int) -> None:
        """Counts one part of so many characters.

        Raises:
            ShellLimitError: that is too much.
        """
        self.done += 1 + length // _BLOCK
        if self.done > MAX_WORK:
            raise ShellLimitError(
                f"its loops and expansions take more than {MAX_WORK:,} steps: write the arguments out, or give the "
                "variables with --variable"
            )


def bounded(length: int, name: str) -> int:
    """A length of a value.

    Raises:
        ShellLimitError: it is too long; `name` is what the value is of.
    """
    if length > MAX_LENGTH:
        raise ShellLimitError(f"{name} would have more than {MAX_LENGTH:,} characters")
    return length
