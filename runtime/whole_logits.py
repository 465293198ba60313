"""Logits of an injected model as libraries expect them: whole, of sequences of any length, or of single tokens."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .collectives import gather_from_group
from .data.batches import with_positions
from .errors import everywhere
from .groups import Mesh
from .labels import IGNORED_LABEL, shift_labels
from .loss import entropy, log_probs, whole_sequences
from .ring_attention import split_sequence


class WholeLogits:
    """Lets an injected model take sequences of any length up to the plan's, and give whole logits where asked for.

    In `of_loops` people write themselves: in evaluation, and where the model gets no labels. Where it trains by its own
    loss, it gives none: those of a rank are a part.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, *, of_loops: bool = False) -> None:
        self.whole, self._mesh, self._length = False, mesh, 0
        self._of_loops = of_loops
        self._generates = False
        self._as_tuple = False
        self._fused: Tensor | None = None
        self._planned = mesh.plan.spec.training.sequence_length
        self._labels = mesh.plan.spec.model.shape.head.labels
        model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._leave)

    def generating(self) -> AbstractContextManager[Any]:
        """Within it calls are those of `generate`, which gives whole logits itself."""
        return mock.patch.object(self, "_generates", True)

    def _enter(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._generates:
            return args, kwargs
        kwargs = with_positions(kwargs)
        wanted = kwargs.get("return_dict")
        self._as_tuple = not (getattr(model.config, "return_dict", True) if wanted is None else wanted)
        kwargs = kwargs | {"return_dict": True} if self._as_tuple else kwargs
        # Under this name trl calls models, and wants values of single tokens in the place of logits.
        self._fused = kwargs.get("labels") if kwargs.pop("fused_lm_head", False) else None
        tokens = kwargs.get("input_ids", args[0] if args else None)
        rows = self._mesh.plan.spec.training.micro_batch_size
        if self._of_loops and torch.is_grad_enabled() and tokens is not None and len(tokens) > rows:
            raise everywhere(
                f"the model trains on {len(tokens)} rows, the plan's micro_batch_size is {rows}: give the data loader "
                f"batch_size={rows}, or compile a plan for more"
            )
        if tokens is None or self._mesh.size("cp") == 1:
            self._length = 0 if tokens is None else tokens.shape[1]
            return args, kwargs
        self._length = tokens.shape[1]
        missing = self._planned - self._length
        if missing < 0:
            raise everywhere(
                f"sequences have {self._length} tokens, the plan's sequence_length is {self._planned}: give the "
                "trainer a maximum length (max_length), or compile a plan for longer sequences"
            )
        if missing == 0:
            return args, kwargs
        kwargs = {"input_ids": tokens, **kwargs}
        if kwargs.get("position_ids") is None and kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = torch.ones_like(tokens)
        fill: dict[str, Any] = {"labels": IGNORED_LABEL, "shift_labels": IGNORED_LABEL}
        if self._labels:
            fill["input_ids"] = model.config.get_text_config().pad_token_id or 0
        for name, one in kwargs.items():
            if isinstance(one, Tensor) and one.dim() == 2 and one.shape[1] == self._length:
                kwargs[name] = F.pad(one, (0, missing), value=fill.get(name, 0))
        if kwargs.get("position_ids") is not None:  # what is added is a document of its own
            kwargs["position_ids"][:, self._length :] = torch.arange(missing, device=tokens.device)
        return args[1:], kwargs

    def _leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        if self._generates:
            return None
        if self._fused is not None:
            return self._of_tokens(output, self._fused)
        if self._of_loops:
            self.whole = output.loss is None or not torch.is_grad_enabled()
            if not self.whole:
                output.logits = None
        if self.whole and not self._labels:
            mesh = self._mesh
            logits = gather_from_group(output.logits, -1, mesh.parallel_group("tp"))
            size = mesh.plan.spec.model.shape.vocab_size
            output.logits = whole_sequences(logits, mesh)[:, : self._length, :size]
        return output.to_tuple() if self._as_tuple else output

    def _of_tokens(self, output: Any, labels: Tensor) -> Any:
        """What trl's `add_fused_lm_head` computes from a whole head, at temperature 1, from logits that are split."""
        from trl.trainer.utils import FusedCausalLMOutput

        mesh, logits, size = self._mesh, output.logits, self._mesh.plan.spec.model.shape.vocab_size
        shifted = shift_labels(labels)
        own = F.pad(shifted, (0, self._planned - shifted.shape[1]), value=IGNORED_LABEL)
        if mesh.size("cp") > 1:
            own = split_sequence(own, 1, mesh.plan.spec.parallelism.cp_layout, mesh.size("cp"), mesh.index("cp"))
        else:
            own = shifted
        group, columns = mesh.parallel_group("tp"), logits.shape[-1]
        start = 0 if group is None else dist.get_rank(group) * columns
        with torch.no_grad():
            held = logits[..., : max(0, min(columns, size - start))].float()
            sums = held.sum(-1)
            best = held.amax(-1) if held.shape[-1] else torch.full_like(sums, -torch.inf)
            top = best.clone()
            if group is not None:
                dist.all_reduce(sums, group=group)
                dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            winner = torch.where(best == top, held.argmax(-1) + start if held.shape[-1] else size, size)
            if group is not None:
                dist.all_reduce(winner, dist.ReduceOp.MIN, group=group)
            doubled = log_probs(logits * 2, own, mesh)
        chosen = log_probs(logits, own, mesh)
        values = {
            "log_probs": chosen,
            "entropy": entropy(logits, mesh, own),
            "log_sum_sq_probs": 2 * chosen.detach() - doubled,
            "mean_logits": (sums / size).masked_fill(own == IGNORED_LABEL, 0.0),
            "is_top1": ((winner == own) & (own != IGNORED_LABEL)).float(),
        }
        found = {name: whole_sequences(one, mesh)[:, : self._length][:, :-1] for name, one in values.items()}
        found["is_top1"] = found["is_top1"].bool()
        return FusedCausalLMOutput(**found, loss=output.loss, label_mask=shifted[:, :-1] != IGNORED_LABEL)
