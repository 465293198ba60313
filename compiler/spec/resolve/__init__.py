"""Decides every value of a spec, lazily, and remembers where each comes from.

Rules read a `Resolution`. A value that is wrong, or that depends on one that is, raises `Unavailable` when it is read,
and the rule that asked stays quiet: each mistake is reported once, where it is. When no rule complains,
`Resolution.spec()` is complete.
"""

from .reader import Unavailable
from .training import Resolution
