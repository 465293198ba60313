"""Why a run hangs, has died, is slow or computes something else: read from what its ranks have left."""

from .judging import judge
from .reading import Evidence, read_all
from .verdict import Verdict

__all__ = ["Evidence", "Verdict", "judge", "read_all"]
