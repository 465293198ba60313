"""Progress of work that takes more than two seconds: one line on a terminal, with the time that is left."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TextIO, TypeVar

DELAY_SECONDS = 2.0
"""How long work may take before it shows its progress."""
_TICK_SECONDS = 0.5
_CLEAR = "\r\x1b[2K"

One = TypeVar("One")


@contextmanager
def progress(
    title: str, total: int = 1, *, stream: TextIO | None = None, delay: float = DELAY_SECONDS
) -> Iterator[Callable[[], None]]:
    """Shows how much of a piece of work is done, and removes the line at its end.

    Nothing is shown where the stream is no terminal, on ranks other than the first, or before `delay` seconds.

    Args:
        title: what is done, as in "loading weights".
        total: of how many parts the work consists. The time that is left follows from those that are done.
        stream: standard error unless another is given.
        delay: seconds before anything is shown.

    Yields:
        What to call after each part.
    """
    shown = sys.stderr if stream is None else stream
    line = _Line(title, total, shown)
    if not _is_terminal(shown) or os.environ.get("RANK", "0") != "0":
        yield line.advance
        return
    done = threading.Event()
    ticker = threading.Thread(target=line.show_until, args=(done, delay), daemon=True)
    ticker.start()
    try:
        yield line.advance
    finally:
        done.set()
        ticker.join()
        line.remove()


def tracked(parts: Collection[One], title: str) -> Iterator[One]:
    """Goes through `parts` and shows the progress."""
    with progress(title, len(parts)) as advance:
        for one in parts:
            yield one
            advance()


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        return False


class _Line:
    """The line of one piece of work."""

    def __init__(self, title: str, total: int, stream: TextIO) -> None:
        self._title, self._total, self._stream = title, total, stream
        self._done, self._began, self._is_shown = 0, time.monotonic(), False

    def advance(self) -> None:
        """One part is done."""
        self._done += 1

    def show_until(self, done: threading.Event, delay: float) -> None:
        """Writes the line again and again, from `delay` seconds on."""
        wait = delay
        while not done.wait(wait):
            self._stream.write(_CLEAR + self.text())
            self._stream.flush()
            self._is_shown, wait = True, _TICK_SECONDS

    def remove(self) -> None:
        """Leaves the terminal as it was."""
        if self._is_shown:
            self._stream.write(_CLEAR)
            self._stream.flush()

    def text(self) -> str:
        """The line now, within the width of a terminal of 80 columns."""
        seconds = time.monotonic() - self._began
        counted = f" {self._done} of {self._total}" if self._total > 1 else ""
        left = ""
        if 0 < self._done < self._total:
            left = f", about {_duration(seconds / self._done * (self._total - self._done))} left"
        return f"{self._title[:40]} …{counted}, {_duration(seconds)}{left}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
