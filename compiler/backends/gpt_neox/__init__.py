"""gpt-neox: the keys of its configurations, and what it and DeepSpeed refuse in them."""
