"""What single mechanisms of architectures change in a model, a file each; `parcompile.model.blocks` has their sizes.

What is injected names none of them: it asks for the changes of a phase, and for the modules that are not cut as others.
"""

from collections.abc import Mapping

from .compressed import is_grouped, keep_groups, use_compressed_keys
from .experts import cut_all_experts, loop_in_type, place_experts
from .indexers import use_indexers
from .layer_inputs import cut_layer_inputs
from .mechanism import Change, Phase, Placed
from .ngrams import look_ngrams_up
from .recurrent import (
    is_inside,
    localise_states,
    recurrent_modules,
    spread_gated_norm,
    use_pieces,
    why_untrained,
    why_whole,
)
from .shared_blocks import parts_with_adapters, share_blocks_here
from .sparsity import share_cutoffs

CHANGES: Mapping[Phase, tuple[Change, ...]] = {
    Phase.WHOLE: (share_blocks_here,),
    Phase.STAGE: (use_pieces, use_indexers, use_compressed_keys, place_experts),
    Phase.REGION: (look_ngrams_up, cut_all_experts),
    Phase.CUT: (localise_states, share_cutoffs, loop_in_type, cut_layer_inputs),
}
"""Every one, in the order in which they are injected."""


entered_whole = recurrent_modules
"""Modules that take their hidden states in together, with what stands in modules of their own."""

entered_parts = parts_with_adapters
"""Modules whose columns take in what they themselves are called with, by name."""

spread_norm = spread_gated_norm
"""A norm over features that ranks share which is that of a mechanism, with a rank's slice of its weight."""


def change(placed: Placed, phase: Phase) -> None:
    """Injects the mechanisms of a phase that the model has."""
    for one in CHANGES[phase]:
        one(placed)
