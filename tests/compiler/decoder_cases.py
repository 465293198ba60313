"""Drawn specs of every model type that the tools which describe decoders by switches can express."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from parcompile.backends.architecture.families import FAMILIES, Switches
from parcompile.model.catalogue import CORRECTED
from parcompile.model.families import FAMILIES as MODELS
from parcompile.model.tables import reads
from parcompile.pipeline import check_read
from parcompile.plan import Plan, compile_plan
from parcompile.text import parse

HEAD_DIM = 16


def compiled(tree: dict[str, Any]) -> Plan | None:
    """The plan of a spec; None when it has errors."""
    checked = check_read(parse(json.dumps(tree), "spec.json", "json"), Path())
    if not checked.valid or checked.resolution is None:
        return None
    return compile_plan(checked.resolution.spec(), tree, list(checked.diagnostics))


def keys(draw: st.DrawFn, choices: Any) -> dict[str, Any]:
    """The keys of one way of a switch."""
    return dict(choices[draw(st.sampled_from(sorted(choices, key=str)))])


@st.composite
def models(draw: st.DrawFn, names: tuple[str, ...] = tuple(FAMILIES)) -> dict[str, Any]:
    """A written-out model: sizes that divide over up to 4 ranks, and any of the family's switches."""
    name = draw(st.sampled_from(names))
    family = FAMILIES[name]
    heads, layers = draw(st.sampled_from([8, 16])), draw(st.sampled_from([4, 6, 8, 12]))
    found: dict[str, Any] = {
        "model_type": name,
        "hidden_size": heads * HEAD_DIM,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": draw(st.sampled_from([256, 384])),
        "vocab_size": draw(st.sampled_from([1000, 50257])),
        "max_position_embeddings": draw(st.sampled_from([512, 2048])),
        family.epsilon[0]: draw(st.sampled_from([1e-5, 1e-6])),
    }
    if draw(st.booleans()):
        found["tie_word_embeddings"] = draw(st.booleans())
    for choices in (family.biases, family.qk_norm, family.parallel):
        found |= keys(draw, choices)
    if family.latent:
        found |= {"num_key_value_heads": heads, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
        found |= {"v_head_dim": 16, "q_lora_rank": draw(st.sampled_from([32, 96]))}
    elif family.grouped:
        found["num_key_value_heads"] = draw(st.sampled_from([heads, heads // 2, 4]))
        if reads(name, "head_dim") and name != "starcoder2":
            found["head_dim"] = draw(st.sampled_from([HEAD_DIM, 2 * HEAD_DIM]))
    found |= _switches(draw, family)
    return found | (_experts(draw, name, family, layers) if family.router else {})


def _switches(draw: st.DrawFn, family: Switches) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if family.theta is not None and draw(st.booleans()):
        found[family.theta_key] = draw(st.sampled_from([10000.0, 500000.0]))
    if family.percent is not None and draw(st.booleans()):
        found[family.percent[0]] = draw(st.sampled_from([0.25, 0.5, 1.0]))
    if family.windowed is None and draw(st.booleans()):
        found["sliding_window"] = 128
    for key, _ in family.dropouts.values():
        if draw(st.booleans()):
            found[key] = draw(st.sampled_from([0.0, 0.1]))
    if draw(st.booleans()):
        found["initializer_range"] = 0.01
    return found


def _experts(draw: st.DrawFn, name: str, family: Switches, layers: int) -> dict[str, Any]:
    names = MODELS[name].experts
    assert names is not None
    found: dict[str, Any] = {names.count[0]: 8, names.per_token[0]: draw(st.sampled_from([2, 4]))}
    if names.width[0] != "intermediate_size":
        found[names.width[0]] = 64
    if names.shared_width:
        found[names.shared_width[0]] = draw(st.sampled_from([64, 128]))
    if names.shared_count:
        found[names.shared_count[0]] = draw(st.sampled_from([1, 2]))
    if family.has_dense_layers:
        dense = draw(st.sampled_from([0, 1, 2]))
        found |= {names.dense_layers[0]: dense} if names.dense_layers else {"mlp_only_layers": list(range(dense))}
    parts = family.router_keys
    if "normalized" in parts:
        found[parts["normalized"][0]] = (
            draw(st.booleans()) if family.router and family.router.score == "softmax" else True
        )
    if "scale" in parts and draw(st.booleans()):
        found[parts["scale"][0]] = draw(st.sampled_from([1.0, 2.5]))
    if "groups" in parts:
        groups = draw(st.sampled_from([1, 2]))
        per_token = found[names.per_token[0]] // 2 if groups > 1 else 1
        found |= {parts["groups"][0]: groups, parts["groups_per_token"][0]: min(per_token, groups)}
    return found


@st.composite
def layouts(draw: st.DrawFn, model: dict[str, Any]) -> dict[str, Any]:
    """A parallelism section for 16 ranks, in which stages can be uneven or virtual."""
    tp, cp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 1, 2, 4]))
    if tp * cp * pp > 16:
        cp = 1
    found: dict[str, Any] = {"tp": tp, "cp": cp, "pp": pp, "sequence_parallel": tp > 1 and draw(st.booleans())}
    if "num_experts_per_tok" in model:
        found |= {"ep": draw(st.sampled_from([1, 2])), "sequence_parallel": tp > 1}
    if cp > 1:
        found["cp_implementation"] = draw(st.sampled_from(["ring", "all_gather", "ulysses"]))
        if cp == 4 and draw(st.booleans()):
            found |= {"cp_implementation": "usp", "hierarchical_cp_sizes": [2, 2]}
    if draw(st.booleans()):
        found["order"] = "tp-cp-ep-pp-dp"
    return found | (_stages(draw, pp, model["num_hidden_layers"]) if pp > 1 else {})


def _stages(draw: st.DrawFn, pp: int, layers: int) -> dict[str, Any]:
    kind = draw(st.sampled_from(["even", "slots", "ends", "virtual"]))
    if kind == "slots":
        return {f"account_for_{part}_in_pipeline_split": draw(st.booleans()) for part in ("embedding", "loss")}
    if kind == "ends":
        return {"num_layers_in_first_pipeline_stage": draw(st.integers(1, layers - 1))}
    if kind == "virtual":
        return {"num_virtual_stages_per_pipeline_rank": draw(st.sampled_from([2, 3]))}
    return {}


RATES = st.floats(1e-6, 1e-2).map(lambda value: float(f"{value:.3g}"))


@st.composite
def trainings(draw: st.DrawFn, ranks: int) -> dict[str, Any]:
    """A training section for this many data-parallel ranks."""
    micro, steps, highest = draw(st.integers(1, 2)), draw(st.sampled_from([4, 8])), draw(RATES)
    precision = draw(st.sampled_from(["fp32", "bf16", "fp16"]))
    found: dict[str, Any] = {
        "sequence_length": 512,
        "global_batch_size": micro * steps * ranks,
        "micro_batch_size": micro,
        "precision": precision,
        "optimizer": {
            "lr": highest,
            "betas": draw(st.sampled_from([[0.9, 0.95], [0.8, 0.99]])),
            "eps": draw(st.sampled_from([1e-8, 1e-6])),
            "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        },
        "gradient_clipping": draw(st.sampled_from([0.0, 1.0])),
        "activation_checkpointing": draw(st.sampled_from(["none", "selective", "full"])),
        "seed": draw(st.sampled_from([1234, 7])),
    }
    if precision != "fp32":
        found["gradient_accumulation_dtype"] = draw(st.sampled_from(["fp32", precision]))
    if precision == "fp16":
        found["loss_scale"] = draw(st.sampled_from([0, 128.0]))
    if draw(st.booleans()):
        found["train_steps"] = 100
        kind = draw(st.sampled_from(["constant", "linear", "cosine", "inverse_sqrt", "wsd"]))
        found["lr_scheduler"] = {
            "type": kind,
            "warmup_steps": draw(st.integers(1 if kind == "constant" else 0, 50)),
            "min_lr": draw(st.sampled_from([0.0, highest / 8])),
        }
        if kind != "constant" and draw(st.booleans()):
            found["lr_scheduler"]["warmup_start_lr"] = draw(st.sampled_from([0.0, highest / 4]))
        if kind == "wsd":
            falls = st.sampled_from(["linear", "cosine", "sqrt", "exponential"])
            found["lr_scheduler"] |= {"decay_steps": draw(st.integers(1, 50)), "decay_type": draw(falls)}
        if kind in ("linear", "cosine", "wsd"):
            end = draw(st.sampled_from([None, 101, 320]))
            found["lr_scheduler"] |= {} if end is None else {"total_steps": end}
    return found


@st.composite
def routers(draw: st.DrawFn, model_type: str) -> dict[str, Any]:
    """Losses of routers that Megatron-LM has too, the move of their bias, and a capacity."""
    found: dict[str, Any] = {}
    if draw(st.booleans()):
        found["aux_loss"] = draw(RATES)
        found["aux_loss_scope"] = draw(st.sampled_from(["sequence", "micro_batch_per_layer", "global_batch"]))
    if draw(st.booleans()):
        found["z_loss"] = draw(RATES)
    if model_type in CORRECTED and draw(st.booleans()):
        found["bias_update_rate"] = draw(RATES)
    if draw(st.booleans()):
        found["expert_capacity"] = draw(st.sampled_from([0.5, 1.0, 1.25, 8.0]))
    return found


@st.composite
def specs(draw: st.DrawFn, names: tuple[str, ...] = tuple(FAMILIES), *, of_routers: bool = False) -> dict[str, Any]:
    """A whole spec on two nodes of eight ranks, of some with losses of routers."""
    model = draw(models(names))
    layout = draw(layouts(model))
    ranks = 16 // (layout["tp"] * layout["cp"] * layout["pp"])
    training, stage = draw(trainings(ranks)), draw(st.sampled_from([0, 1]))
    if of_routers and FAMILIES[model["model_type"]].router and draw(st.booleans()):
        training["router"] = draw(routers(model["model_type"]))
    return {
        "version": 1,
        "model": model,
        "cluster": {"nodes": 2, "gpus_per_node": 8},
        "parallelism": layout,
        "training": training,
        "zero": {"stage": stage},
    }
