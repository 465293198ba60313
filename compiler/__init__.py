"""parcompile: one JSON spec in; a checked, costed, launchable parallel training plan out.

The names below are the public API; `parcompile.runtime` is that of the runtime. Importing this package loads nothing
else: a name is loaded when it is first used.
"""

# ruff: noqa: F403, F405 -- the names of `api` are listed there, and below
from .version import __version__

TYPE_CHECKING = False  # as in typing, whose import takes longer than all else here
if TYPE_CHECKING:
    from .api import *  # what its `__all__` names

__all__ = [
    "CheckResult",
    "Diagnostic",
    "Difference",
    "Estimate",
    "FirstSpec",
    "Imported",
    "Plan",
    "PlanError",
    "Position",
    "Search",
    "Severity",
    "SourceError",
    "SpecError",
    "__version__",
    "check",
    "compile",
    "diff",
    "import_file",
    "init",
    "load_plan",
    "search",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
