"""What a model is called with, as tokenizers, collators and trainers give it, made ready for a rank of a plan.

transformers' models take whole sequences, an attention mask and labels that they shift themselves. A rank's model takes
its tokens, labels that were shifted before the sequence was split, and the borders of packed documents. Numbers stay
those of transformers: labels count as they are given; a mask hides keys, and behind causal attention no token sees the
padding on its right.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.runtime.errors import RunError, everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.labels import IGNORED_LABEL, shift_labels
from parcompile.runtime.micro_batch import ALONE, DOCUMENTS, PACKING, REAL_TOKENS
from parcompile.runtime.ring_attention import document_borders, gather_sequence, local_positions, split_sequence

from .batches import Batch, with_positions

_MASK = "attention_mask"


def ready_inputs(given: Batch, mesh: Mesh) -> Batch:
    """What the injected model takes, from what it is called with. A batch that is ready stays as it is.

    Under cp a batch may hold whole sequences, of the plan's length, or this rank's tokens of them. Ranks exchange what
    they have to know of one another: a collective call over cp where labels, a mask or positions are not ready.

    Args:
        given: named arguments: `input_ids` [B, S] or `inputs_embeds` [B, S, H], and perhaps `labels`, `shift_labels`,
            `position_ids`, `attention_mask` [B, S].
        mesh: this rank's place.

    Raises:
        RunError: the mask hides more than padding on the right, or a padded position has a label.
    """
    given = with_positions(given)
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if tokens is None or tokens.dim() < 2 or given.get(ALONE) or given.get(PACKING) is not None:
        return given
    return _Sequences(given, tokens, mesh).ready()


class _Sequences:
    """The sequences of one batch, of which this rank holds a part or all."""

    def __init__(self, given: Batch, tokens: Tensor, mesh: Mesh) -> None:
        self.given, self.device = given, tokens.device
        self.rows, self.held = tokens.shape[0], tokens.shape[1]
        self.layout, self.cp, self.rank = mesh.plan.spec.parallelism.cp_layout, mesh.size("cp"), mesh.index("cp")
        self.group = mesh.parallel_group("cp")
        self.planned = mesh.plan.spec.training.sequence_length
        self.is_part = self.cp > 1 and self.held != self.planned
        self.length = self.held * self.cp if self.is_part else self.held

    def ready(self) -> Batch:
        found = dict(self.given)
        mask = found.pop(_MASK, None)
        if self.is_part and (mask is not None or not {"position_ids", "shift_labels"} <= found.keys()):
            self._check_part()
        real = None if mask is None else self._real(mask)
        positions, shifted = found.get("position_ids"), self._shifted(found, real)
        if DOCUMENTS not in found:
            documents = None
            if positions is not None and positions.dim() == 2 and positions.shape[1] == self.held:
                documents = document_borders(self._whole("position_ids"))
            found[DOCUMENTS] = self._alike(documents)
        if mask is not None and found[DOCUMENTS] is not None:
            raise RunError(
                "the model was called with an attention_mask and with position_ids that begin anew: with a mask "
                "transformers lets each token see the documents before its own. Leave out the mask, and documents are "
                "kept apart"
            )
        if real is not None:
            found[REAL_TOKENS] = self._part(real) if self.is_part else real
        if self.cp > 1 and not self.is_part:
            found = {name: self._part(one) if self._is_per_token(one) else one for name, one in found.items()}
        if positions is None:  # what goes by hidden states sees a rank's share of them alone
            own = local_positions(self.layout, self.cp, self.rank, self.length)
            found["position_ids"] = own.to(self.device).expand(self.rows, -1)
        if shifted:
            # transformers computes a loss only when it is given labels; ours looks at the shifted ones.
            found["labels"] = found["shift_labels"]
        return found

    def _check_part(self) -> None:
        """A collator that pads to the longest of a batch gives whole sequences that are no plan's.

        Raises:
            RunError: these are not this rank's tokens of sequences of the plan's length.
        """
        ids, both = self.given.get("input_ids"), f"sequences of the plan's sequence_length {self.planned}"
        if self.length != self.planned:
            raise everywhere(
                f"the model was called with {self.held} tokens: under cp {self.cp} it takes whole {both} (pad to that "
                f"length, padding='max_length'), or this rank's {self.planned // self.cp} tokens of them"
            )
        if ids is None:
            return
        parts: list[Tensor] = [torch.empty_like(ids) for _ in range(self.cp)]
        dist.all_gather(parts, ids.contiguous(), group=self.group)
        if all(torch.equal(one, ids) for one in parts) and bool((ids != ids.flatten()[0]).any()):
            raise everywhere(
                f"every rank of cp {self.cp} was given the same {self.held} tokens: give whole {both} (pad to that "
                "length, padding='max_length'), or each rank its own tokens of them (split_batch)"
            )

    def _shifted(self, found: Batch, real: Tensor | None) -> bool:
        """Puts shifted labels into the batch, if it has any."""
        if self.given.get("shift_labels") is not None:
            if real is not None:
                _check_labels(self._whole("shift_labels"), real)
            return True
        if self.given.get("labels") is None:
            return False
        whole = shift_labels(self._whole("labels"))
        if real is not None:
            _check_labels(whole, real)
        found["shift_labels"] = self._part(whole) if self.is_part else whole
        return True

    def _whole(self, name: str) -> Tensor:
        """[B, S] of whole sequences."""
        tensor: Tensor = self.given[name]
        return gather_sequence(tensor, 1, self.layout, self.group) if self.is_part else tensor

    def _part(self, whole: Tensor) -> Tensor:
        return split_sequence(whole, 1, self.layout, self.cp, self.rank).contiguous()

    def _is_per_token(self, given: Any) -> bool:
        return isinstance(given, Tensor) and given.dim() >= 2 and given.shape[1] == self.length

    def _alike(self, documents: list[list[int]] | None) -> list[list[int]] | None:
        """A list for each row, as positions [1, S] stand for all of them; None where each row is one document."""
        if documents is None or all(len(borders) == 2 for borders in documents):
            return None
        return documents * self.rows if len(documents) == 1 else documents

    def _real(self, mask: Any) -> Tensor | None:
        """Where tokens are none of padding [B, S] of whole sequences; None without any padding.

        Raises:
            RunError: it hides something else.
        """
        if not isinstance(mask, Tensor) or mask.shape != (self.rows, self.held):
            what = f"of shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"that is a {type(mask).__name__}"
            raise RunError(
                f"the model was called with an attention_mask {what}: the runtime takes 1 for tokens and 0 for padding "
                f"on the right, [{self.rows}, {self.held}]. Causal masks and windows are the model's own; packed "
                "documents are kept apart by position_ids that begin anew with each, without a mask"
            )
        real = self._whole(_MASK).bool()
        if bool(real.all()):
            return None
        wrong = (real[:, 1:] & ~real[:, :-1]).any(1).nonzero()
        if len(wrong):
            raise RunError(
                f"row {int(wrong[0])} of the attention_mask has padding before or between tokens, which attention over "
                "split sequences does not hide: pad on the right (tokenizer.padding_side = 'right'); generate() and "
                "decoding with use_cache=True take prompts that are padded on the left"
            )
        return real


def _check_labels(shifted: Tensor, real: Tensor) -> None:
    """What is computed at padded positions is not what transformers computes there: no loss may look at it."""
    wrong = (~real & (shifted != IGNORED_LABEL)).nonzero()
    if len(wrong):
        row, place = wrong[0].tolist()
        raise RunError(
            f"row {row} has the label {int(shifted[row, place])} at position {place + 1}, and its attention_mask is 0 "
            f"from position {int(real[row].sum())} on: give padding the label {IGNORED_LABEL} "
            f"(labels[attention_mask == 0] = {IGNORED_LABEL})"
        )
