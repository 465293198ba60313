"""Saves and resumes runs through DeepSpeed's own checkpoints, with a note of the layout they were saved in."""

from .store import load, save

__all__ = ["load", "save"]
