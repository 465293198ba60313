"""`python -m parcompile`."""

from parcompile.cli import main

main()
