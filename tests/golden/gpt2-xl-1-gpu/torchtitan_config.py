# Written for torchtitan 0.3.0; apply() is the plan, plan() the plan with torchtitan's own model.
# plan "gpt2-xl on one GPU", 1 ranks
# parcompile 0.1.0, spec sha256:39a84f94434dcf2e4c85cba1a42c87a351367682bc69e7d06491d01e7fb58e6b
"""The plan as a torchtitan 0.3.0 configuration.

    torchrun … -m torchtitan.train --module torchtitan_config --config plan
"""

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC


def apply(config):
    """Changes a `Trainer.Config` into the plan's layout, batch, optimizer and schedule."""
    config.parallelism = ParallelismConfig(
        tensor_parallel_degree=1,
        context_parallel_degree=1,
        pipeline_parallel_degree=1,
        expert_parallel_degree=1,
        data_parallel_replicate_degree=1,
        data_parallel_shard_degree=1,
        fsdp_reshard_after_forward='never',
        enable_sequence_parallel=False,
    )
    config.training.local_batch_size = 4
    config.training.global_batch_size = 32
    config.training.seq_len = 1024
    config.training.max_norm = 1.0
    config.training.dtype = 'float32'
    config.training.mixed_precision_param = 'bfloat16'
    config.optimizer = default_adamw(lr=0.0003, betas=(0.9, 0.95), eps=1e-08, weight_decay=0.1)
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0)
    config.activation_checkpoint = FullAC.Config()
    config.debug.seed = 1234
    return config
