"""Parameters of every causal model type of transformers, derived by building its models with drawn configurations."""

from __future__ import annotations

from .completing import OLDER_KINDS, TableError, alias_of, complete, reads, stated
from .counting import Counts, counts_of
from .parameters import Derived, parameters
from .reading import VERSION, Row, Table, class_default, covered, left_out, table_of
from .repeating import Repeated, in_layers, repeated

__all__ = [
    "OLDER_KINDS",
    "VERSION",
    "Counts",
    "Derived",
    "Repeated",
    "Row",
    "Table",
    "TableError",
    "alias_of",
    "class_default",
    "complete",
    "counts_of",
    "covered",
    "in_layers",
    "left_out",
    "parameters",
    "reads",
    "repeated",
    "stated",
    "table_of",
]
