import contextlib
import json
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from layout_cases import compile_tree, ring_schedule, spec_tree
from referencing import Registry

from parcompile import schema
from parcompile.backends.artefacts import to_text
from parcompile.backends.deepspeed.write import ds_config
from parcompile.backends.writing import write
from parcompile.layout.shards import padded_numel
from parcompile.pipeline import compile_file
from parcompile.plan import Plan, PlanError, digest, load_plan, plan_from_tree, plan_tree, sections
from parcompile.show.page import remarks

SPECIFICATIONS = Path(__file__).parent.parent / "specs"
SPECS = {
    "one rank": spec_tree(1, 1),
    "tp and cp": spec_tree(1, 8, parallelism={"tp": 2, "cp": 2}),
    "replicated kv heads, contiguous": spec_tree(1, 8, parallelism={"tp": 8, "cp": 1, "cp_layout": "contiguous"}),
    "four stages": spec_tree(
        2, 8, parallelism={"pp": 4, "tp": 2}, training={"gradient_accumulation_dtype": "fp32", "global_batch_size": 8}
    ),
    "experts": spec_tree(
        2,
        8,
        model={"preset": "mixtral-8x7b"},
        parallelism={"tp": 2, "ep": 4},
        training={"gradient_accumulation_dtype": "bf16"},
    ),
    "gpt2": spec_tree(1, 4, model={"preset": "gpt2-xl"}, parallelism={"cp": 2}),
    "preset": spec_tree(4, 8, model={"preset": "llama-3-8b"}, parallelism={"tp": 4, "cp": 4}),
}
MILLION = spec_tree(
    65_536,
    16,
    model={"preset": "llama-3-70b"},
    parallelism={"tp": 8, "cp": 16, "pp": 16},
    training={"sequence_length": 131_072, "global_batch_size": 8192, "gradient_accumulation_dtype": "fp32"},
)


@pytest.fixture(params=SPECS.values(), ids=SPECS.keys())
def plan(request, tmp_path) -> Plan:
    return compile_tree(request.param, tmp_path)


def artefacts(plan: Plan) -> dict[str, object]:
    """What every plan is written as."""
    trees = {"plan.json": plan_tree(plan), "process_groups.json": sections.process_groups(plan)}
    return {**trees, "ds_config.json": ds_config(plan)}


def valid(name: str, tree: object) -> None:
    errors = list(Draft202012Validator(json.loads(schema.text(name))).iter_errors(tree))
    assert not errors, [f"{error.json_path}: {error.message}" for error in errors[:5]]


def test_every_file_is_valid_against_its_schema(plan) -> None:
    for name, tree in artefacts(plan).items():
        if name != "ds_config.json":
            valid(name.removesuffix(".json"), json.loads(to_text(tree)))


@pytest.mark.parametrize("name", schema.names())
def test_a_standard_validator_needs_one_file_of_a_schema(name) -> None:
    tree = json.loads(schema.text(name))
    pointers = [one for one in re.findall(r'"\$ref": "([^"]*)"', schema.text(name)) if not one.startswith("#/")]
    assert pointers == []
    Draft202012Validator(tree, registry=Registry()).is_valid({})


def test_the_plan_of_a_measured_machine_is_judged_without_another_schema(tmp_path) -> None:
    plan, _ = compile_file(SPECIFICATIONS / "positive" / "measured-machine.json")
    assert plan is not None
    tree = json.loads(to_text(plan_tree(plan)))
    validator = Draft202012Validator(json.loads(schema.text("plan")), registry=Registry())
    assert validator.is_valid(tree)
    tree["cluster"]["preset"]["node_link"]["bytes_per_s"] = 0
    assert [error.json_path for error in validator.iter_errors(tree)] == ["$.cluster.preset"]


