"""Megatron-LM's words for positions and for what a query attends to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from parcompile.backends.architecture import Architecture, InexpressibleError, Rope, facts_of, refuse
from parcompile.backends.artefacts import tree_of
from parcompile.backends.reading import Arguments, Source
from parcompile.backends.statements import Facts
from parcompile.spec import Spec
from parcompile.text.typed import decimal
from parcompile.user_files import shipped

_SCALINGS = shipped(__package__, "groups.json")["scalings"]
LLAMA3: Mapping[str, float] = _SCALINGS["llama3"]
"""What --use-rope-scaling computes. --rope-scaling-factor is read by nothing: the builder of the model does not pass it
on, and the default of core/models/common/embeddings/rotary_pos_embedding.py stays."""
LATENT_YARN: Mapping[str, float] = _SCALINGS["yarn of latent attention"]
"""What latent attention computes YaRN with: these have no option."""


def write(found: Architecture, spec: Spec) -> Arguments:
    """The options of positions and window.

    Raises:
        InexpressibleError: Megatron-LM has no option for something.
    """
    facts = facts_of(found)
    refuse("megatron.positions", spec, facts)
    scaling: Mapping[str, Any] = {} if found.rope is None else found.rope.scaling
    kind = scaling.get("rope_type")
    if scaling and found.latent:
        _refuse_other(scaling, "yarn", LATENT_YARN, "latent attention")
    elif kind == "llama3":
        _refuse_other(scaling, "llama3", LLAMA3, "--use-rope-scaling")
    elif scaling and kind != "yarn" and (kind != "linear" or float(scaling.get("factor", 1.0)) % 1):
        what = "Megatron-LM scales rotary positions as llama3, linear or yarn do"
        raise InexpressibleError(f"rope_scaling {kind}", what)
    yarn = _write_yarn(scaling) if kind == "yarn" else {}
    of_scaling: Facts = {"scaling.": lambda _spec, key: scaling.get(key), "yarn.": lambda _spec, key: yarn[key]}
    options: Arguments = tree_of("megatron.positions", spec, {**facts, **of_scaling})
    return options


def _write_yarn(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Factor, bounds and the scales of the attention; Hugging Face uses the two scales only together."""
    if "factor" not in scaling:
        why = "Megatron-LM computes none from the positions, as transformers does"
        raise InexpressibleError("rope_scaling without a factor", why)
    factor = float(scaling["factor"])
    first, second = scaling.get("mscale"), scaling.get("mscale_all_dim")
    scales = (float(first), float(second)) if first and second else (1.0, 0.0)
    given, computed = scaling.get("attention_factor"), _magnitude(factor, scales[0]) / _magnitude(factor, scales[1])
    if given is not None and not math.isclose(given, computed, rel_tol=1e-6):
        raise InexpressibleError(f"rope_scaling attention_factor {given}", f"Megatron-LM computes {computed:.6g}")
    bounds = {key: float(scaling.get(key, LATENT_YARN[key])) for key in ("beta_fast", "beta_slow")}
    known = {"factor": factor, "mscale": scales[0], "mscale_all_dim": scales[1], **bounds}
    return {**known, "truncate": bool(scaling.get("truncate", True))}


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _refuse_other(scaling: Mapping[str, Any], kind: str, fixed: Mapping[str, Any], what: str) -> None:
    if scaling.get("rope_type") != kind:
        raise InexpressibleError(f"rope_scaling {scaling.get('rope_type')}", f"{what} scales as {kind} does")
    for key, value in fixed.items():
        if float(scaling.get(key, value)) != float(value):
            raise InexpressibleError(f"rope_scaling {key} {scaling[key]}", f"{what} always uses {value}")


def read(source: Source, *, latent: bool) -> dict[str, Any]:
    """The same options as switches of an `Architecture`.

    Raises:
        InexpressibleError: positions that a spec has no word for.
        UndecidedError: the file does not say a value.
    """
    kind = source.value("position_embedding_type", ("model",))
    if source.value("use_rotary_position_embeddings", ("model",)) is True:
        kind = "rope"
    window = source.value("window_size", ("model",))
    if kind not in ("rope", "yarn", "learned_absolute"):
        raise InexpressibleError(f"position_embedding_type {kind}", "a spec has rotary and learned positions")
    return {
        "rope": None if kind == "learned_absolute" else _read_rope(source, kind, latent=latent),
        **_read_window(window),
    }


def _read_window(window: Any) -> dict[str, Any]:
    if window is None:
        return {}
    left = str(window).strip("()[] ").partition(",")[0]
    return {"window": behind + 1} if (behind := decimal(left)) is not None else {}


def _read_rope(source: Source, kind: str, *, latent: bool) -> Rope:
    def number(name: str, default: float) -> float:
        value = source.value(name, ("model",))
        return default if value is None else float(value)

    scaling: dict[str, Any] = {}
    if latent:
        factor = number("rotary_scaling_factor", 1.0)
        if source.value("rope_type", ("model",)) != "rope" and factor > 1:
            scaling = {**_read_yarn(number), **LATENT_YARN}
    elif kind == "yarn":
        scaling = {
            **_read_yarn(number),
            "original_max_position_embeddings": int(number("yarn_original_max_position_embeddings", 4096)),
            "beta_fast": number("yarn_beta_fast", LATENT_YARN["beta_fast"]),
            "beta_slow": number("yarn_beta_slow", LATENT_YARN["beta_slow"]),
        }
        source.value("yarn_correction_range_round_to_int", ("model",))
        if source.value("no_yarn_correction_range_round_to_int", ("model",)) is True:
            scaling["truncate"] = False
    elif source.value("use_rope_scaling", ("model",)) is True:
        scaling = {"rope_type": "llama3", **LLAMA3}
    elif source.value("rotary_seq_len_interpolation_factor", ("model",)) is not None:
        scaling = {"rope_type": "linear", "factor": number("rotary_seq_len_interpolation_factor", 1.0)}
    source.ignore("rope_scaling_factor", "Megatron-LM does not pass it on to the model: the factor is 8")
    return Rope(
        theta=float(source.value("rotary_base", ("model",))),
        percent=1.0 if latent else number("rotary_percent", 1.0),
        scaling=scaling,
        interleaved=source.value("rotary_interleaved", ("model",)) is True,
    )


def _read_yarn(number: Callable[[str, float], float]) -> dict[str, Any]:
    first, second = number("mscale", 1.0), number("mscale_all_dim", 0.0)
    both = {"mscale": first, "mscale_all_dim": second} if second else {}
    if not second and first != 1.0:
        both = {"attention_factor": _magnitude(number("rotary_scaling_factor", 1.0), first)}
    return {"rope_type": "yarn", "factor": number("rotary_scaling_factor", 1.0), **both}
