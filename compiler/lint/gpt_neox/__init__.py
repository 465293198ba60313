"""A gpt-neox configuration: what gpt-neox refuses, and what DeepSpeed refuses of its part."""
