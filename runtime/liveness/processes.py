"""Does a process of this machine still run?"""

from __future__ import annotations

import os
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process lives. One that has ended and that its launcher has not collected yet does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        # The state stands behind the name, which may hold any character: "123 (name) S 1 …".
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True  # this system has no /proc
    return state not in ("Z", "X")