def test_the_machine_of_a_plan_has_the_schema_of_its_file() -> None:
    alone, inside = schema.load("accelerator"), schema.load("plan")["$defs"]
    # What the compiler does not read does not get into the plan, nor a second unit of a figure.
    kept = alone["properties"].keys() - {"$schema", "measurements", "memory_gib", "bf16_tflops"}
    assert inside["accelerator"]["properties"].keys() == kept
    measured = set(alone["dependentRequired"])
    for key in kept:
        entry = {**inside["accelerator"]["properties"][key], "description": ""}
        if key in measured:  # null in the plan, left out in the file
            entry["type"] = entry["type"][0]
        assert entry == {**alone["properties"][key], "description": ""}, key
    assert {key: inside[key] for key in alone["$defs"]} == alone["$defs"]


@pytest.mark.parametrize("name", ["plan", "process_groups", "lock", "target_report", "megatron_args"])
def test_schemas_are_closed_and_described_at_every_level(name) -> None:
    root, only_of_some = (
        json.loads(schema.text(name)),
        {"backends", "offload_optimizer", "offload_param", "host_memory"},
    )
    only_of_some |= {
        "host_activations",
        "implementation",
        "activation_offloading",
        "linear_cross_entropy",
        "gather_inputs_again",
        "tiled_mlp",
        "rampup_batch_size",
        "optimizer",
        "momentum",
        "nesterov",
        "ns_steps",
        "ns_dtype",
        "adjust_lr",
        "no_weight_decay",
        "start_weight_decay",
        "weight_decay_style",
        "total_steps",
        "weight_decay",
    }
    Draft202012Validator.check_schema(root)
    assert root["$id"] == f"{schema.BASE}{name}.schema.json"

    def walk(node: object, path: str) -> None:
        if isinstance(node, dict):
            if "properties" in node:
                assert node["additionalProperties"] is False, path
                # What only some plans have keeps the identity of all others.
                assert set(node["properties"]) - set(node["required"]) <= only_of_some, path
                for key, entry in node["properties"].items():
                    assert "$ref" in entry or {"title", "description"} <= entry.keys(), f"{path}.{key}"
            for key, value in node.items():
                walk(value, f"{path}.{key}")
        elif isinstance(node, list):
            for value in node:
                walk(value, path)

    walk(root, name)


def test_a_plan_survives_writing_and_reading(plan, tmp_path) -> None:
    write({"plan.json": to_text(plan_tree(plan))}, tmp_path / "out")
    for path in (tmp_path / "out", tmp_path / "out" / "plan.json"):
        assert load_plan(path) == plan
        assert load_plan(path).plan_hash == plan.plan_hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree["parallelism"].update(tp=4), "changed after it was compiled"),
        (lambda tree: tree["sequence"]["ranks"][0]["tokens"].reverse(), "changed after it was compiled"),
        (lambda tree: tree.pop("training"), "incomplete or damaged"),
        (lambda tree: tree.update(plan_version=2), "plan_version is 2"),
        (lambda tree: tree.update(compiler_version="0.0.1"), "compiled by parcompile 0.0.1"),
        (lambda tree: tree.pop("compiler_version"), r"does not say which parcompile compiled it \(compiler_version\)"),
    ],
)
def test_a_plan_that_was_changed_by_hand_is_refused(tmp_path, change, message) -> None:
    tree = plan_tree(compile_tree(SPECS["tp and cp"], tmp_path))
    change(tree)
    (tmp_path / "plan.json").write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(PlanError, match=message):
        load_plan(tmp_path)


