"""Saves and resumes runs, whatever the layout, and hands their weights to Hugging Face.

`save` and `load` are for training scripts; `read_note`, `verify`, `SavedRun` and `export` need no process group.
"""

from .exporting import export, export_adapter
from .manifest import Note, read_note
from .reading import SavedRun, verify
from .store import load, save, wait_for_save

__all__ = ["Note", "SavedRun", "export", "export_adapter", "load", "read_note", "save", "verify", "wait_for_save"]
