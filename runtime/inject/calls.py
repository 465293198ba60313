"""What a caller may ask an injected model of transformers for beside its loss: answered whole, or refused by name.

A rank's layers hold a share of each sequence (sequence parallelism) and attend by what a call says of documents and
padding. What goes in or comes out another way than by tokens and logits is cut or put together here; the table is in
docs/generating.md.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn

from parcompile.layout.groups import Axis
from parcompile.runtime import micro_batch
from parcompile.runtime.collectives import gather_from_group, scatter_to_group
from parcompile.runtime.data.inputs import ready_inputs
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.micro_batch import ALONE, current

from .adapters import INJECTED_FIRST
from .attention import name_for
from .generation import PAST
from .regions import Call

# What people do to a model of transformers that an injected one does not survive: each says what to do instead.

_PATCHED = "parcompile_patched"
_SETTER = "set_attn_implementation"
_WHOLE = "write the model with `parcompile checkpoint export DIR --hf OUT` and load it with from_pretrained"
_CLOSED = {
    "generate_batch": "continuous batching has an attention of its own. Call generate()",
    "init_continuous_batching": "continuous batching has an attention of its own. Call generate()",
    "set_input_embeddings": "words are dealt to the ranks. Change the whole model before initialize",
    "set_output_embeddings": "words are dealt to the ranks. Change the whole model before initialize",
}
"""Methods that an injected model refuses, whatever they are called with."""


def refuse_changes(model: nn.Module, mesh: Mesh) -> None:
    """Lets copies, pickles, another vocabulary and new adapters of an injected model say what to do."""
    if mesh.size("tp-pp") * mesh.size("cp") > 1 or mesh.parallel_group(Axis.EP) is not None:
        _refuse_adapters()
    model.__reduce_ex__ = _refuse_copy  # type: ignore[method-assign]
    if hasattr(model, "resize_token_embeddings"):
        model.resize_token_embeddings = functools.partial(_resize, model, mesh)  # type: ignore[assignment]
    for name, why in _CLOSED.items():
        if hasattr(model, name):
            setattr(model, name, functools.partial(_refuse, f"{name}() on an injected model: {why}"))
    for module in model.modules() if mesh.plan.spec.model.shape.user_module is None else ():
        if hasattr(module, _SETTER):
            setattr(module, _SETTER, functools.partial(_keep_attention, model.config))


def _refuse(why: str, *_: Any, **__: Any) -> NoReturn:
    raise RunError(why, everywhere=True)


def _keep_attention(config: Any, attn_implementation: Any, *_: Any, **__: Any) -> None:
    if attn_implementation != (kept := name_for(config)):
        raise RunError(
            f"attn_implementation {attn_implementation!r}: an injected model attends by {kept!r}, around the ring, "
            f"whose kernels the plan chooses. Leave it as it is; for another attention {_WHOLE}",
            everywhere=True,
        )


def _refuse_copy(_: object) -> NoReturn:
    raise RunError(
        "an injected model cannot be copied or pickled: its layers hold the process groups of this run. Copy the whole "
        "model before initialize (copy.deepcopy); for the weights of a run, save(engine, folder, step), and write them "
        "with `parcompile checkpoint export DIR --hf OUT`"
    )


def _resize(
    model: Any, mesh: Mesh, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *_: Any, **__: Any
) -> nn.Module:
    """`resize_token_embeddings` of transformers, as far as it changes nothing.

    Raises:
        RunError: it asks for another vocabulary.
    """
    size = mesh.plan.spec.model.shape.vocab_size
    wanted = size if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
    if wanted != size:
        raise RunError(
            f"resize_token_embeddings to {wanted} tokens: the plan has model.vocab_size {size}, whose rows are dealt "
            "to the ranks. Resize the whole model before initialize, save it (save_pretrained), and compile a plan of "
            f"its config.json, with vocab_size {wanted}",
            everywhere=True,
        )
    found: nn.Module = model.get_input_embeddings()
    return found


def _refuse_adapters() -> None:
    """Lets peft, where a program has imported it, say how adapters come to a model that is injected."""
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None or hasattr(peft.BaseTuner.inject_adapter, _PATCHED):
        return
    original = peft.BaseTuner.inject_adapter

    @functools.wraps(original)
    def inject_adapter(tuner: Any, model: Any, *args: Any, **options: Any) -> Any:
        if getattr(model, "parcompile_mesh", None) is not None:
            raise RunError(INJECTED_FIRST, everywhere=True)
        return original(tuner, model, *args, **options)

    setattr(inject_adapter, _PATCHED, True)
    peft.BaseTuner.inject_adapter = inject_adapter


# The one place where an injected model is called: what people give it becomes what its layers work on.


def name_arguments(model: nn.Module) -> None:
    """Lets every hook of a model find what it is called with by its name."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    names = [one.name for one in parameters if one.kind in kinds][1:]

    def name(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return _named(names, args, kwargs)

    model.register_forward_pre_hook(name, with_kwargs=True)


def _named(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return args[len(names) :], {**dict(zip(names, args, strict=False)), **kwargs}


def take_inputs(model: nn.Module, mesh: Mesh, *, first: bool = False) -> None:
    """Makes every call of a model ready for its layers; `first`: before the hooks that it has."""
    labels = mesh.plan.spec.model.shape.head.labels

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        if labels and any(kwargs.get(name) is not None for name in ("labels", "shift_labels")):
            raise RunError(
                f"a classifier (num_labels {labels}) was called with labels: a plan has no loss of its own for them. "
                "Compute the loss from its logits, as a trainer with its own compute_loss does (trl's RewardTrainer)",
                everywhere=True,
            )
        if args and "input_ids" not in kwargs:
            args, kwargs = args[1:], {"input_ids": args[0], **kwargs}
        return args, ready_inputs(kwargs, mesh)

    model.register_forward_pre_hook(take, with_kwargs=True, prepend=first)


# What is asked for in a call beside tokens, and what it answers beside logits.

_STATES = ("last_hidden_state", "hidden_states")


def answer_calls(model: nn.Module, base: nn.Module, mesh: Mesh) -> None:
    """Lets a model and its base model answer whole, or refuse by name, what they are asked for.

    The base model may be called by itself: it finds documents and padding as the whole model does.
    """
    answers = _Answers(model, mesh)
    model.register_forward_pre_hook(answers.enter, with_kwargs=True)
    model.register_forward_hook(answers.leave)
    if mesh.size("pp") == 1:
        alone = _OfBase(model, base, mesh)
        base.register_forward_pre_hook(alone.enter, with_kwargs=True, prepend=True)
        base.register_forward_hook(alone.leave)
        base.register_forward_hook(alone.end, always_call=True)


def look_up_whole(embedding: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Lets the embedding, called outside of the model, give whole sequences, not this rank's share of them."""

    def whole(_: nn.Module, args: tuple[Any, ...], rows: Tensor) -> Tensor:
        return rows if micro_batch.in_call() else gather_from_group(rows, 1, group, args[0].shape[1])

    embedding.register_forward_hook(whole)


class _Asked:
    """What a model is asked for, and how a rank answers."""

    def __init__(self, model: Any, mesh: Mesh) -> None:
        self.mesh, self.config = mesh, model.config
        axes = mesh.plan.spec.parallelism
        self.group = mesh.parallel_group("tp") if axes.sequence_parallel else None
        self.balances = hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
        self.as_tuple = False

    def take(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments, without what is answered here.

        Raises:
            RunError: something is asked for that no rank has.
        """
        _keep_attention(self.config, self.config._attn_implementation)
        if self._wants("output_attentions", kwargs):
            raise RunError(
                "output_attentions: no kernel of an injected model keeps the weights of its attention. Set "
                f"model.config.output_attentions to False and leave the argument out; for the weights {_WHOLE} "
                "(OUT, attn_implementation='eager')",
                everywhere=True,
            )
        if self.balances and self._wants("output_router_logits", kwargs):
            raise RunError(
                "output_router_logits in a call, or set after initialize: the balancing loss of the class knows "
                "nothing of other ranks. Set output_router_logits in the configuration before initialize, or "
                "training.router in the spec, and leave the argument out",
                everywhere=True,
            )
        self.as_tuple = not self._wants("return_dict", kwargs)
        return {**kwargs, "return_dict": True} if self.as_tuple else kwargs

    def _wants(self, name: str, kwargs: dict[str, Any]) -> bool:
        asked = kwargs.get(name)
        return bool(getattr(self.config, name, name == "return_dict") if asked is None else asked)

    def whole(self, output: Any) -> Any:
        """The output with hidden states of all tokens of this cp rank."""
        for name in _STATES if self.group is not None else ():
            if (states := output.get(name)) is not None:
                output[name] = self._whole(states)
        return output

    def _whole(self, states: Any) -> Any:
        if isinstance(states, Sequence):
            return tuple(map(self._whole, states))
        length = current().sequence_length
        return states if states is None else gather_from_group(states, 1, self.group, length)


class _Answers(_Asked):
    """Of a whole model."""

    kept: Any = 0

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        kwargs = self.take(kwargs)
        kept = kwargs.get("logits_to_keep")
        self.kept = 0
        if kept is None or (not isinstance(kept, Tensor) and kept == 0):
            return args, kwargs
        if self.mesh.size("cp") > 1 and not kwargs.get(ALONE):
            raise RunError(
                f"logits_to_keep {kept!r} under cp {self.mesh.size('cp')}, where a rank has part of the tokens: leave "
                "it out, and choose from parcompile.runtime.loss.whole_sequences(logits, mesh)",
                everywhere=True,
            )
        if self.group is not None:
            # A rank has a share of the hidden states: the head gives all logits, of which some are kept.
            self.kept = kwargs.pop("logits_to_keep")
        return args, kwargs

    def leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return None  # of a stage
        output = self.whole(output)
        if isinstance(self.kept, Tensor) or self.kept:
            from transformers.modeling_utils import slice_logits_to_keep

            output.logits = slice_logits_to_keep(output.logits, self.kept)
        return output.to_tuple() if self.as_tuple else output


class _OfBase(_Asked):
    """Of a base model, which the whole model calls, or a caller."""

    def __init__(self, model: Any, base: nn.Module, mesh: Mesh) -> None:
        super().__init__(model, mesh)
        self.parameters = inspect.signature(type(base).forward).parameters
        self.takes_all = any(one.kind is one.VAR_KEYWORD for one in self.parameters.values())
        self.here = False

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        args, kwargs = _named(list(self.parameters)[1:], args, kwargs)
        if not micro_batch.in_call():
            kwargs = self._begin(kwargs)
        rows = kwargs.get("inputs_embeds")
        # A stage that another one precedes is called with tokens, and hands on a share.
        if self.group is not None and rows is not None and current().tokens is None:
            kwargs["inputs_embeds"] = scatter_to_group(rows, 1, self.group, pad=True)
        return args, kwargs

    def _begin(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if kwargs.get("use_cache") or any(kwargs.get(name) is not None for name in PAST):
            raise RunError(
                "the base model of an injected model was called with use_cache or past_key_values: decode with the "
                "whole model, by generate() or by model(..., use_cache=True)",
                everywhere=True,
            )
        kwargs = micro_batch.begin((), ready_inputs(self.take(kwargs), self.mesh))
        self.here = True
        return {name: one for name, one in kwargs.items() if self.takes_all or name in self.parameters}

    def leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        if not self.here:
            return None
        output = self.whole(output)
        return output.to_tuple() if self.as_tuple else output

    def end(self, *_: Any) -> None:
        if self.here:
            self.here = False
            micro_batch.end()
