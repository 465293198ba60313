"""Settings for the whole suite."""

from __future__ import annotations

import os

from hypothesis import settings

# CI draws the same examples each time: what it finds, anyone can find again. Elsewhere new ones are drawn.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
