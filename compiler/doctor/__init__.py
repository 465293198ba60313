"""Why a run hangs, has died, is slow or computes something else: read from what its ranks have left."""

from .judging import judge
from .reading import Evidence, Verdict, read_all