@pytest.mark.parametrize("value", [None, 0, -1, "x", [], {}, 1.5, True])
def test_a_damaged_plan_is_refused_or_read_as_it_stands_also_with_a_hash_that_fits(tmp_path, value) -> None:
    written = plan_tree(compile_tree(SPECS["experts"], tmp_path))
    for section in ("cluster", "parallelism", "model", "training", "zero", "runtime", "provenance", "tensors"):
        for key in [*written[section]] if isinstance(written[section], dict) else [0]:
            tree = json.loads(json.dumps(written))
            if tree[section][key] == value:
                continue
            tree[section][key] = value
            tree["plan_hash"] = digest({name: one for name, one in tree.items() if name != "plan_hash"})
            with contextlib.suppress(PlanError):
                assert plan_tree(plan_from_tree(tree)) == tree
    tree = {**written, "name": value}
    tree["plan_hash"] = digest({name: one for name, one in tree.items() if name != "plan_hash"})
    with contextlib.nullcontext() if isinstance(value, str) else pytest.raises(PlanError, match="name is"):
        plan_from_tree(tree)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("provenance", "name", {"value": float("inf"), "origin": "spec", "detail": ""}),
        ("model", "hf_config", {"more": float("inf")}),
        ("parallelism", "hierarchical_cp_sizes", [None, None]),
        ("parallelism", "hierarchical_cp_sizes", [1, 2]),
        ("parallelism", "ep", -1),
        ("provenance", "model", {"value": "llama", "origin": "spec", "detail": ""}),
        ("model", "hf_config", {"num_hidden_layers": 2**31}),
    ],
)
def test_what_a_reader_of_a_plan_would_stumble_over_is_refused(tmp_path, section, key, value) -> None:
    tree = plan_tree(compile_tree(SPECS["tp and cp"], tmp_path))
    tree[section][key] = {**tree[section].get(key, {}), **value} if isinstance(value, dict) else value
    tree["plan_hash"] = digest({name: one for name, one in tree.items() if name != "plan_hash"})
    with pytest.raises(PlanError, match="damaged"):
        plan_from_tree(tree)


@pytest.mark.parametrize("value", [True, 3, ["llama-3-8b"]])
def test_a_page_of_a_plan_whose_provenance_is_no_spec_is_refused(tmp_path, value) -> None:
    tree = plan_tree(compile_tree(SPECS["tp and cp"] | {"model": {"preset": "llama-3-8b"}}, tmp_path))
    tree["provenance"]["model.preset"]["value"] = value
    tree["plan_hash"] = digest({name: one for name, one in tree.items() if name != "plan_hash"})
    with pytest.raises(PlanError, match=r"the plan is damaged \(provenance: model.preset: expected text"):
        remarks(plan_from_tree(tree))


def test_a_section_is_made_without_the_whole_plan(plan, monkeypatch) -> None:
    written = plan_tree(plan)
    monkeypatch.setattr(sections, "choices", None)  # what only the section "sequence" asks
    for name in ("groups", "topology", "tensors"):
        assert json.loads(json.dumps(getattr(sections, name)(plan))) == written[name]


def test_what_is_not_a_plan_is_refused_by_name(tmp_path) -> None:
    file = tmp_path / "plan.json"
    for text, message in (("[]", "is not a plan"), ("{", "is not valid JSON"), ("{}", "is not a plan")):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(PlanError, match=message):
            load_plan(file)
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        load_plan(tmp_path / "missing" / "plan.json")
    file.unlink()
    with pytest.raises(PlanError, match=r"without a plan\.json: name a file, or the folder of a compiled plan"):
        load_plan(tmp_path)


def test_the_ring_of_the_plan_is_the_ring_that_the_runtime_executes(plan) -> None:
    sequence, parallelism = plan_tree(plan)["sequence"], plan.spec.parallelism
    for rank, row in enumerate(sequence["ranks"]):
        for step, (source, kind) in zip(
            ring_schedule(parallelism.cp_layout, parallelism.cp, rank), row["ring"], strict=True
        ):
            assert source == step.source
            written = [
                (block["q_start"], block["q_stop"], block["kv_start"], block["kv_stop"], block["mask"])
                for block in sequence["ring"]["blocks"][kind]
            ]
            assert written == [
                (block.q_start, block.q_stop, block.kv_start, block.kv_stop, block.mask.value) for block in step.blocks
            ]


