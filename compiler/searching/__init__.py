"""Searches the layouts of a spec: enumerates what is legal, ranks it, and says why the others lost."""
