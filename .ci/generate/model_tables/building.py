"""Builds configurations and models of transformers on the meta device, and says what they hold."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import os
import re
import sys
import warnings
from dataclasses import MISSING, dataclass, fields
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from following import COMPUTED  # noqa: E402
from transformers import PreTrainedConfig  # noqa: E402
from transformers.initialization import no_init_weights  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from parcompile.model.tables.completing import with_kinds_of_today  # noqa: E402
from parcompile.model.tables.expression import evaluate  # noqa: E402
from parcompile.runtime.model.text_head import TEXT_MODELS, UNLISTED, causal_model  # noqa: E402

logging.disable(logging.CRITICAL)

CLASSES: dict[str, str] = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **UNLISTED, **TEXT_MODELS}
"""The class of each causal language model, by model type."""
INERT = re.compile(
    r"token_id|_id$|^id2|label|dtype|torch|seed|return_|output_(hidden|att)|problem|^architectures$|transformers_version"
    r"|name_or_path|use_cache|quant|^gradient|beams|max_length|min_length|pruned|_idx$|token_index|^is_encoder_decoder"
    r"|^_|rope_parameters|rope_scaling|per_layer_config|initializer|dropout|(^|_)eps$|epsilon|^model_type$|chunk_size_feed"
)
"""Keys that change no shape."""
LAYERS = re.compile(
    r"(^|\.|_)(n_layers?|num_layers?|num_hidden_layers|encoder_layers|decoder_layers|depth|num_blocks)$"
)


@dataclass(frozen=True)
class Sample:
    """A configuration as a file gives it, as its class completes it (both flat), and what the model registers."""

    given: dict[str, Any]
    raw: dict[str, Any]
    """What was given, with the defaults of what was not."""
    full: dict[str, Any]
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()


class ModelType:
    """A model type: its classes and the keys of its configuration."""

    def __init__(self, name: str) -> None:
        self.name, self.config_class = name, CONFIG_MAPPING[name]
        self.model_class = CLASSES[name]
        self.nested: dict[str, Any] = {}
        """Classes of the configurations inside this one, by their key."""
        self.numbers: set[str] = set()
        """Keys that hold a number under each of several names."""
        self.names: dict[str, str] = {}
        self.defaults: dict[str, Any] = {}
        self.hints: dict[str, str] = {}
        self._read(self.config_class, "")

    def _read(self, cls: Any, prefix: str) -> None:
        for old, new in cls.attribute_map.items():
            self.names[prefix + old] = new
        example: dict[str, Any] = {}
        with contextlib.suppress(Exception):
            example = vars(cls())
        for field in fields(cls):
            key = prefix + field.name
            inner = example.get(field.name)
            if isinstance(inner, PreTrainedConfig):
                if prefix.count(".") < 2:
                    self.nested[key] = type(inner)
                    self._read(type(inner), f"{key}.")
                continue
            is_numbers = isinstance(inner, dict) and inner and all(type(one) is int for one in inner.values())
            if is_numbers and not INERT.search(field.name):
                self.numbers.add(key)
                self.defaults |= {f"{key}.{name}": number for name, number in inner.items()}
                self.hints |= {f"{key}.{name}": "int" for name in inner}
                continue
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            if default is MISSING or not _is_json(default):
                continue
            self.defaults[key] = list(default) if isinstance(default, tuple) else default
            self.hints[key] = str(field.type)

    def source(self) -> str:
        """The code of the model and of its configuration."""
        import transformers

        found = ""
        for cls in (self.config_class, getattr(transformers, self.model_class)):
            with contextlib.suppress(Exception):
                found += inspect.getsource(sys.modules[cls.__module__])
        return found

    def configuration_sources(self) -> dict[str, str]:
        """The code of the classes of the configuration and of those inside it, by what stands before their keys."""
        found = {}
        for prefix, cls in {"": self.config_class, **{f"{key}.": cls for key, cls in self.nested.items()}}.items():
            with contextlib.suppress(Exception):
                bases = cls.__mro__[: cls.__mro__.index(PreTrainedConfig)]
                found[prefix] = "".join(map(inspect.getsource, bases))
        return found

    def configuration(self, given: dict[str, Any]) -> tuple[Any, Sample]:
        """The configuration that the class makes of flat values; raises whatever the class raises."""
        config = self.config_class(**nest(given))
        said = {self.canonical(key): value for key, value in given.items()}
        said = {key: with_kinds_of_today(key.rpartition(".")[2], value) for key, value in said.items()}
        raw = {**self.defaults, **said}
        full = {**raw, **self._flat(config)}
        computed = {key: evaluate(text, full) for key, text in COMPUTED.get(self.name, {}).items()}
        return config, Sample(given, raw, {**full, **computed})

    def model(self, given: dict[str, Any]) -> Sample:
        """The model of a configuration on the meta device; raises whatever its classes raise."""
        config, sample = self.configuration(given)
        return Sample(given, sample.raw, sample.full, registered(config))

    def canonical(self, key: str) -> str:
        """The name that the class has for a key; older files may have another."""
        owner, dot, name = key.rpartition(".")
        return owner + dot + self.names.get(key, name)

    def _flat(self, config: Any, prefix: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in vars(config).items():
            if isinstance(value, PreTrainedConfig):
                found.update(self._flat(value, f"{prefix}{key}."))
            elif prefix + key in self.numbers and isinstance(value, dict):
                found |= {f"{prefix}{key}.{name}": number for name, number in value.items()}
            elif not key.startswith("_") and _is_json(value):
                found[prefix + key] = list(value) if isinstance(value, tuple) else value
        return found


def registered(config: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names and shapes of the parameters of the model that a configuration describes, in their order."""
    with torch.device("meta"), no_init_weights():
        model = causal_model(config)
    model.tie_weights()  # no_init_weights leaves it out
    return tuple((name, tuple(parameter.shape)) for name, parameter in model.named_parameters())


def plan_of(name: str) -> dict[str, str]:
    """Transformers' plan of tensor parallelism for a model type: a pattern of names, and the way to cut."""
    kind = ModelType(name)
    config = kind.config_class()
    with torch.device("meta"), no_init_weights():
        model = causal_model(config)
    return dict(getattr(model, "tp_plan", None) or {})


def nest(given: dict[str, Any]) -> dict[str, Any]:
    """Flat values as nested keyword arguments, lists copied."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        *owners, last = key.split(".")
        holder = found
        for owner in owners:
            holder = holder.setdefault(owner, {})
        holder[last] = copy.deepcopy(value)
    return found


def _is_json(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_json(entry) for entry in value)
    return value is None or isinstance(value, bool | int | float | str)
