"""The command line."""

from .main import main
