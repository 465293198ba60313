"""What distinguishes the model families: names, fused weights, biases, norms, and defaults of their configurations.

A family is data: how its parameters differ from Llama's, under the names that transformers gives them. The rows of
`parcompile.model.parameters` follow from it.

Source: the modeling files and configuration classes of transformers 5.23; the tests compare every family with them.
"""

from __future__ import annotations

from collections.abc import Mapping

from parcompile.model.family import Family

from .biased import BIASED
from .dense import DENSE
from .experts import EXPERTS
from .latent import LATENT
from .shared_experts import SHARED_EXPERTS

FAMILIES: Mapping[str, Family] = {**DENSE, **BIASED, **EXPERTS, **SHARED_EXPERTS, **LATENT}
"""The model types whose parameters the compiler knows exactly."""
