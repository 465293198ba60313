"""The weights that a model begins with, the same for every layout: drawn, or read from a folder.

They are drawn in parts: a decoder layer, or all that lies outside of layers. Each has random numbers of its own, from
the seed and its name. So any rank draws the same weights, whichever parts it needs.
"""

from __future__ import annotations

import contextlib
import json
import re
import warnings
import zlib
from collections.abc import Collection, Container, Iterator
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
from parcompile.runtime.errors import RunError, everywhere
from parcompile.text.typed import Reader, WrongValueError
from parcompile.user_files import MAX_INDEX_BYTES, read_start, read_text

from .configuration import planned_config, unused_tensors
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
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


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


# Drawn from a seed, part by part, so that they need never exist all at once.

SMALL_NUMEL = 20_000_000
"""Models up to this many parameters are built whole, and the self-check compares them with the injected ones."""


def is_small(plan: Plan) -> bool:
    """Whether a plan's model is one of those."""
    return plan.parameters.numel <= SMALL_NUMEL


class UndrawnError(RunError):
    """Transformers' rules for the first weights of a type leave a parameter out."""


class InitialWeights:
    """The first weights of a transformers model, in fp32 on the CPU, as transformers' rules for its type draw them.

    Args:
        model: one whose parameters are on the meta device; they stay there.
        seed: of all random numbers.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model, self._seed = model, seed
        self._lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        self._firsts = dict[nn.Parameter, str]()
        """The first name of each."""
        self._names = {
            name: self._firsts.setdefault(one, name) for name, one in model.named_parameters(remove_duplicate=False)
        }
        self._drawn = dict[str, Tensor]()
        self._tied = set[nn.Parameter]()

    def whole(self, name: str) -> Tensor:
        """A parameter by any of its names. Those of the last part that was asked for are kept.

        Raises:
            UndrawnError: transformers' rules leave a parameter of its part out.
        """
        first = self._names[name]
        if first not in self._drawn:
            self._drawn = {}
            self._drawn = self.draw(self.part_of(first))
        return self._drawn[first]

    def draws_all(self) -> bool:
        """Whether transformers' rules leave no parameter out."""
        try:
            return all(self.draw(part) for part in self.parts())
        except UndrawnError:
            return False

    def parts(self) -> list[str]:
        """The names of all parts."""
        return list(dict.fromkeys(map(self.part_of, self._firsts.values())))

    def part_of(self, name: str) -> str:
        """The part in which a module or a parameter lies; empty for what lies outside of layers."""
        name = self._names.get(name, name)
        for one in self._lists:
            if name.startswith(f"{one}."):
                return f"{one}.{name[len(one) + 1 :].partition('.')[0]}"
        return ""

    def draw(self, part: str) -> dict[str, Tensor]:
        """All parameters of a part, by their first names in the model.

        Raises:
            UndrawnError: transformers' rules leave one out.
        """
        with torch.random.fork_rng(devices=[]), self._with_memory(part) as drawn, torch.no_grad():
            torch.manual_seed(zlib.crc32(f"{self._seed} {part}".encode()))
            self._apply(self._model, "", self._model, part)
        if left := [name for name, one in drawn.items() if one.isnan().any()]:
            raise UndrawnError(
                f"transformers draws no first weights for {left[0]} of {type(self._model).__name__}: build the model "
                "yourself and give it as model=",
                everywhere=True,
            )
        return drawn

    def fill(self) -> None:
        """Gives the model its weights.

        Raises:
            UndrawnError: as `draw`.
        """
        drawn = {name: one for part in self.parts() for name, one in self.draw(part).items()}
        for empty, places in self._places(self._firsts).items():
            filled = with_numbers(empty, drawn[self._firsts[empty]])
            for module, key in places:
                setattr(module, key, filled)

    def _apply(self, module: nn.Module, name: str, owner: nn.Module, part: str) -> None:
        """Children first, as transformers does; a model within a model has rules of its own."""
        owner = module if hasattr(module, "_init_weights") else owner
        for key, child in module.named_children():
            self._apply(child, f"{name}.{key}" if name else key, owner, part)
        if self.part_of(f"{name}.") == part:
            owner._init_weights(module)  # type: ignore[operator]
            for one in module.parameters(recurse=False):
                if one in self._tied:
                    vars(one)["_is_hf_initialized"] = True  # its first place decides

    def _places(self, wanted: Container[nn.Parameter]) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
        """Where these parameters are in the model."""
        found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in self._model.modules():
            for key, one in module.named_parameters(recurse=False):
                if one in wanted:
                    found.setdefault(one, []).append((module, key))
        return found

    @contextlib.contextmanager
    def _with_memory(self, part: str) -> Iterator[dict[str, Tensor]]:
        """Within it the parameters of a part are on the CPU, and hold no numbers."""
        places = self._places({one for one, name in self._firsts.items() if self.part_of(name) == part})
        filled = {empty: with_numbers(empty, torch.full(empty.shape, float("nan"))) for empty in places}
        self._tied = {filled[empty] for empty, known in places.items() if len(known) > 1}
        for empty, known in places.items():
            for module, key in known:
                setattr(module, key, filled[empty])
        try:
            yield {self._firsts[empty]: one.data for empty, one in filled.items()}
        finally:
            for empty, known in places.items():
                for module, key in known:
                    setattr(module, key, empty)


def with_numbers(empty: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter with numbers in place of one without."""
    filled = nn.Parameter(data, requires_grad=empty.requires_grad)
    vars(filled).update(vars(empty))
    return filled


# Read from a folder of Hugging Face weights, slice by slice.

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
                read_start(self.folder / name, 0)  # safetensors says that a file which it may not read is not there
                self._files[name] = safe_open(str(self.folder / name), "pt")
            except Exception as error:
                said = getattr(error, "strerror", None) or error
                raise everywhere(f"{self.folder / name} cannot be read: {said}") from None
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
