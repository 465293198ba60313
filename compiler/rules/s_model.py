"""The model can be read, its keys fit together and have an effect; the rules of a user module fit it."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Safety, closest
from parcompile.model.hf_config import InjectionError, ModelConfigError
from parcompile.model.presets import near_presets, presets
from parcompile.spec.resolve import Resolution, Unavailable

from . import Finding, model_path, rule

_FILE = '"model": {"hf_config": "config.json"}'


@rule("S003")
def model_can_be_read(spec: Resolution) -> Iterator[Finding]:
    try:
        spec.described_shape  # noqa: B018 -- it says what is wrong
    except InjectionError:
        return  # rule S008 says what is wrong
    except ModelConfigError as error:
        path = model_path(spec, str(error.key))
        given = spec.get("model")
        hint: str | None = error.instead or None
        fixes: tuple[Fix, ...] = ()
        if "preset" in given:
            near = near_presets(given["preset"])
            known = near[0] if len(near) == 1 else None if near else closest(given["preset"], list(presets()))
            hint = f"did you mean {known}?" if known else f"known presets: {', '.join(near or presets())}"
            if "/" in given["preset"] or known is None:
                hint += f"; any other model: download its config.json and write {_FILE}"
            if known:
                fixes = (Fix(f"use {known}", Safety.CHANGES_NUMERICS, (Edit(("model", "preset"), known),)),)
        elif hint is None and error.key == "num_attention_heads":
            hint = "write head_dim, or other heads"
        elif hint is None and "is missing" in str(error):
            hint = f"add {error.key}" + (f" to {given['hf_config']}" if "hf_config" in given else "")
        elif hint is None and error.key not in (None, "hf_config") and "hf_config" in given:
            hint = f"change {error.key} in {given['hf_config']}"
        elif hint is None and error.key not in given and "hf_config" not in given:
            hint = f"add {error.key}"
        yield Finding(str(error), path, help=hint, fixes=fixes)


@rule("S008")
def rules_fit_the_module(spec: Resolution) -> Iterator[Finding]:
    try:
        spec.described_shape  # noqa: B018 -- it says what is wrong
    except InjectionError as error:
        for problem in error.problems:
            path, meant = ("model", *problem.path), problem.rename_to
            fixes: tuple[Fix, ...] = ()
            if meant is not None and meant not in spec.get("model", "injection"):
                fixes = (Fix(f"rename {path[-1]} to {meant}", Safety.CHANGES_COST, (Edit(path, rename_to=meant),)),)
            yield Finding(problem.message, path, help=problem.help, fixes=fixes)
    except ValueError:
        raise Unavailable("model") from None
