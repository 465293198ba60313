"""The derived tables of parameters beside the models of transformers, and beside the rows of the families."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drawn_configurations import draw
from families import FAMILIES, tiny_config
from plan_styles import COLUMNS, ROWS, WHOLE, cut_dim

from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.model.tables import covered, left_out, parameters, table_of
from parcompile.model.tables.completing import OLDER_KINDS

GENERATOR = Path(__file__).parents[2] / ".ci" / "generate" / "model_tables"
SAMPLE = tuple(covered()[::6])
"""Of these, a configuration each: `python .ci/generate/model_tables --check 100` draws for all of them."""


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules of the generator, under their own names as long as a test runs."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(GENERATOR))
    import comparing
    import study
    import writing

    yield SimpleNamespace(comparing=comparing, study=study, writing=writing)
    for name in set(sys.modules) - before:
        if str(GENERATOR) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_tables_are_those_of_models_with_drawn_configurations(generator: Any) -> None:
    stored = generator.writing.read(_file())
    for name in SAMPLE:
        built, wrong = generator.comparing.compared(name, stored["types"][name], 1, f"suite {name}")
        assert (built, wrong) == (1, []), name


def test_one_command_derives_the_table_of_a_type_again(generator: Any, tmp_path: Path) -> None:
    writing = generator.writing
    found = generator.study.study("gptj").stored
    writing.write(tmp_path / "one.json", {"transformers": "5", "types": {"gptj": found}, "left_out": {}})
    stored = writing.read(_file())["types"]["gptj"]
    assert writing.read(tmp_path / "one.json")["types"]["gptj"]["rows"] == stored["rows"]


def _file() -> Path:
    import transformers

    room = Path(__file__).parents[2] / "compiler" / "model" / "tables"
    return room / f"transformers-{transformers.__version__}.json"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rows_of_a_family_are_the_derived_ones(family: str) -> None:
    """Over drawn configurations: every key that the tests of training vary."""
    table = table_of(family)
    if table is None:
        pytest.skip(left_out().get(family, "derived tables are older than the family"))
    compared = 0
    for number in range(8):
        config = tiny_config(family, **draw(number, (family,)).changes) if number else tiny_config(family)
        try:
            by_hand = parameter_table(shape_from_config(config))
        except ModelConfigError:
            continue
        derived = [(one.name, one.shape) for one in parameters(table, config)]
        assert [(name, one.shape) for name, one in by_hand.expanded()] == derived, config
        compared += 1
    assert compared


def test_older_words_for_kinds_of_layers_are_those_of_transformers() -> None:
    from transformers.configuration_utils import _LEGACY_LAYER_TYPE_REMAP

    assert OLDER_KINDS == _LEGACY_LAYER_TYPE_REMAP


def test_an_interrupted_run_goes_on_with_the_same_generator_only(
    generator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import running
    from collecting import LeftOutError

    studied: list[str] = []

    def study(name: str, seconds: int) -> Any:
        studied.append(name)
        if name == "gpt2" and studied.count("gpt2") == 1:
            raise KeyboardInterrupt
        raise LeftOutError(f"{name} in {seconds} s")

    monkeypatch.setattr(running, "study", study)
    part = tmp_path / "tables.json.part"
    with pytest.raises(KeyboardInterrupt):
        running.run(["llama", "gpt2"], 5, 1, part)
    assert part.exists()
    assert running.run(["llama", "gpt2"], 5, 1, part) == {"llama": "llama in 5 s", "gpt2": "gpt2 in 5 s"}
    assert studied == ["llama", "gpt2", "gpt2"]
    assert not part.exists()
    part.write_text('of another generator\n["llama", "of another time"]\n', encoding="utf-8")
    assert running.run(["llama"], 5, 1, part) == {"llama": "llama in 5 s"}


def test_every_style_of_transformers_plans_is_known() -> None:
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    ours = COLUMNS | ROWS | WHOLE | {"embedding_rowwise", "embedding_colwise", "grouped_gemm"}
    assert set(ALL_PARALLEL_STYLES.keys()) == ours


def test_every_cut_of_the_tables_is_one_of_these_styles() -> None:
    for name in covered():
        table = table_of(name)
        assert table is not None
        for row in table.rows:
            if row.tp is not None:
                dim = cut_dim(row.tp, row.name, len(row.shape))
                assert dim is None or dim < len(row.shape)


@pytest.mark.parametrize("family", ["gpt_oss", "glm4_moe"])
def test_a_dim_is_cut_where_transformers_cuts_it(family: str) -> None:
    """By its own code, over a mesh of two ranks that need not live."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    config, table = tiny_config(family), table_of(family)
    assert table is not None
    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**values))
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        apply_tensor_parallelism(model, mesh, _expanded(model))
        found = {
            name: next((one.dim % parameter.dim() for one in parameter.placements if hasattr(one, "dim")), None)
            for name, parameter in model.named_parameters()
            if isinstance(parameter, DTensor)
        }
    finally:
        torch.distributed.destroy_process_group()
    assert found
    derived = {one.name: one for one in parameters(table, config)}
    for name, dim in found.items():
        style = derived[name].row.tp
        assert style is not None, name
        assert cut_dim(style, name, len(derived[name].shape)) == dim, name


def _expanded(model: Any) -> dict[str, str]:
    """The model's plan with a name for each parameter and module that an entry is for."""
    import re

    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    found = {}
    for pattern, style in model.tp_plan.items():
        whole = re.compile(pattern.replace(".", r"\.").replace("*", r"\d+") + r"(\.weight|\.bias)?$")
        found |= {name: style for name in names if whole.match(name)}
    return found
