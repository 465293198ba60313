"""Megatron-LM arguments: what its parser refuses, and how their values fit together."""
