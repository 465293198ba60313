"""What distinguishes the model families beside the rows of their tables: names of modules, and what keys mean.

Source: the modeling files and configuration classes of transformers 5.23; the tests compare every family with them.
"""

from __future__ import annotations

from .added import BUILT_IN, FAMILIES, added_families, family_problem, try_family

__all__ = ["BUILT_IN", "FAMILIES", "added_families", "family_problem", "try_family"]
