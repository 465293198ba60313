"""The parts of a second embedding that the layers of a stage get: computed on the first stage, and handed on.

Shapes: B rows, s tokens of a rank, L layers of the model, P features of a layer's part.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import Tensor


class LayerParts:
    """Within it a base model's layers, those of a stage alone, get their own parts.

    Args:
        base: the base model, whose configuration speaks of the stage's layers only.
        layers: the numbers of these layers in the whole model.
        received: the parts of all layers [B, s, L, P]; None on the first stage, which computes them.
    """

    def __init__(self, base: Any, layers: range, received: Tensor | None) -> None:
        self._base, self._layers, self._parts = base, layers, received
        self._whole, self._compute = base.config, base.project_per_layer_inputs

    def __enter__(self) -> None:
        seen = vars(self._base)
        self._looked_up = seen.get("get_per_layer_inputs")
        seen["project_per_layer_inputs"] = self._project
        if self._parts is not None:
            seen["get_per_layer_inputs"] = lambda *_, **__: None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seen = vars(self._base)
        del seen["project_per_layer_inputs"]
        seen["get_per_layer_inputs"] = self._looked_up

    def _project(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._parts is None:
            seen = vars(self._base)
            local, seen["config"] = seen["config"], self._whole
            try:
                self._parts = self._compute(*args, **kwargs)
            finally:
                seen["config"] = local
        # A stage without layers passes its hidden states through something that looks at no part.
        start = min(self._layers.start, self._parts.shape[2] - 1)
        return self._parts[:, :, start : max(self._layers.stop, start + 1)]

    def hand_on(self) -> Tensor:
        """The parts of all layers, for the next stage."""
        assert self._parts is not None, "the base model has asked for them"
        return self._parts
