"""Parameters of every causal model type of transformers, derived by building its models with drawn configurations."""

from __future__ import annotations

from .completing import OLDER_KINDS, TableError, alias_of, complete, reads, stated
from .parameters import Counts, Derived, Repeated, counts_of, in_layers, parameters, repeated
from .reading import VERSION, Row, Table, class_default, covered, left_out, table_of