@pytest.mark.parametrize("implementation", [None, "double_ring", "all_gather", "ulysses", "usp"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_the_plans_sequence_covers_the_causal_triangle_once(layout, implementation, tmp_path) -> None:
    """Read from plan.json alone: who holds which tokens, whose keys are met, and which blocks that makes."""
    if (layout, implementation) == ("striped", "usp"):
        return  # rule C006
    cp, length = 4, 48
    chosen = {"cp_implementation": implementation} if implementation else {}
    training = {"sequence_length": length}
    tree = spec_tree(1, cp, parallelism={"cp": cp, "cp_layout": layout, **chosen}, training=training)
    found = plan_tree(compile_tree(tree, tmp_path))["sequence"]
    share, length_of = found["implementation"]["head_ranks"], found["ring"]["places"]
    places = [
        sorted(
            token
            for row in found["ranks"][place * share :][:share]
            for piece in row["tokens"]
            for token in range(*piece)
        )
        for place in range(length_of)
    ]
    unit = len(places[0]) // (2 if layout == "zigzag" else 1)
    seen = [[0] * length for _ in range(length)]
    for place, tokens in enumerate(places):
        for source, kind in found["ranks"][place * share]["ring"]:
            for block in found["ring"]["blocks"][kind]:
                rows = tokens[block["q_start"] * unit : block["q_stop"] * unit]
                columns = places[source][block["kv_start"] * unit : block["kv_stop"] * unit]
                for i, query in enumerate(rows):
                    for j, key in enumerate(columns):
                        seen[query][key] += {"full": True, "causal": j <= i, "strict": j < i}[block["mask"]]
    assert seen == [[int(key <= query) for key in range(length)] for query in range(length)]
    assert sum(row["work"] for row in found["ranks"]) == 0.5


def test_stages_hold_all_layers_and_their_shards_add_up(plan) -> None:
    tree = plan_tree(plan)
    layers = [layer for stage in tree["stages"] for piece in stage["layers"] for layer in range(*piece)]
    assert layers == list(range(plan.spec.model.shape.num_hidden_layers))
    shards, ep = plan.spec.parallelism.zero_shards, plan.spec.parallelism.ep
    for stage in tree["stages"]:
        padded = stage["optimizer"]["padded"]
        # Experts that are dealt over ep are padded by themselves, and cut over the ranks that hold the same ones.
        dealt = sum(
            layout.local_numel * len({*parameter.layers} & {layer for one in stage["layers"] for layer in range(*one)})
            for parameter, layout in plan.tensors().values()
            if layout.ep > 1
        )
        others, experts = padded_numel(stage["numel"] - dealt, shards), padded_numel(dealt, shards // ep)
        assert padded["numel"] == others + experts
        assert padded["shard_numel"] == others // shards + experts // (shards // ep)
        assert padded["padding"] == padded["numel"] - stage["numel"]
    largest = max(tree["stages"], key=lambda stage: stage["numel"])
    assert tree["optimizer_shards"]["shard_numel"] == largest["optimizer"]["padded"]["shard_numel"]


@pytest.mark.parametrize(
    ("model", "split", "layers"),
    [
        ("llama-3.1-405b", {"account_for_embedding_in_pipeline_split": True}, None),
        (
            "llama-3.1-405b",
            {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
            [[[0, 7]], *([[7 + 8 * rank, 15 + 8 * rank]] for rank in range(14)), [[119, 126]]],
        ),
        ("llama-3-8b", {"num_layers_in_last_pipeline_stage": 2}, [[[2 * rank, 2 * rank + 2]] for rank in range(16)]),
        (
            "llama-3-8b",
            {"num_virtual_stages_per_pipeline_rank": 2},
            [[[rank, rank + 1], [16 + rank, 17 + rank]] for rank in range(16)],
        ),
        (
            "deepseek-v3",
            {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 2},
            [[[0, 3]], *([[3 + 4 * rank, 7 + 4 * rank]] for rank in range(14)), [[59, 61]]],
        ),
    ],
)
def test_uneven_and_virtual_stages_hold_every_parameter_once(tmp_path, model, split, layers) -> None:
    tree = spec_tree(
        16,
        8,
        model={"preset": model},
        parallelism={"tp": 8, "pp": 16, "sequence_parallel": True, **split},
        training={"gradient_accumulation_dtype": "fp32", "global_batch_size": 16},
        cluster={"accelerator": "cpu"},
    )
    if layers is None:
        with pytest.raises(AssertionError, match="127 / 16 is not whole"):
            compile_tree(tree, tmp_path)
        return
    plan = compile_tree(tree, tmp_path)
    written = plan_tree(plan)
    assert [stage["layers"] for stage in written["stages"]] == layers
    local = sum(
        layout.local_numel * (1 if parameter.layers is None else len(parameter.layers))
        for parameter, layout in plan.tensors().values()
    )
    assert sum(stage["numel"] for stage in written["stages"]) == local
    assert written["static_memory"]["numel"] == max(stage["numel"] for stage in written["stages"])
    assert plan_from_tree(written) == plan


def test_sizes_and_strides_in_the_files_give_the_same_groups_as_the_lists(plan) -> None:
    tree = artefacts(plan)["process_groups.json"]
    for name, found in tree["strided"].items():

        def offsets(steps: list[list[int]]) -> list[int]:
            sums = [0]
            for size, stride in steps:
                sums = [inner + index * stride for index in range(size) for inner in sums]
            return sums

        lists = [[first + offset for offset in offsets(found["members"])] for first in offsets(found["starts"])]
        assert lists == tree["groups"][name]
        assert (len(lists), len(lists[0])) == (found["count"], found["size"])


@pytest.fixture(scope="module")
def million(tmp_path_factory) -> Plan:
    return compile_tree(MILLION, tmp_path_factory.mktemp("million"))


class TestAMillionRanks:
    def test_files_are_small_and_valid(self, million) -> None:
        assert million.world_size == 1_048_576
        for name, tree in artefacts(million).items():
            text = to_text(tree)
            assert len(text.encode()) < 200_000, name
            if name != "ds_config.json":
                valid(name.removesuffix(".json"), json.loads(text))

    @pytest.mark.parametrize(
        "sizes", [{"cp": 1024, "tp": 8, "pp": 16}, {"tp": 8, "pp": 16}, {"tp": 8, "cp": 8192, "pp": 16}]
    )
    def test_lopsided_worlds_stay_under_a_megabyte(self, sizes, tmp_path) -> None:
        tree = {**MILLION, "parallelism": sizes, "training": MILLION["training"] | {"global_batch_size": 1 << 17}}
        for name, artefact in artefacts(compile_tree(tree, tmp_path)).items():
            assert len(to_text(artefact).encode()) < 1_000_000, name

    @pytest.mark.parametrize("optimizer", ["adamw", "muon"])
    def test_memory_does_not_grow_with_the_world(self, optimizer, tmp_path) -> None:
        """Counted, not timed: a list of a million ranks alone would be 8 MB."""

        def peak_bytes(nodes: int) -> int:
            parallelism = {"tp": 8, "cp": 16, "pp": 4}
            training = {"gradient_accumulation_dtype": "fp32", "global_batch_size": 8192}
            training["optimizer"] = {"type": optimizer}
            tree = spec_tree(nodes, 16, parallelism=parallelism, training=training)
            tracemalloc.start()
            for artefact in artefacts(compile_tree(tree, tmp_path)).values():
                to_text(artefact)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return peak

        peak_bytes(64)  # what is imported and cached once
        assert peak_bytes(65_536) < 1.1 * peak_bytes(64)

    def test_the_groups_of_its_last_rank(self, million) -> None:
        groups = million.groups
        assert groups.of_rank("tp", 1_048_575) == tuple(range(1_048_568, 1_048_576))
        assert groups.of_rank("pp", 0) == tuple(range(0, 1_048_576, 65_536))


def test_artefacts_are_the_same_bytes_in_every_process(tmp_path) -> None:
    """Whatever the seed of string hashes: nothing depends on the order of a set."""
    (tmp_path / "spec.json").write_text(json.dumps(SPECS["experts"]), encoding="utf-8")
    code = (
        "import hashlib, sys; from parcompile.pipeline import compile_file\n"
        "from parcompile.backends.registry import render\n"
        "plan, _ = compile_file(sys.argv[1])\n"
        "for name, text in render(plan, ('all',)).items(): print(name, hashlib.sha256(text.encode()).hexdigest())\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "spec.json")],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1
    assert "plan.json" in outputs.pop()
