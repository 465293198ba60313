"""Checks a launched job before its first step: who is there, what they run, their links, and two steps."""

from __future__ import annotations

from parcompile.runtime.preflight.live.stages import check_job, live_check

from .report import LiveReport, Node
from .session import Limits, Outcome
