"""What a model draws at random: a function of the place in the whole batch, the same in every layout."""

from .draws import draws, trains_at_random
from .mode import Redrawn, draw_by_place, hold_features, record_widths
