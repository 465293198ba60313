"""Versions of DeepSpeed and Megatron-LM that train with other numbers than a configuration says, with their sources."""

from .advisory import Advisory, advisories, affecting

__all__ = ["Advisory", "advisories", "affecting"]
