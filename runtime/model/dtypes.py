"""What precisions are called in torch."""

from __future__ import annotations

import torch

from parcompile.spec import Precision

TORCH_DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
