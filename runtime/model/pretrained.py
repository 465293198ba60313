"""A folder of Hugging Face weights, read slice by slice.

A model with initial weights is built with the same whole weights for every layout.
"""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.model.catalogue import TEXT_PARTS
from parcompile.model.presets import text_part
from parcompile.plan import Plan
from parcompile.runtime.errors import everywhere
from parcompile.text.typed import Reader, WrongValueError
from parcompile.user_files import MAX_INDEX_BYTES, read_text

from .configuration import planned_config, unused_tensors
from .initial import InitialWeights, UndrawnError, is_small
from .slices import Slice
from .stored_names import RULES, Joined, Rows, stored_as, written_as
from .text_head import causal_model


def build_model(plan: Plan, seed: int | None = None) -> nn.Module:
    """The plan's Hugging Face model, whole, in fp32 on the CPU, with weights drawn from `seed` (default: the plan's).

    The random state of the caller is left as it was. A small model is drawn by transformers as it builds it, a larger
    one part by part (`InitialWeights`), but for types whose rules in transformers leave a parameter to its module.

    Raises:
        RunError: transformers is missing or does not know the model type.
    """
    seed = plan.spec.training.seed if seed is None else seed
    if not is_small(plan):
        with contextlib.suppress(UndrawnError):
            model = without_memory(plan)
            InitialWeights(model, seed).fill()
            return model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return instantiate(plan, torch.float32)


