"""The gradient of the norm of queries in Qwen3: tensor parallelism on two ranks, four backward passes."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import say
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.distributed import DistributedConfig

dist.init_process_group("gloo")
sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
                         "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
folder = Path(tempfile.gettempdir()) / f"tensor_parallel_{os.environ['MASTER_PORT']}"
if dist.get_rank() == 0:
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=64, tie_word_embeddings=False, initializer_range=0.1, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
dist.barrier()
norms = []
for options in ({"distributed_config": DistributedConfig(tp_size=2)}, {}):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    for ids in torch.randint(0, 64, (4, 1, 16), generator=torch.Generator().manual_seed(1)):
        (model(ids, labels=ids).loss / 4).backward()
    gradient: Any = model.model.layers[0].self_attn.q_norm.weight.grad
    norms.append((gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).norm())
say("gradient norm of q_norm", *norms)
dist.barrier()
if dist.get_rank() == 0:
    shutil.rmtree(folder)
