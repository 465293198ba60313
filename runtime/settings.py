"""Environment variables of the runtime, each read in one place and checked.

docs/environment.md lists them; a test compares the list with `VARIABLES`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from parcompile.runtime.errors import RunError

_MOST_SECONDS = 10**9
"""torch counts nanoseconds in 64 bits, which end at 9.2e9 s: this is well below, and 31 years."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A number of seconds that the user may set."""

    name: str
    default_seconds: float
    meaning: str

    def seconds(self) -> float:
        """Its value now.

        Raises:
            RunError: it is not a number of seconds above 0, and at most a billion.
        """
        text = os.environ.get(self.name)
        if text is None:
            return self.default_seconds
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= _MOST_SECONDS:
            raise RunError(
                f"the environment variable {self.name} is {text!r}: write a number of seconds above 0, such as "
                f"{self.default_seconds:g}" + f", and at most {_MOST_SECONDS:,}" * (value > 0)
            )
        return value


HANDSHAKE_TIMEOUT = Variable(
    "PARCOMPILE_HANDSHAKE_TIMEOUT",
    120,
    "How long the first rank waits for the others to start and to report, and for a call that writes the whole model.",
)
COLLECTIVE_TIMEOUT = Variable(
    "PARCOMPILE_COLLECTIVE_TIMEOUT", 1800, "How long one collective may take. It holds for every process group."
)
SILENT_TIMEOUT = Variable(
    "PARCOMPILE_SILENT_TIMEOUT",
    120,
    "After how long without a heartbeat a rank counts as lost, and the job ends with a message that names it.",
)
VARIABLES = (HANDSHAKE_TIMEOUT, COLLECTIVE_TIMEOUT, SILENT_TIMEOUT)

HEARTBEAT = "PARCOMPILE_HEARTBEAT"
"""`0` switches heartbeats off: a lost rank is then noticed when a collective fails or its time is over."""

RECORDS = "PARCOMPILE_RECORDS"
"""The folder for what `parcompile doctor` reads of a run, in place of that of the run; `0`: nothing is recorded."""


def records_folder() -> Path | None:
    """Where the user wants records; None: beside the run's measurements."""
    text = os.environ.get(RECORDS)
    return Path(text) if text and text != "0" else None


def records_wanted() -> bool:
    """Whether messages and steps are recorded."""
    return os.environ.get(RECORDS) != "0"


def heartbeats_wanted() -> bool:
    """Whether ranks watch over each other."""
    return os.environ.get(HEARTBEAT, "1") != "0"


def check_variables() -> None:
    """Reads all of them, before anything waits.

    Raises:
        RunError: a value is not a number of seconds above 0.
    """
    for variable in VARIABLES:
        variable.seconds()
