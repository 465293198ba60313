"""Layers that carry a state along the sequence, in the place of attention: their sizes, keys and parameters."""

from .selective import SelectiveKeys
from .shape import RecurrentKind, RecurrentShape
from .state_space import StateSpaceKeys
from .traits import Recurrent

__all__ = ["Recurrent", "RecurrentKind", "RecurrentShape", "SelectiveKeys", "StateSpaceKeys"]
