"""All ranks of a plan on this machine, for teaching, debugging and tests."""

from .world import MAX_RANKS, LocalWorld, RankError, launcher_environment, run_local

__all__ = ["MAX_RANKS", "LocalWorld", "RankError", "launcher_environment", "run_local"]
