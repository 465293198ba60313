"""Parameters of every causal model type of transformers, derived by building its models with drawn configurations."""

from __future__ import annotations

from .completing import TableError, complete
from .parameters import Derived, parameters
from .reading import VERSION, Row, Table, covered, left_out, table_of

__all__ = [
    "VERSION",
    "Derived",
    "Row",
    "Table",
    "TableError",
    "complete",
    "covered",
    "left_out",
    "parameters",
    "table_of",
]
