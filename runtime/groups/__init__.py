"""This rank, the other ranks, and the process groups of a plan."""

from .joining import (
    HANDSHAKE_TIMEOUT,
    Mesh,
    create_group,
    join,
    launcher_store,
    leave,
    start_world,
)

__all__ = ["HANDSHAKE_TIMEOUT", "Mesh", "create_group", "join", "launcher_store", "leave", "start_world"]
