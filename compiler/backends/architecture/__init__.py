"""A Hugging Face configuration in the switches by which other tools describe a layer, and back.

Megatron-LM and gpt-neox describe a model by switches: which norm, which activation, which biases. A Hugging Face
configuration describes it by a model type and a few keys. `families` says for each model type which switches its keys
set, so that both directions follow from one table.
"""

from .choosing import architecture_of, config_of
from .families import Architecture, InexpressibleError, Rope, Router
