"""parcompile: one JSON spec in; a checked, costed, launchable parallel training plan out."""

from .version import __version__

__all__ = ["__version__"]
