"""Shell scripts, read for the commands that they would run. Nothing is executed."""

from .evaluate import Invocation, invocations
from .syntax import ShellLimitError
from .words import Hole, Piece, Value
