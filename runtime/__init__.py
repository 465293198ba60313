"""Executes a compiled plan inside a DeepSpeed engine. Needs the extra `[runtime]` (torch, deepspeed)."""
