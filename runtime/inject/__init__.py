"""Puts tensor-parallel layers, ring attention and the parallel loss into a model."""
