"""The configuration of a model as transformers reads it, and what of it is not the plan's.

Two models with the same parameters compute other numbers when an epsilon, a rotary base, a window or a scale differs.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parcompile.model.blocks import KNOWN
from parcompile.model.key_types import FLOAT, architecture
from parcompile.model.presets import text_part
from parcompile.plan import Plan
from parcompile.runtime.errors import everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.transport.backend import gather_objects
from parcompile.user_files import read_text
from parcompile.version import how_to_install

from .text_head import TEXT_MODELS, model_class

FILE = "config.json"

_NO_EFFECT = frozenset(
    {
        # generation
        *("use_cache", "bos_token_id", "eos_token_id"),
        # weights that are drawn; those of a model that is given are there already
        "initializer_range",
        # heads for other tasks than language modelling
        *("classifier_dropout", "summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout"),
        "summary_proj_to_labels",
        # layer_types, which is compared, says for each layer what these say for all
        *("max_window_layers", "sliding_window_pattern"),
        # slices of Llama's projections in transformers 4; transformers 5 does not read it
        "pretraining_tp",
    }
)
"""Keys of configuration classes that change no number of a training step."""

_SHARED = frozenset({"is_causal", "per_layer_config"})
"""Keys that code outside of the models' own files reads."""

_SHOWN = 8
"""A message names this many keys at most."""


def planned_config(plan: Plan) -> Any:
    """The plan's configuration as transformers' own class, with the class's defaults for what the spec leaves out.

    Raises:
        RunError: transformers is missing, or does not take it.
    """
    return _read(plan.spec.model.hf_config, "the plan")


def unused_tensors(plan: Plan) -> tuple[str, ...]:
    """Patterns of the names of stored tensors that transformers' class of the plan's model does not load."""
    if plan.spec.model.shape.user_module is not None:
        return ()
    kind = model_class(planned_config(plan), plan.spec.model.shape.head.labels)
    return tuple(getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or ())


def saved_config(plan: Plan, dtype: torch.dtype) -> dict[str, Any]:
    """What `config.json` says beside weights of the plan's model: every key that its class reads, defaults too.

    Raises:
        RunError: as for `planned_config`.
    """
    config, labels = planned_config(plan), plan.spec.model.shape.head.labels
    if labels:
        config.num_labels = labels
    # Transformers has the text model of a multimodal one without its head only.
    config.architectures = [TEXT_MODELS.get(config.model_type, model_class(config, labels).__name__)]
    config.dtype = dtype
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in values.items() if not key.startswith("_")}


