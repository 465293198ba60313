"""Diagnostics to people and machines: one function per format, chosen by `report`."""

from .dispatch import FORMATS, report
from .style import Style

__all__ = ["FORMATS", "Style", "report"]
