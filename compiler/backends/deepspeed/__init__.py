"""DeepSpeed: what its configuration means for a plan, how it is written, and how it is read."""