def folder_config(folder: str | Path) -> Any:
    """The configuration of a Hugging Face folder.

    Raises:
        RunError: there is none, or transformers does not take it.
    """
    path = Path(folder) / FILE
    try:
        values = json.loads(read_text(path))
    except OSError as error:
        raise everywhere(
            f"{path} cannot be read: {error.strerror}; weights need their configuration, which says which numbers "
            "they were trained with"
        ) from None
    except ValueError as error:
        raise everywhere(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise everywhere(f"{path} does not hold a JSON object")
    return _read(text_part(values), str(path))


def check_folder(folder: str | Path, plan: Plan, differs: Collection[str] = ()) -> None:
    """The configuration of a folder is the plan's, except for the keys in `differs`.

    Raises:
        RunError: other keys that change numbers differ; each is named with both values.
    """
    if (sentence := difference(folder_config(folder), plan, str(Path(folder) / FILE), differs)) is not None:
        raise everywhere(sentence)


def check_model(model: Any, mesh: Mesh) -> None:
    """The configuration of a model is the plan's on every rank. A collective call.

    Raises:
        RunError: on every rank alike; the message names the keys that differ, and the rank where only some ranks do.
    """
    if not hasattr(getattr(model, "config", None), "to_dict"):
        return  # no model of transformers: injection says so
    sentence = difference(model.config, mesh.plan, "the model")
    if mesh.device.type == "meta":
        if sentence is not None:
            raise everywhere(sentence)
        return
    differs = torch.tensor([sentence is not None], dtype=torch.int32, device=mesh.device)
    dist.all_reduce(differs, dist.ReduceOp.MAX)
    if not differs.item():
        return
    sentences = gather_objects(sentence)
    rank, first = next((rank, one) for rank, one in enumerate(sentences) if one is not None)
    where = "" if all(sentences) else f"on rank {rank}: "
    raise everywhere(f"{where}{first}")


def difference(config: Any, plan: Plan, where: str, differs: Collection[str] = ()) -> str | None:
    """What of a configuration is not the plan's, in a sentence; None when nothing is that changes numbers.

    Keys in `differs` do not count.
    """
    planned, family = planned_config(plan), plan.spec.model.shape.model_type
    if config.model_type != family:
        return f"model_type is {config.model_type!r} in {where} and {family!r} in the plan"
    found, expected = _values(config), _values(planned)
    stated = {planned.attribute_map.get(key, key) for key in plan.spec.model.hf_config}
    parts = []
    for key in sorted((read_keys(planned.__class__) & (found.keys() | expected.keys())) - set(differs)):
        for path, here, there in _leaves(key, found.get(key), expected.get(key)):
            default = "" if key in stated or key == "rope_parameters" else " (transformers' default)"
            parts.append(f"{path} is {here!r} in {where} and {there!r} in the plan{default}")
    if not parts:
        return None
    if len(parts) > _SHOWN:
        parts[_SHOWN:] = [f"{len(parts) - _SHOWN} more keys differ"]
    way_out = (
        f'write "hf_config": "{where}" under model in the spec; or, where the plan changes keys on purpose, name them: '
        "load_pretrained(..., differs=[...])"
        if where.endswith(FILE)
        else "save its configuration and name the file as model.hf_config in the spec"
    )
    return f"the model would compute other numbers than the plan's: {'; '.join(parts)}. To train it, {way_out}"


def _read(values: Mapping[str, Any], where: str) -> Any:
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        why = "" if error.name == "transformers" else f", which cannot be imported ({error})"
        raise everywhere(f"building the model needs transformers{why}: {how_to_install('hf')}") from None
    # A copy: some classes complete the objects inside in place.
    own: dict[str, Any] = _numbers(architecture(copy.deepcopy(dict(values))))
    family = own.pop("model_type", None)
    if family not in CONFIG_MAPPING:
        raise everywhere(f"transformers does not know the model type {family!r} of {where}")
    try:
        return CONFIG_MAPPING[family](**own)
    except Exception as error:  # the classes raise what they like
        reason = str(error).strip().partition("\n")[0]
        raise everywhere(f"transformers does not take the configuration of {where}: {reason}") from error


def _numbers(value: Any) -> Any:
    """A configuration with the numbers that JSON has no name for, which transformers writes as objects."""
    if isinstance(value, dict):
        return float(value[FLOAT]) if value.keys() == {FLOAT} else {key: _numbers(one) for key, one in value.items()}
    return [_numbers(one) for one in value] if isinstance(value, list) else value


def _values(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = config.to_dict()
    rope = values.get("rope_parameters")
    if isinstance(rope, Mapping):
        # The older name of rope_type, which stays beside it.
        values["rope_parameters"] = {key: value for key, value in rope.items() if key != "type"}
    if values.get("num_ln_in_parallel_attn", 0) is None and values.get("new_decoder_architecture"):
        values["num_ln_in_parallel_attn"] = 2  # Falcon's layers write it into their configuration
    for name in getattr(config, "sub_configs", {}):
        if isinstance(part := values.get(name), Mapping):
            # The type of the weights, which every part repeats, is the plan's precision.
            values[name] = {key: value for key, value in part.items() if key not in ("dtype", "torch_dtype")}
    return values


@functools.cache
def read_keys(config_class: type[Any]) -> frozenset[str]:
    """The keys that change numbers: those that the class declares, and those that the model's code names."""
    from transformers import PretrainedConfig

    declared = set(getattr(config_class, "__dataclass_fields__", ()))
    code = inspect.getsource(sys.modules[model_class(config_class).__module__])
    named = {one for found in re.findall(r'config\.(\w+)|config,\s*"(\w+)"', code) for one in found if one}
    mapped = {getattr(config_class, "attribute_map", {}).get(key, key) for key in declared | named}
    common = set(PretrainedConfig().to_dict())
    further = frozenset[str]().union(*(one.numeric_keys(frozenset(declared)) for one in KNOWN))
    return frozenset((mapped - common - _NO_EFFECT) | _SHARED | further)


def _leaves(path: str, found: Any, expected: Any) -> Iterator[tuple[str, Any, Any]]:
    """Where two values differ, down to the keys and entries of objects and lists."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        for key in sorted(found.keys() | expected.keys(), key=str):
            yield from _leaves(f"{path}.{key}", found.get(key), expected.get(key))
    elif _is_list(found) and _is_list(expected) and len(found) == len(expected):
        for index, (here, there) in enumerate(zip(found, expected, strict=True)):
            yield from _leaves(f"{path}[{index}]", here, there)
    elif found != expected and not (_is_list(found) and _is_list(expected) and list(found) == list(expected)):
        yield path, found, expected


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