def without_memory(plan: Plan, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The plan's model, whole, its parameters on the meta device.

    Raises:
        RunError: as `build_model`.
    """
    with parameters_without_memory():
        return instantiate(plan, dtype)


def persistent_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of a model that its files hold."""
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def instantiate(plan: Plan, dtype: torch.dtype) -> nn.Module:
    """The plan's Hugging Face model, whole, on the current default device.

    Raises:
        RunError: the plan is for a user module, transformers is missing, does not know the model type, or builds no
            model of its configuration.
    """
    if plan.spec.model.shape.user_module is not None:
        raise everywhere(
            "the plan is for a module of your own, which only you can build: pass it to initialize as model="
        )
    config = planned_config(plan)
    # A cache of keys and values serves generation; in training it would only hold memory.
    config.use_cache = False
    try:
        model: nn.Module = causal_model(config, plan.spec.model.shape.head.labels, dtype=dtype)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise everywhere(f"transformers builds no {config.model_type} of the plan's configuration: {error}") from error
    return model


def parameters_without_memory() -> AbstractContextManager[Any]:
    """Parameters that modules register go to the meta device; buffers stay, since no file holds them."""
    register = nn.Module.register_parameter

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    return mock.patch.object(nn.Module, "register_parameter", register_empty)


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LOOK = 64
"""Rows of a stored head that are compared with the embedding."""
_TEXT = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(.+)")
"""Names of the text part's tensors, in files of transformers 4 and 5."""
_PLAIN = re.compile(r"model\.(?:embed_tokens|layers|norm)\.")
"""Those in published files of Qwen2-VL, Qwen2.5-VL, PaddleOCR-VL and HunyuanOCR."""
_PUBLISHED = {kind: one["names"] for one in RULES["text_parts"] for kind in one["types"]}
"""How files of a type name tensors of its text part, and what they become. Transformers writes them so, too."""
_GENERATOR = re.compile(r"\.add_[qkv]_proj\.|\.to_add_out\.|\.norm_added_[qk]\.|moe_gen")
"""Tensors beside those of the layers in files of Cosmos 3, which draw images."""
_QUANTIZED = ("_blocks", "_scales", "_scale_inv", ".weight_scale", ".qweight")
"""Endings of tensors that stand for quantized weights: MXFP4, block-wise FP8, compressed-tensors, GPTQ."""


class PretrainedFolder:
    """The tensors of `model.safetensors`, or of the files that `model.safetensors.index.json` names.

    Raises:
        RunError: there are none, or the index does not fit the files.
    """

    def __init__(self, folder: str | Path) -> None:
        from safetensors import safe_open

        self.folder = Path(folder)
        self._names: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        if (self.folder / INDEX).is_file():
            try:
                tree = json.loads(read_text(self.folder / INDEX, MAX_INDEX_BYTES))
                places = Reader(tree).mapping("weight_map").words()
            except WrongValueError as error:
                raise everywhere(f"{self.folder / INDEX}: {error}") from None
            except (OSError, ValueError, RecursionError) as error:
                raise everywhere(f"{self.folder / INDEX} cannot be read: {error}") from None
        elif (self.folder / SINGLE).is_file():
            places = {}
        else:
            raise everywhere(f"{self.folder} has neither {SINGLE} nor {INDEX}")
        for name in sorted(set(places.values())) or [SINGLE]:
            if Path(name).name != name:
                raise everywhere(f"{INDEX} names {name!r}, which is not a file beside it")
            try:
                self._files[name] = safe_open(str(self.folder / name), "pt")
            except Exception as error:
                raise everywhere(f"{self.folder / name} cannot be read: {error}") from None
        self._places = dict(places) or dict.fromkeys(self._files[SINGLE].keys(), SINGLE)
        for tensor, name in self._places.items():
            if tensor not in self._files[name].keys():  # noqa: SIM118 -- safetensors' file is no mapping
                raise everywhere(f"{INDEX} places {tensor} in {name}, which does not hold it")
        self.beside: frozenset[str] = frozenset()
        if (kind := _multimodal_type(self.folder)) is not None:
            self._take_text_part(kind)

    def _take_text_part(self, kind: str) -> None:
        """Names the tensors of the text part as a model of its own does, and sets those of other parts aside."""
        self._names = {name: stored for stored in self._places if (name := text_name(stored, kind)) is not None}
        self.beside = frozenset(self._places.keys() - set(self._names.values()))
        self._places = {name: self._places[stored] for name, stored in self._names.items()}

    def as_stored(self, name: str, whole: Tensor) -> dict[str, Tensor] | None:
        """A tensor of the model as the files have it, by their names; None: they have it under no name of its own."""
        found = written_as(name, whole, self._places.keys(), self._open)
        return None if found is None else {self._names.get(one, one): part for one, part in found.items()}

    def set_aside(self, stored: str) -> Tensor:
        """A whole tensor of another part than the text, by its name in the files."""
        for file in self._files.values():
            if stored in file.keys():  # noqa: SIM118 -- safetensors' file is no mapping
                found: Tensor = file.get_tensor(stored)
                return found
        raise KeyError(stored)

    def check(self, plan: Plan, buffers: Collection[str] = ()) -> None:
        """The folder holds what the plan's model needs, in its shapes, and nothing else but the model's buffers.

        Tensors that transformers leaves out of the model's type too (layers that predict further tokens, say) are left
        out with a warning.

        Raises:
            RunError: a tensor is missing, misshapen or not the model's; it is named.
        """
        planned = {name: parameter.shape for name, parameter in plan.parameters.expanded()}
        used: set[str] = set()
        for name, shape in planned.items():
            entry = stored_as(name, self._places.keys(), self._open)
            if entry is None:
                raise everywhere(f"{self.folder} lacks {name} {list(shape)}{self._quantized()}")
            found = tuple(entry[0].get_shape())
            if found != shape:
                raise everywhere(f"{name} is {list(found)} in {self.folder} and {list(shape)} in the plan")
            used |= entry[1]
        # A tied head is sometimes stored all the same, and older files hold buffers of the rotary embedding.
        tied = {"lm_head.weight"} if plan.spec.model.shape.tie_word_embeddings else set()
        if tied & self._places.keys():
            self._check_tied(next(iter(planned)))
        for name in buffers:
            entry = stored_as(name, self._places.keys(), self._open)
            used |= set() if entry is None else entry[1]
        extra = self._places.keys() - used - tied
        extra = {name for name in extra if not name.endswith("rotary_emb.inv_freq")}
        unused = {name for name in extra if any(re.search(pattern, name) for pattern in unused_tensors(plan))}
        if unused and (not dist.is_initialized() or dist.get_rank() == 0):
            warnings.warn(
                f"{len(unused)} tensors of {self.folder}, {min(unused)} among them, are not loaded: transformers "
                f"builds no such part of a {plan.spec.model.shape.model_type}, and what is exported lacks them",
                stacklevel=2,
            )
        extra -= unused
        if extra:
            raise everywhere(f"{self.folder} has {min(extra)}, which the plan does not know{self._quantized()}")

    def _check_tied(self, embedding: str) -> None:
        """A head that is stored beside the embedding that it is tied to is the same, as far as a look shows."""
        one, other = (self._slice(name) for name in (embedding, "lm_head.weight"))
        if one.get_shape() != other.get_shape() or not torch.equal(one[:_LOOK], other[:_LOOK]):
            raise everywhere(
                f"{self.folder} holds an lm_head.weight that is not the embedding, to which tie_word_embeddings ties "
                "it: write tie_word_embeddings false in the configuration of the plan and of the folder"
            )

    def _quantized(self) -> str:
        """Why a folder of quantized weights lacks others, and how to get those."""
        quantized = sorted(name for name in self._places if name.endswith(_QUANTIZED))
        if not quantized:
            return ""
        return (
            f": its weights are quantized ({quantized[0]}), and training needs them whole. Load them once with "
            "transformers' from_pretrained and dequantize=True in the quantization_config (Mxfp4Config, "
            "FineGrainedFP8Config), and save them with save_pretrained"
        )

    def take(self, name: str, piece: Slice, shape: torch.Size) -> Tensor:
        """The ranges of a tensor along the cut dim, in order, and zeros where they reach beyond it; only they are read.

        Of experts that are dealt, those of the slice.
        """
        stored, dim, ranges = self._slice(name), piece.dim, piece.ranges
        if piece.experts is not None:
            stored = Joined([Rows(stored, start, stop) for start, stop in piece.experts])
        if dim is None or ranges is None:
            whole: Tensor = stored[...]
            return whole
        size = stored.get_shape()[dim]
        taken, offset = None, 0
        for start, stop in ranges:
            real = max(min(stop, size) - start, 0)
            place = (slice(None),) * dim + (slice(start, start + real),)
            part: Tensor | None = stored[place] if real else None
            if taken is None:
                if part is not None and tuple(part.shape) == tuple(shape):
                    return part
                taken = torch.zeros(shape, dtype=part.dtype if part is not None else torch.float32)
            if part is not None:
                taken.narrow(dim, offset, real).copy_(part)
            offset += stop - start
        assert taken is not None
        return taken

    def __contains__(self, name: str) -> bool:
        """Whether there is such a tensor, under this name or the one that files use."""
        return stored_as(name, self._places.keys(), self._open) is not None

    def whole(self, name: str) -> Tensor:
        """A whole tensor."""
        found: Tensor = self._slice(name)[...]
        return found

    def _slice(self, name: str) -> Any:
        entry = stored_as(name, self._places.keys(), self._open)
        if entry is None:
            raise everywhere(f"{self.folder} lacks {name}")
        return entry[0]

    def _open(self, stored: str) -> Any:
        return self._files[self._places[stored]].get_slice(self._names.get(stored, stored))


def text_name(stored: str, kind: str = "") -> str | None:
    """The name in a causal language model of a tensor of a multimodal one, of type `kind`.

    None when it belongs to another part.
    """
    if kind in _PUBLISHED and _GENERATOR.search(stored):
        return None
    for pattern, name in _PUBLISHED.get(kind, ()):
        stored = re.sub(pattern, name, stored)
    found = _TEXT.match(stored)
    if found is None:
        return stored if stored == "lm_head.weight" or _PLAIN.match(stored) else None
    rest = found[1]
    return rest if rest.startswith("lm_head.") else f"model.{rest}"


def _multimodal_type(folder: Path) -> str | None:
    """The type of a folder of a multimodal model whose text part is taken; None: the folder is no such model's."""
    try:
        values = json.loads(read_text(folder / "config.json"))
    except (OSError, ValueError):
        return None
    if not isinstance(values, dict) or values.get("model_type") not in TEXT_PARTS or text_part(values) is values:
        return None
    return str(values["model_type"])
