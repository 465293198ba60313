"""The weights of experts that are dealt over ep, in checkpoints: DeepSpeed's file of weights holds one rank's only.

The first rank of dp · cp writes that file for all others of its model-parallel rank, with its own experts. Those of the
further ep ranks lie in a file beside it, which is put in its place when such a rank loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from parcompile.layout.groups import EXPERT_DP, Axis
from parcompile.runtime.expert_parallel import is_dealt
from parcompile.runtime.groups import Mesh

from .deepspeed_files import experts_file

MODULE = "module"
"""The key of weights in a file, as in DeepSpeed's."""


def file_to_write(mesh: Mesh) -> str | None:
    """The file of experts that this rank writes; None: it writes none."""
    if mesh.parallel_group(Axis.EP) is None or not mesh.index("dp-cp") or mesh.index(EXPERT_DP):
        return None
    return experts_file(mesh.index(Axis.EP), mesh.index("tp-pp"))


def content(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """What such a file holds: the experts of this rank."""
    experts = {name: parameter.detach() for name, parameter in model.named_parameters() if is_dealt(parameter)}
    return {MODULE: experts}


def with_experts(weights: Mapping[str, Any], experts: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file of weights with other experts."""
    return {**weights, MODULE: type(weights[MODULE])({**weights[MODULE], **experts[MODULE]})}
