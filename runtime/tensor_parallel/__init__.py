"""Tensor-parallel layers."""
