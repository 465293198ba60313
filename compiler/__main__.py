"""`python -m parcompile`."""

from .cli import main

main()
