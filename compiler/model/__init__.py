"""What a model is made of: its shape and its parameters, from a preset, a Hugging Face config or dimensions."""
