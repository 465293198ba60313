"""A DeepSpeed configuration: what each version refuses or ignores, and how its values fit together."""
