"""Layers that carry a state along the sequence, in the place of attention: their sizes, keys and parameters."""

from .shape import RecurrentKind, RecurrentShape
from .state_space import SelectiveKeys, StateSpaceKeys
from .traits import Recurrent

__all__ = ["Recurrent", "RecurrentKind", "RecurrentShape", "SelectiveKeys", "StateSpaceKeys"]
