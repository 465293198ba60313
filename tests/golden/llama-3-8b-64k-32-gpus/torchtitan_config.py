# Written for torchtitan 0.3.0; apply() is the plan, plan() the plan with torchtitan's own model.
# plan "llama-3-8b-64k", 32 ranks
# parcompile 0.1.0, spec sha256:b49a32f704fdb309f069d0228c98fdf06b4330f720a2fb17689e2db48c76052b
"""The plan as a torchtitan 0.3.0 configuration.

    torchrun … -m torchtitan.train --module torchtitan_config --config plan
"""

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC


def apply(config):
    """Changes a `Trainer.Config` into the plan's layout, batch, optimizer and schedule."""
    config.parallelism = ParallelismConfig(
        tensor_parallel_degree=2,
        context_parallel_degree=4,
        pipeline_parallel_degree=1,
        expert_parallel_degree=1,
        data_parallel_replicate_degree=1,
        data_parallel_shard_degree=4,
        fsdp_reshard_after_forward='never',
        enable_sequence_parallel=True,
        context_parallel_load_balancer='headtail',
    )
    config.training.local_batch_size = 1
    config.training.global_batch_size = 64
    config.training.seq_len = 65536
    config.training.max_norm = 1.0
    config.training.dtype = 'float32'
    config.training.mixed_precision_param = 'bfloat16'
    config.optimizer = default_adamw(lr=0.0003, betas=(0.9, 0.95), eps=1e-08, weight_decay=0.1)
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0)
    config.activation_checkpoint = SelectiveAC.Config()
    config.debug.seed = 1234
    return config
