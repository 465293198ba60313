"""Measures the machine that it runs on, for `parcompile profile`: compute, memory, links."""

from .machine import measure, measure_rank
