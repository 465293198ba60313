"""What torch keeps of a micro-batch is what the estimate says, closer than preflight's 10 %."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from families import FAMILIES, VARIANTS, tiny_config
from test_preflight import script
from training_runs import make_plan

from parcompile.cost.footprint import footprint
from parcompile.cost.kept import CHOICE, FURTHER, GROUPS, group_bytes, sorts
from parcompile.cost.recurrent import state_bytes
from parcompile.cost.workload import SHARED_FIRST
from parcompile.layout.pipeline import Schedule
from parcompile.model.blocks.block import StateCut
from parcompile.model.blocks.indexer import Indexer
from parcompile.model.blocks.mamba2 import Mamba2
from parcompile.model.blocks.recurrent import RecurrentTraits
from parcompile.model.catalogue import CAPPED_LOGITS, LOGIT_CAP, RUNTIME_FAMILIES, WEIGHTED_IN_TYPE
from parcompile.model.families import family_of
from parcompile.model.hf_config import shape_from_config
from parcompile.plan import Plan, compile_plan
from parcompile.rules import check
from parcompile.runtime.model.text_head import causal_model
from parcompile.runtime.preflight.stand_in import MetaTracker, stand_in
from parcompile.runtime.preflight.step import build_sharded, run_step
from parcompile.spec.resolve import Resolution
from parcompile.spec.values import workload_of

NEAR = 0.04
"""Statistics of norms and angles are left out, and single gradients in flight."""

LATENT: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "q_lora_rank": 512,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "n_routed_experts": 8,
}
DEEPSEEK: dict[str, Any] = {
    **LATENT,
    "model_type": "deepseek_v3",
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_key_value_heads": 16,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LONGCAT: dict[str, Any] = {
    **LATENT,
    "model_type": "longcat_flash",
    "ffn_hidden_size": 2048,
    "expert_ffn_hidden_size": 512,
    "num_layers": 2,
    "zero_expert_num": 4,
    "moe_topk": 4,
    "head_dim": 32,
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma2",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "query_pre_attn_scalar": 128,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
    "attn_logit_softcapping": None,
}
GPT_NEOX: dict[str, Any] = {
    "model_type": "gpt_neox",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "vocab_size": 4096,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
}


def activations(plan: Plan, rank: int = 0) -> tuple[float, int]:
    """Of a micro-batch on a rank: as estimated and as counted, in bytes."""
    with stand_in(plan, rank) as mesh:
        tracker = MetaTracker(mesh)
        with tracker:
            model, _ = build_sharded(mesh, tracker)
            taken = run_step(model, mesh, tracker).taken
        stage = mesh.index("pp")
    work = workload_of(plan.spec)
    parts = footprint(replace(work, micro_batches=1)).stages[stage].components
    passes = Schedule(work.pp, 1, work.virtual_stages).passes(stage)
    return parts["activations"] + parts["logits"], taken.activations(passes)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("config", "axes", "recompute"),
    [
        # Values lie beside keys in what their projection gives; what is compressed passes norms; routers take fp32;
        # experts of one module with two layers go backward when the other layer is gone, and some have no weights.
        (DEEPSEEK, {}, "none"),
        (LONGCAT, {"tp": 2}, "none"),
        # A cap on logits keeps them twice.
        (GEMMA, {}, "none"),
        ({**GEMMA, "final_logit_softcapping": None}, {}, "full"),
        # A norm behind the MLP goes backward when all of its layer is there.
        ({**GEMMA, "vocab_size": 512}, {}, "full"),
        # A LayerNorm is one kernel: no gradient of it is in fp32.
        (GPT_NEOX, {}, "none"),
        (GPT_NEOX, {"tp": 2, "sequence_parallel": True}, "none"),
        # Slices of dealt experts, to which the rows of all tp ranks come.
        (QWEN, {"tp": 4, "dp": 2, "ep": 2}, "full"),
        (QWEN, {"dp": 2, "ep": 2}, "full"),
    ],
)
def test_activations_are_those_that_are_counted(
    config: dict[str, Any], axes: dict[str, Any], recompute: str, precision: str
) -> None:
    training = {
        "sequence_length": 1024,
        "global_batch_size": 4,
        "micro_batch_size": 1,
        "precision": precision,
        "activation_checkpointing": recompute,
    }
    world = axes.get("tp", 1) * axes.get("dp", 1)
    cluster = {"gpus_per_node": world, "accelerator": "h200"}
    plan = make_plan(world, axes, model=config, training=training, whole_model=True, extra={"cluster": cluster})
    estimated, counted = activations(plan)
    assert estimated == pytest.approx(counted, rel=NEAR)


@pytest.mark.parametrize("kind", ["deepseek_v32", "axk2"])
def test_indexers_score_several_rows_without_copies_of_keys(kind: str) -> None:
    # torch would expand the keys of both rows to each query: 1 GiB here.
    indexer = {"index_n_heads": 2, "index_head_dim": 128, "index_topk": 256}
    training = {"sequence_length": 1024, "micro_batch_size": 2, "global_batch_size": 8, "precision": "bf16"}
    cluster = {"gpus_per_node": 1, "accelerator": "h200"}
    config = {**DEEPSEEK, **indexer, "model_type": kind, "num_attention_heads": 2, "num_key_value_heads": 2}
    plan = make_plan(1, {}, model=config, training=training, whole_model=True, extra={"cluster": cluster})
    estimated, counted = activations(plan)
    assert estimated == pytest.approx(counted, rel=NEAR)


def test_every_class_that_caps_logits_is_listed() -> None:
    from transformers import CONFIG_MAPPING

    known = [name for name in RUNTIME_FAMILIES if name in CONFIG_MAPPING]
    capped = {name for name in known if hasattr(CONFIG_MAPPING[name]().get_text_config(), LOGIT_CAP)}
    assert "gemma2" in capped
    assert capped <= CAPPED_LOGITS.keys()


@pytest.mark.parametrize("name", sorted(CAPPED_LOGITS))
def test_caps_of_logits_are_those_of_the_classes(name: str) -> None:
    from transformers import CONFIG_MAPPING

    assert getattr(CONFIG_MAPPING[name]().get_text_config(), LOGIT_CAP) == CAPPED_LOGITS[name]


@pytest.mark.parametrize("family", [name for name in RUNTIME_FAMILIES if FAMILIES[name].experts is not None])
def test_types_are_listed_by_the_rows_of_their_routers_and_the_place_of_their_shared_experts(family: str) -> None:
    from transformers import CONFIG_MAPPING

    config = {key: value for key, value in tiny_config(family).items() if key != "model_type"}
    with torch.device("meta"):
        model = causal_model(CONFIG_MAPPING[family](**config)).to(torch.bfloat16)
    given: set[torch.dtype] = set()
    traits, order = family_of(family).experts, list[str]()
    assert traits is not None
    shared = traits.shared or traits.beside

    def note(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [one for one in (*args[1:], *kwargs.values()) if isinstance(one, torch.Tensor)]
        given.update(one.dtype for one in tensors if one.is_floating_point())

    for name, module in model.named_modules():
        if name.endswith("experts"):
            module.register_forward_pre_hook(note, with_kwargs=True)
        if (kind := name.rpartition(".")[2]) in ("experts", shared):
            module.register_forward_pre_hook(lambda *_, kind=kind: order.append(kind))
    with contextlib.suppress(NotImplementedError):  # torch has no meta kernel for some choices
        model(input_ids=torch.zeros(1, 8, dtype=torch.long, device="meta"))
    if given:  # else experts take tokens that are weighted, or were not reached
        assert (family in WEIGHTED_IN_TYPE) == (given == {torch.bfloat16})
    if shared and {"experts", shared} <= {*order}:
        assert (family in SHARED_FIRST) == (order[0] == shared)


def test_every_type_has_rows() -> None:
    assert set(RUNTIME_FAMILIES) == script("generate/kept").stored().keys()


def test_the_file_of_rows_is_as_its_generator_writes_it() -> None:
    kept = script("generate/kept")
    assert kept.table(kept.stored()) == kept.FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "family",
    [
        *(
            "llama",
            "gpt2",
            "gemma2",
            "cohere2",
            "phi3",
            "qwen3_moe",
            "gpt_oss",
            "deepseek_v3",
            "axk1",
            "muse_spark_text",
        ),
        *("minicpm3", "qwen3_next", "nemotron_h", "minimax_m3_vl_text", "codegen", "llama4_text", "deepseek_v32"),
        *("glm5_next_text", "deepseek_v4", "longcat_flash", "zamba2", "hrm_text"),
    ],
)
def test_rows_give_what_the_layers_of_drawn_models_keep(family: str, precision: str) -> None:
    kept = script("generate/kept")
    pick, found = random.Random(f"drawn {family}"), []
    while len(found) < 4:
        with contextlib.suppress(Exception):  # a draw that the type refuses
            found += kept.drawn(family, pick, precision, len(found))
    for layer in found:
        held = sum(count * size for group in GROUPS for _, _, count, size in layer.of(group).tensors)
        choices = sum(8 * count for _, _, count, size in layer.tensors if size == 8)  # which rows may leave out
        width, states = 4 if precision == "fp32" else 2, any(part.states for part in layer.sort.parts)
        taken = width * layer.sort.shape.hidden_size * layer.tokens * states  # by a state, in modules that are left out
        counted = kept.counted(layer, width)
        most = held + choices + taken
        assert held <= counted * (1 + 1e-3) and counted <= most * (1 + 1e-3), "python .ci/generate/kept.py"


OF_GROUPS = {
    "beside": ("qwen4_exp_text", "zamba2"),
    "choice": ("deepseek_v32", "glm5_next_text", "deepseek_v4", "qwen4_exp_text"),
    "front": ("gemma3n_text", "gemma4_text", "bloom", "muse_spark_text"),
    "behind": ("gemma3n_text", "hy_v4", "deepseek_v4", "qwen4_exp_text"),
}
"""Of each group that is counted by itself types that keep unlike things in it."""


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("group", "family"), [(group, one) for group, types in OF_GROUPS.items() for one in types])
def test_rows_give_what_mechanisms_and_the_ends_of_drawn_models_keep(group: str, family: str, precision: str) -> None:
    kept = script("generate/kept")
    pick, found, width = random.Random(f"{group} {family}"), [], 4 if precision == "fp32" else 2
    while len(found) < 4 or not any(one.tensors for one in found):
        with contextlib.suppress(Exception):  # a draw that the type refuses
            found += kept.of_group(kept.drawn(family, pick, precision, len(found), (2, 4, 1)), group)
    for layer in found:
        held = sum(count * size for _, _, count, size in layer.tensors)
        of_each = group_bytes(layer.sort, group, layer.tp, layer.own < layer.tokens, width)
        counted = sum(getattr(layer, basis, 1) * size for basis, size in of_each.items())
        assert counted == pytest.approx(held, rel=kept.NEAR), f"python .ci/generate/kept.py {family} --only {group}"


def test_every_type_has_rows_of_further_groups() -> None:
    every = script("generate/kept").stored().items()
    assert not [(kind, word) for kind, one in every for word in ("16", "32") if not {*FURTHER} <= one[word].keys()]


STATES = ["lfm2", "jamba", "mamba", "bamba", "mamba2", "qwen3_next", "olmo_hybrid", "kimi_linear", "minimax"]
"""Of each kind of layer that carries a state one type, or two that keep unlike things."""


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("family", STATES)
def test_rows_give_what_modules_that_carry_a_state_keep(family: str, precision: str) -> None:
    kept, states = script("generate/kept"), script("generate/kept_states")
    pick, width = random.Random(f"states {family}"), 4 if precision == "fp32" else 2
    for spread, batch in itertools.product(states.SPREADS, (1, 2)):
        found: list[Any] = []
        while not found:
            with contextlib.suppress(Exception):  # a draw that the type refuses
                layers = kept.drawn(family, pick, precision, batch, (1, 2), replace(spread, batches=(batch,)))
                found = [one for one in layers if states.part_of(one) is not None][:1]
        held = sum(size for *_, size in states.kept(found[0]))
        counted = state_bytes(found[0].sort, states.cut_of(found[0]), width)
        assert counted == pytest.approx(held, rel=states.NEAR), "python .ci/generate/kept.py --states"


LIKE_OTHERS = ("bailing_hybrid", "glm5_next_text", "qwen4_exp_text")
"""Types whose states were not read: they have the rows of the type that is most like them."""


def test_types_whose_layers_carry_a_state_have_rows_of_it() -> None:
    stored = script("generate/kept").stored()
    kinds = {name: FAMILIES[name].part(RecurrentTraits) for name in RUNTIME_FAMILIES}
    found = {name: traits.kind.__name__ for name, traits in kinds.items() if traits is not None}
    without = {name for name, kind in found.items() if not all(kind in stored[name][word] for word in ("16", "32"))}
    assert sorted(without) == sorted(LIKE_OTHERS)
    assert {found[name] for name in without} <= {found[name] for name in STATES}  # of their kind


def test_states_of_a_type_or_kind_without_rows_keep_what_those_do_that_are_most_like_them() -> None:
    class Own(Mamba2):
        """Of a plug-in."""

    work = workload_of(make_plan(1, {}, model=tiny_config("mamba2"), whole_model=True).spec)
    sort = next(one for _, one in sorts(work.shape, range(1)))
    (part,) = sort.parts
    own = Own(**{field.name: getattr(part, field.name) for field in fields(part)})
    cut = StateCut(tp=1, cp=1, rows=2, pieces=1, length=16)
    known = state_bytes(sort, cut, 2)
    assert state_bytes(sort._replace(parts=(own,)), cut, 2) == known > 0
    unknown = sort._replace(shape=replace(sort.shape, model_type="llama"))  # whose layers carry none
    assert state_bytes(unknown, cut, 2) == pytest.approx(known, rel=0.2)


def test_a_type_that_is_read_anew_keeps_what_is_stored() -> None:
    kept = script("generate/kept")
    assert kept.read("llama", kept.GROUPS).wrong == []


@pytest.mark.parametrize("family", [name for name in (*FAMILIES, *VARIANTS) if "index" in str(tiny_config(name))])
def test_every_layer_that_takes_a_choice_keeps_what_hides_keys(family: str) -> None:
    shape = shape_from_config(tiny_config(family))
    if (indexer := shape.part(Indexer)) is None:
        return
    for layer in range(shape.num_hidden_layers):
        [(_, sort)] = sorts(shape, range(layer, layer + 1))
        assert (sum(group_bytes(sort, CHOICE, 1, False, 2).values()) > 0) == (layer in indexer.attending)


BF16: dict[str, Any] = {"precision": "bf16"}
FP32 = {"precision": "fp32"}
LONG = {**BF16, "sequence_length": 8192}
FULL = {"activation_checkpointing": "full"}
SUMS = {**BF16, "gradient_accumulation_dtype": "bf16"}
SP = {"sequence_parallel": True}


@pytest.mark.parametrize(
    ("family", "axes", "training", "stage", "config"),
    [
        ("llama", {"pp": 2}, LONG, 0, {}),  # what a stage received
        ("llama", {"pp": 2}, {**BF16, "activation_checkpointing": "attention+norms"}, 0, {}),
        ("olmo2", {"tp": 2, "pp": 2}, {**BF16, **FULL}, 0, {}),  # norms behind both blocks
        ("gemma2", {"tp": 2, "pp": 2}, BF16, 0, {}),
        ("glm4", {"tp": 2, "pp": 2, "sequence_parallel": True}, FP32, 0, {}),
        ("mamba2", {"pp": 2}, FP32, 0, {}),  # a scan, and no head behind it
        ("mixtral", {"pp": 2}, FP32, 0, {}),
        ("granitemoeshared", {"pp": 2}, LONG, 0, {}),  # shared experts behind the others, and before them
        ("hunyuan_v1_moe", {"pp": 2}, FP32, 0, {}),
        ("llama4_text", {"pp": 2}, LONG, 0, {}),  # layers of two kinds
        ("phi3", {"tp": 4, "cp": 2, "pp": 2, "sequence_parallel": True}, {**FP32, **FULL}, 1, {"vocab_size": 128256}),
        ("llama", {"cp": 2}, {**FP32, **FULL}, 2, {"vocab_size": 128256, "tie_word_embeddings": True}),
        ("qwen2", {"tp": 2}, {**LONG, "global_batch_size": 1}, 2, {"vocab_size": 40000}),  # a head that no bucket takes
        # Experts' gradients come before those of what runs ahead of them; sums of dealt experts are their own.
        ("dots1", {"tp": 4, "cp": 4, "dp": 4, "ep": 2, **SP}, {**FULL, **SUMS, "global_batch_size": 8}, 1, {}),
        ("laguna", {"cp": 4, "ep": 2}, {**BF16, **FULL, "global_batch_size": 1}, 2, {}),
        # Gradients of several ranks that no bucket takes.
        ("dots1", {"tp": 2, "cp": 2, "pp": 2, **SP}, {**BF16, **FULL}, 1, {"moe_intermediate_size": 8192}),
        ("minimax_m3_vl_text", {"cp": 4, "dp": 4, "ep": 4}, {**FP32, "global_batch_size": 16}, 2, {}),
        (
            *("gemma2", {"tp": 2, "cp": 4, "pp": 2, "dp": 4, **SP}),
            *({**FULL, **SUMS, "micro_batch_size": 2, "global_batch_size": 8}, 1, {"vocab_size": 128256}),
        ),
        # What was reduced by the time that the embedding goes backward.
        ("opt", {"cp": 2}, {**BF16, **FULL, "global_batch_size": 4}, 1, {"vocab_size": 128256}),
        ("biogpt", {"cp": 4, "dp": 2}, {**FP32, "micro_batch_size": 2, "global_batch_size": 8}, 1, {}),
        ("cohere", {}, BF16, 1, {"vocab_size": 4000}),  # a norm behind the last layer that takes the mean away
        # Stacks that run several times.
        ("hrm_text", {"cp": 2}, {**FP32, "sequence_length": 4096, "global_batch_size": 1}, 1, {}),
        # Layers that carry a state take most when they are computed again; those that attend are reduced before.
        (
            *("qwen3_5_text", {"cp": 4, "dp": 4}),
            *({**BF16, **FULL, "micro_batch_size": 2, "global_batch_size": 16}, 2, {}),
        ),
        # Experts whose first gradient starts a reduction are still to go through their activation.
        (
            *("qwen3_moe", {"dp": 2}),
            *({**LONG, **FULL, "global_batch_size": 2}, 1, {"moe_intermediate_size": 6144}),
        ),
        ("ctrl", {"pp": 2}, LONG, 0, {}),  # an activation that keeps its result alone
        # The projection out of an MLP that is narrower than what stands around it.
        ("gpt_bigcode", {"tp": 2, "pp": 2, **SP}, {**FP32, "micro_batch_size": 2, "global_batch_size": 4}, 0, {}),
        ("modernbert-decoder", {"tp": 4, "pp": 2}, {**BF16, **FULL}, 0, {}),
        ("phi", {"tp": 4, "pp": 2}, FP32, 0, {}),
        ("stablelm", {"tp": 4, "pp": 2}, FP32, 0, {}),
        ("olmo", {"tp": 4, "pp": 2}, {**BF16, **FULL}, 0, {"intermediate_size": 2048}),  # a norm on its way forward
        ("qwen3_next", {"tp": 2}, {**BF16, **FULL}, 0, {}),  # layers with a state, and others with experts
        # Rows for experts that give back what they take are sent to nobody.
        ("longcat_flash", {"pp": 2, "dp": 2, "ep": 2}, {**FP32, "global_batch_size": 4}, 0, {}),
    ],
)
def test_peaks_are_those_that_preflight_counts(
    family: str, axes: dict[str, Any], training: dict[str, Any], stage: int, config: dict[str, Any]
) -> None:
    peaks = script("preflight_peaks")
    model = {**peaks._of_type(family, random.Random(1)), "vocab_size": 32000, **config}
    ranks = math.prod(size for axis, size in axes.items() if axis != "ep" and size is not True)
    batch = {"sequence_length": 2048, "micro_batch_size": 1, "global_batch_size": 2, **training}
    tree = {
        "version": 1,
        "name": "peaks",
        "model": model,
        "zero": {"stage": stage},
        "cluster": {"gpus_per_node": ranks, "accelerator": "h200"},
        "parallelism": axes,
        "training": batch,
    }
    resolution = Resolution(tree)
    found = check(resolution)
    assert not [one.message for one in found if one.is_error]
    plan = compile_plan(resolution.spec(), tree, found)
    for rank in peaks._one_of_each_stage(plan):
        estimated, counted, _ = peaks.measured(plan, rank)
        assert estimated == pytest.approx(counted, rel=0.004)
