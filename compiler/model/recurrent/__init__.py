"""Layers that carry a state along the sequence, in the place of attention: their sizes, keys and parameters."""

from .kind import RecurrentKind
from .selective import SelectiveKeys
from .shape import RecurrentShape
from .state_space import StateSpaceKeys
from .traits import Recurrent

__all__ = ["Recurrent", "RecurrentKind", "RecurrentShape", "SelectiveKeys", "StateSpaceKeys"]
