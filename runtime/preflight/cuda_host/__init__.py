"""CUDA on a host without a GPU: torch's dispatch for it, what `torch.cuda` answers, and what a rank does there."""

from __future__ import annotations

from .card import Card, card_of, torch_cuda_of
from .library import NoCudaHostError, cuda_without_gpu
