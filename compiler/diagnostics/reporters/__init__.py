"""Diagnostics to people and machines: one function per format, chosen by `report`."""

from .dispatch import FORMATS, Style, report
