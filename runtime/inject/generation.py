"""`generate` of an injected Hugging Face model: the text that the whole model would give, between two training steps.

Tensor-parallel ranks generate together, each with its heads: logits are gathered, and random numbers are drawn alike.
Every cp rank has all weights: it generates alone, over whole sequences. Keys are kept from one token to the next.
Ranks that share experts generate together too, each its own text: all go on until the last of them has ended.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.layout.grid import Axis
from parcompile.runtime.collectives import gather_from_group
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.micro_batch import ALONE, DOCUMENTS


def let_generate(model: nn.Module, mesh: Mesh) -> None:
    """Gives an injected model a `generate` that works, or says what to do."""
    if hasattr(model, "generate"):
        model.generate = functools.partial(_generate, model, mesh, model.generate)  # type: ignore[assignment, arg-type]


def _generate(model: nn.Module, mesh: Mesh, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`generate` of transformers, with its arguments. All ranks of a tp group call it with the same ones.

    With expert parallelism every rank of the world calls it. The model is in evaluation mode meanwhile.

    Raises:
        RunError: the layers are in stages.
    """
    if (pp := mesh.size("pp")) > 1:
        raise RunError(
            f"generate() under pp {pp}: each stage has a part of the layers. Save a checkpoint, write it as a Hugging "
            "Face model with `parcompile checkpoint export DIR --hf OUT`, and generate with "
            "AutoModelForCausalLM.from_pretrained(OUT)",
            everywhere=True,
        )
    if mesh.parallel_group(Axis.EP) is not None:
        kwargs.setdefault("synced_gpus", True)
    with _whole_logits(model, mesh), _evaluating(model), _drawing_alike(mesh):
        return generate(*args, **kwargs)


@contextlib.contextmanager
def _whole_logits(model: nn.Module, mesh: Mesh) -> Iterator[None]:
    """Within it the model takes whole sequences, padded on the left or not at all, and gives whole logits."""
    group, vocabulary = mesh.parallel_group("tp"), mesh.plan.spec.model.shape.vocab_size

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = {**kwargs, ALONE: True}
        mask = kwargs.pop("attention_mask", None)
        if mask is not None and not bool(mask.all()):
            kwargs[DOCUMENTS] = _behind_padding(mask)
        if mesh.plan.spec.parallelism.sequence_parallel:
            kwargs["logits_to_keep"] = 0  # the last token is on one rank only
        return args, kwargs

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        logits = output.logits
        output.logits = (logits if group is None else gather_from_group(logits, -1, group))[..., :vocabulary]
        return output

    handles = (
        model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
        model.register_forward_hook(leave),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _behind_padding(mask: Tensor) -> list[list[int]]:
    """[B, S] of 0 for padding: the padding of each row is a document of its own, in front of the text."""
    real = mask.bool()
    if mask.dim() != 2 or bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise RunError("generate() takes prompts of different lengths padded on the left (padding_side='left')")
    length = mask.shape[1]
    return [sorted({0, length - int(count), length}) for count in real.sum(1).tolist()]


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def _drawing_alike(mesh: Mesh) -> Iterator[None]:
    """Within it the ranks of a tp group draw the same numbers at random; afterwards each goes on where it was."""
    group = mesh.parallel_group("tp")
    if group is None:
        yield
        return
    seed = torch.randint(2**62, (1,), device="cpu").to(mesh.device)
    dist.broadcast(seed, group=group, group_src=0)
    devices = [mesh.device] if mesh.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(seed))
        yield
