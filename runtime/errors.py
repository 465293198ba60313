"""Errors of a run."""

from __future__ import annotations

from collections.abc import Sequence


class RunError(RuntimeError):
    """Why a run cannot start or go on; the message is meant for the user.

    `everywhere` says that every rank finds the same at the same time, so that one of them speaks for all.
    """

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere
        self.follows = False
        """Whether it names the error of another rank."""


def everywhere(message: str) -> RunError:
    """An error that every rank finds at the same time."""
    return RunError(message, everywhere=True)


def differs_from_plan(who: object, wrong: Sequence[str], what: str) -> RunError:
    """An error of a tool whose values are not the plan's: how each differs, and `what` may be left out."""
    return everywhere(
        f"{who} and the plan differ: {'; '.join(wrong)}. Leave {what} out, or change the spec and compile it again"
    )


def first_line(error: BaseException) -> str:
    """Of its message; its type where there is none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
"""What gloo and NCCL say when the other side is gone."""


def lost_peer(error: BaseException) -> bool:
    """Whether an exception says that a rank on the other side of a collective is gone."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST_PEER)
