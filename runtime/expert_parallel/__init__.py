"""Expert parallelism: the routed experts of a layer are dealt over the ep ranks, and tokens travel to them and back."""

from .experts import deal_experts, for_deepspeed, is_dealt, mark_dealt, take_over_norm
from .variants import draw_tables, hand_tokens, loop_where_narrow, pass_on, visit_chosen, warn_of_empty_tables
