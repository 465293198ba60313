"""Pipeline parallelism: the stages of a model, and the schedule that takes micro-batches through them."""

from .chunk import ChunkForward
from .execution import PipelinedLoop, forward_and_backward
from .stage import Elsewhere, Skipped, hold_stage
