"""Dense decoders in the manner of Llama: RMSNorm, rotary positions, gated or plain MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.model.family import Family, Norm, Refusal
from parcompile.model.layer_runs import LayerRuns, alternating

_POSITIVE = "it counts how often layers run: it has to be a whole number of 1 or more"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _passes(cycles: Any) -> bool:
    return cycles is None or (isinstance(cycles, list) and bool(cycles) and all(map(_whole, cycles)))


def _fits(config: Mapping[str, Any]) -> bool:
    layers, runs = config["num_layers_per_stack"], config.get("H_cycles", 2) * (config.get("L_cycles", 3) + 1)
    return _whole(layers) and layers * runs == config.get("num_hidden_layers")


def _cycles(config: Mapping[str, Any], layers: int) -> LayerRuns:
    return alternating(
        config.get("num_layers_per_stack") or layers,
        config.get("H_cycles", 2),
        config.get("L_cycles", 3),
        config.get("L_bp_cycles") or (2,),
    )


DENSE: Mapping[str, Family] = {
    "llama": Family(),
    "cwm": Family(defaults={"sliding_window": 8192}),
    "iquestcoder": Family(),
    "ministral3": Family(),
    "vaultgemma": Family(defaults={"sliding_window": 4096}),
    "hunyuan_v1_dense": Family(),
    "diffllama": Family(
        paired_heads=True,
        refusals=(
            Refusal(
                "num_key_value_heads",
                lambda config: (config.get("num_key_value_heads") or config.get("num_attention_heads") or 0) % 2 > 0,
                "its heads work in pairs, whose values are the halves of all: it has to be even",
            ),
            Refusal(
                "attention_dropout",
                lambda config: bool(config.get("attention_dropout")),
                "transformers builds no differential attention with dropout: it has to be 0",
            ),
        ),
    ),
    "hrm_text": Family(
        runs=_cycles,
        initial_state="z_L_init",
        gate="gate_proj",
        refusals=(
            Refusal("H_cycles", lambda config: not _whole(config.get("H_cycles", 2)), _POSITIVE),
            Refusal("L_cycles", lambda config: not _whole(config.get("L_cycles", 3)), _POSITIVE),
            Refusal(
                "L_bp_cycles",
                lambda config: not _passes(config.get("L_bp_cycles")),
                "it says in how many of the last low cycles gradients pass: it has to be a list of whole numbers of 1 "
                "or more",
            ),
            Refusal(
                "num_layers_per_stack",
                lambda config: config.get("num_layers_per_stack") is not None and not _fits(config),
                "num_hidden_layers beside it counts the runs of all layers: it has to be num_layers_per_stack x "
                "H_cycles x (L_cycles + 1)",
            ),
            Refusal(
                "attention_dropout",
                lambda config: bool(config.get("attention_dropout")),
                "masks are drawn by the number of the layer, which each of its runs has: it has to be 0",
            ),
        ),
        refused_axes={
            "pp": "its two stacks of layers run several times, one after the other: hidden states would pass each "
            "stage many times in a forward pass"
        },
    ),
    "mistral": Family(defaults={"sliding_window": 4096}),
    "ministral": Family(defaults={"sliding_window": 4096}),
    "qwen2": Family(window_key="use_sliding_window", defaults={"sliding_window": 4096}),
    "qwen3": Family(window_key="use_sliding_window", defaults={"sliding_window": 4096}),
    "gemma": Family(),
    "gemma2": Family(defaults={"sliding_window": 4096}),
    "gemma3_text": Family(
        # The published configurations of multimodal models leave out more than others do.
        defaults={
            "sliding_window": 4096,
            "num_attention_heads": 8,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
        }
    ),
    "phi3": Family(),
    "olmo": Family(norm=Norm.NOTHING),
    "olmo2": Family(),
    "olmo3": Family(defaults={"sliding_window": 4096}),
    "cohere": Family(),
    "cohere_compass_text": Family(defaults={"sliding_window": 4096}),
    "bitnet": Family(hidden_is_heads=True),
    "cohere2": Family(defaults={"sliding_window": 4096}),
    "glm": Family(),
    "glm4": Family(),
    "granite": Family(),
    "smollm3": Family(window_key="use_sliding_window"),
    "helium": Family(hidden_is_heads=True),
    "internlm3": Family(),
    "seed_oss": Family(),
    "exaone4": Family(defaults={"sliding_window": 4096}),
    "ernie4_5": Family(),
    "arcee": Family(),
    "apertus": Family(
        refusals=(
            Refusal(
                "hidden_act",
                lambda config: config.get("hidden_act", "xielu") != "xielu",
                "only xielu has the parameters that the MLP of this model type is described with",
            ),
        )
    ),
    "nanochat": Family(norm=Norm.NOTHING),
    "hyperclovax": Family(),
    "granite_swa": Family(sinks="sinks", defaults={"sliding_window": 128}),
}
