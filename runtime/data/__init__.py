"""Batches for the ranks of a plan: which samples, which of their tokens, with which positions and labels."""
