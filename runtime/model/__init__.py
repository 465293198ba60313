"""The model of a plan: built or read from files, and which part of each parameter a rank holds."""
