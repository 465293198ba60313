"""What a model is made of: its shape, its parameters, and where both come from (preset, Hugging Face config, dimensions)."""
