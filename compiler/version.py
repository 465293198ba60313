"""The version of the package, the compiler and the runtime: they are released together."""

__version__ = "0.1.0"
