"""Makes `ranks` importable here as in the folder above, and keeps the test process on one thread like the ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
torch.set_num_threads(1)
