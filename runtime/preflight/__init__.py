"""Builds and runs what a plan describes before it is queued: real layers, any rank of any world, no cluster."""

from __future__ import annotations

from .counting import MessageCounter, Tally
from .findings import Finding, Report
from .run import preflight
