"""This rank, the other ranks, and the process groups of a plan."""

from .joining import Mesh, check_executable, create_groups, join, leave
from .rendezvous import launcher_store, start_world, store_of_world
