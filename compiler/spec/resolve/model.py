"""The model of a spec: a preset, a configuration file, or dimensions given inline."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from parcompile import schema
from parcompile.layout.groups import Axis
from parcompile.layout.shards import padded_vocab_size
from parcompile.model import ParameterTable
from parcompile.model.catalogue import ALIKE
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.model.key_types import portable
from parcompile.model.presets import find_preset, left_out, text_part
from parcompile.model.shape import ModelShape
from parcompile.spec import Model, Origin
from parcompile.user_files import read_text

from .reader import ParallelismValues, Unavailable


class ModelValues(ParallelismValues):
    """What the section `model` says."""

    whole_config: Mapping[str, Any] | None = None
    """What a configuration file holds, of a multimodal model with all its parts; None before it was read."""

    @functools.cached_property
    def model_config(self) -> Mapping[str, Any]:
        """The Hugging Face configuration of the model.

        Raises:
            ModelConfigError: the preset or the file does not exist or holds no configuration.
        """
        given = self.get("model")
        if "preset" in given:
            preset = find_preset(self.get("model", "preset"))
            if preset is None:
                raise ModelConfigError(f"there is no preset {given['preset']!r}", "preset")
            return preset.config
        if "hf_config" in given:
            self.whole_config = read_config(self.folder / self.get("model", "hf_config"))
            return text_part(self.whole_config)
        if any(path[:1] == ("model",) for path in self.invalid):
            # A dimension that is missing or wrong has been reported: what remains describes no model.
            raise Unavailable("model")
        return {key: self.get("model", key) for key in given}

    @property
    def described_shape(self) -> ModelShape:
        """The dimensions of the model, for rules that say why there are none.

        Raises:
            ModelConfigError: the configuration describes no model.
        """
        if isinstance(self._read_shape, ModelConfigError):
            raise self._read_shape
        return self._read_shape

    @functools.cached_property
    def _read_shape(self) -> ModelShape | ModelConfigError:
        """The dimensions, or why there are none: many rules ask for them."""
        try:
            return shape_from_config(self.model_config)
        except ModelConfigError as error:
            return error

    @functools.cached_property
    def shape(self) -> ModelShape:
        """The dimensions of the model."""
        try:
            return self.described_shape
        except ModelConfigError:
            raise Unavailable("model") from None

    @functools.cached_property
    def parameters(self) -> ParameterTable:
        """Every parameter of the model."""
        return parameter_table(self.shape)

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary with padding."""
        return padded_vocab_size(self.shape.vocab_size, self.axis(Axis.TP), self.make_vocab_size_divisible_by)

    def model(self) -> Model:
        """The whole section."""
        shape, given = self.shape, self.get("model")
        source = str(given.get("preset") or given.get("hf_config") or "dimensions")
        whole, part = self.whole_config, ""
        if whole is not None and whole["model_type"] in ALIKE:
            part = f" ({whole['model_type']}, whose layers are those of {shape.model_type})"
        elif whole is not None and whole is not self.model_config:
            part = f" (the text part of {whole['model_type']}; left as they are: {', '.join(left_out(whole))})"
        if "quantization_config" in self.model_config:
            part += " (quantization_config is left out: weights are not quantized in training)"
        origin = Origin.PRESET if "preset" in given else Origin.CONFIG if "hf_config" in given else Origin.SPEC
        for key, value in self.model_config.items():
            self.record(("model", key), value, origin, source if origin is not Origin.SPEC else "")
        return Model(source + part, shape, dict(self.model_config))


def config_file(path: FilePath) -> FilePath:
    """The configuration that a user names by its file or its folder."""
    return path / "config.json" if path.is_dir() else path


def read_config(path: FilePath) -> dict[str, Any]:
    """The configuration in a file, or in a plan.

    Raises:
        ModelConfigError: there is none, or a dimension of it is larger than any model's.
    """
    try:
        config = _parsed(read_text(path))
    except OSError as error:
        raise ModelConfigError(f"{path} cannot be read: {error.strerror}", "hf_config", _instead_of(path)) from None
    except RecursionError:
        raise ModelConfigError(f"{path} has too many brackets inside each other", "hf_config") from None
    except ModelConfigError as error:
        raise ModelConfigError(f"{path}: {error}", "hf_config") from None
    except UnicodeDecodeError as error:
        where = f"byte {error.start + 1} is 0x{error.object[error.start]:02X}, which is not UTF-8"
        raise ModelConfigError(f"{path} is not valid JSON: {where}", "hf_config") from None
    except ValueError as error:
        raise ModelConfigError(f"{path} is not valid JSON: {error}", "hf_config") from None
    if not isinstance(config, dict):
        raise ModelConfigError(f"{path} does not hold a JSON object", "hf_config")
    if {"model", "cluster"} <= config.keys() and "plan_version" not in config:
        raise ModelConfigError(f"{path} is a spec: name the config.json of a model", "hf_config")
    found: dict[str, Any] = _of_plan(config, path) if "plan_version" in config else config
    refuse_huge(found, path)
    return found


def refuse_huge(config: Mapping[str, Any], place: object) -> None:
    """Refuses dimensions above `most`.

    Raises:
        ModelConfigError: there is one; the message names the place.
    """
    text = config.get("text_config")
    for key, value in (*config.items(), *(text.items() if isinstance(text, dict) else ())):
        limit = most(key)
        if isinstance(value, int) and limit is not None and value > limit:
            raise ModelConfigError(f"{place}: {key} is {value}, more than the limit of {limit}", key)


_LAYERS = re.compile(r"n_layers?|num_(\w+_)?layers?")
"""Numbers of layers, as families name them."""


def _of_plan(plan: Mapping[str, Any], path: FilePath) -> dict[str, Any]:
    """The configuration that a plan holds."""
    section = plan.get("model")
    config = section.get("hf_config") if isinstance(section, dict) else None
    if not isinstance(config, dict):
        raise ModelConfigError(f"{path} is a plan that holds no configuration of its model", "hf_config")
    return config


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> Any:
    """What a configuration file holds: a search asks for the same one thousands of times, and nobody changes it."""
    if not text.strip():
        raise ModelConfigError("the file is empty")
    return portable(json.loads(text, object_pairs_hook=_once))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; one of two values of a key would be lost."""
    found = dict(pairs)
    for key, value in pairs:
        if value is not found[key] and value != found[key]:
            both = " and as ".join(json.dumps(one)[:40] for one in (value, found[key]))
            raise ModelConfigError(f"{json.dumps(key)} is written twice, as {both}: keep one")
    return found


def _instead_of(path: FilePath) -> str:
    """What to write instead of a path whose file cannot be read."""
    if path.is_dir():
        return "name the config.json in that folder" if (path / "config.json").is_file() else "name a file"
    return "a path that is not absolute starts in the folder of the spec" if not path.exists() else ""


@functools.lru_cache(maxsize=4096)
def most(key: str) -> int | None:
    """The largest value of a dimension. It bounds the work of the compiler, which lists layers one by one."""
    dimensions = schema.load("spec")["$defs"]["model_dimensions"]["properties"]
    entry = dimensions.get("num_hidden_layers" if _LAYERS.fullmatch(key) else key, {})
    found = entry.get("maximum")
    return None if found is None else int(found)
