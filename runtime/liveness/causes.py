"""An error of one rank, for the ranks whose collectives it breaks: each ends with the first cause, whoever catches it.

`report_errors` and uncaught errors end a job with one line. A program that catches errors itself would see only on one
rank what went wrong, and on the others that a connection was closed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from parcompile.runtime.errors import RunError, lost_peer

from .job import current
from .stopping import Stopped

_CALLS = ("forward", "backward", "step", "train_batch", "eval_batch")


class _Told:
    """Whether this rank has told the others of an error, which it may have survived."""

    here = False


@contextlib.contextmanager
def share_errors() -> Iterator[None]:
    """Within it, an error of this rank is told to the others, and one that follows from another rank's names that.

    Raises:
        RunError: the connection to a rank was lost that has told why.
    """
    try:
        yield
    except (StopIteration, Stopped):
        raise
    except Exception as error:
        monitor = current()
        if monitor is None or getattr(error, "follows", False):
            raise
        if not lost_peer(error):
            _Told.here = True
            monitor.tell_cause(str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}")
            raise
        cause = monitor.told_cause()
        if cause is None:
            raise
        following = RunError(f"this rank ends because another has failed: {cause}")
        following.follows = True
        raise following from error
    if _Told.here and (monitor := current()) is not None:
        _Told.here = False
        monitor.tell_cause(None)


def share_errors_of(engine: Any) -> None:
    """Lets the calls of an engine's steps share their errors."""
    for name in _CALLS:
        setattr(engine, name, _sharing(getattr(engine, name)))


def _sharing(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def shared(*args: Any, **options: Any) -> Any:
        with share_errors():
            return call(*args, **options)

    return shared
