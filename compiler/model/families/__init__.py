"""What distinguishes the model families: names, fused weights, biases, norms, and defaults of their configurations.

A family is data: how its parameters differ from Llama's, under the names that transformers gives them. The rows of
`parcompile.model.parameters` follow from it.

Source: the modeling files and configuration classes of transformers 5.23; the tests compare every family with them.
"""

from __future__ import annotations

from .added import BUILT_IN, FAMILIES, added_families, family_problem

__all__ = ["BUILT_IN", "FAMILIES", "added_families", "family_problem"]
