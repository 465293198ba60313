"""A DeepSpeed engine that trains as a plan says."""

from .initialization import decay_groups, initialize, options_for_deepspeed, prepare, seed_ranks, take_over
