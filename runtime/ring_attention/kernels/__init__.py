"""Attention over one local block of keys, by the kernel that is fastest where it is right."""
