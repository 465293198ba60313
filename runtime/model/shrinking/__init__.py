"""A small model of the same kind as a plan's: what computes differently stays, what is only more of the same goes.

Each kind of layer, the heads of a rank, how kv heads are repeated, routing, rotary embeddings, scales and norms stay.
Windows, and the lengths at which rotary embeddings change, become so short that a short sequence crosses them.
"""

from .small_plan import LENGTH, SWITCH, WINDOW, borders, shrunk
