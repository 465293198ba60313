"""A runnable project around a spec: its training script, data, launch scripts and CI workflow."""
