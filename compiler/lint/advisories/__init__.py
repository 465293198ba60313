"""Versions of training tools that train with other numbers than a configuration says, with their sources."""

from .advisory import Advisory, advisories, affecting, records
