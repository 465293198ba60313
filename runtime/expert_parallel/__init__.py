"""Expert parallelism: the routed experts of a layer are dealt over the ep ranks, and tokens travel to them and back."""

from .experts import deal_experts
from .grouped import loop_where_narrow
from .hashed import draw_tables, hand_tokens, warn_of_empty_tables
from .identities import pass_on
from .marking import for_deepspeed, is_dealt, mark_dealt, take_over_norm
from .scaled_inputs import visit_chosen

__all__ = [
    "deal_experts",
    "draw_tables",
    "for_deepspeed",
    "hand_tokens",
    "is_dealt",
    "loop_where_narrow",
    "mark_dealt",
    "pass_on",
    "take_over_norm",
    "visit_chosen",
    "warn_of_empty_tables",
]
