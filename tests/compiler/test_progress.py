"""Long work shows a line on a terminal, with the time that is left, and leaves nothing behind."""

from __future__ import annotations

import io
import re
import time

import pytest

from parcompile.progress import progress, tracked


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_a_terminal_shows_what_is_done_and_what_is_left() -> None:
    shown = Terminal()
    with progress("loading weights", 4, stream=shown, delay=0.02) as advance:
        advance()
        while "left" not in shown.getvalue():
            time.sleep(0.01)
    lines = shown.getvalue().split("\r\x1b[2K")
    assert re.fullmatch(r"loading weights … 1 of 4, \d+ s, about \d+ s left", lines[1])
    assert lines[-1] == ""  # the last thing is that the line goes away


def test_short_work_a_pipe_and_other_ranks_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    quick, pipe, other = Terminal(), io.StringIO(), Terminal()
    with progress("quick", stream=quick):
        pass
    with progress("in a pipe", stream=pipe, delay=0.0):
        time.sleep(0.02)
    monkeypatch.setenv("RANK", "1")
    with progress("on rank 1", stream=other, delay=0.0):
        time.sleep(0.02)
    assert (quick.getvalue(), pipe.getvalue(), other.getvalue()) == ("", "", "")


def test_the_line_goes_away_when_the_work_fails() -> None:
    shown = Terminal()

    def fail() -> None:
        with progress("failing", stream=shown, delay=0.0):
            while not shown.getvalue():
                time.sleep(0.01)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert shown.getvalue().endswith("\r\x1b[2K")


def test_parts_come_in_their_order() -> None:
    assert list(tracked((3, 1, 2), "counting")) == [3, 1, 2]
