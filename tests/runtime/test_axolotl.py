"""Contract: YAMLs of axolotl train by a plan with its plug-in; every line of their log is that of one process.

A few like the examples of `.ci/axolotl_matrix.py`. What a plan cannot do is refused before a model is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from closeness import judge

pytest.importorskip("axolotl.train", reason="needs axolotl: its trainer trains by a plan")
from axolotl_runs import compare, plan_for, shrunken, write

pytestmark = pytest.mark.ranks

PACKED: dict[str, Any] = {
    "sample_packing": True, "gradient_accumulation_steps": 8, "micro_batch_size": 1, "lr_scheduler": "cosine",
    "gradient_checkpointing": True, "warmup_ratio": 0.1, "evals_per_epoch": 2, "val_set_size": 0.05,
    "datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca"}],
}  # fmt: skip
PADDED: dict[str, Any] = {"gradient_accumulation_steps": 4, "micro_batch_size": 2, "lr_scheduler": "linear"}
ADAPTED: dict[str, Any] = {**PACKED, "adapter": "lora", "lora_alpha": 32, "micro_batch_size": 2}
RUNS = {"packed, tp 2": (PACKED, {"tp": 2}), "padded, cp 2": (PADDED, {"cp": 2}), "LoRA, tp 2": (ADAPTED, {"tp": 2})}


@pytest.mark.parametrize(("given", "layout"), RUNS.values(), ids=RUNS)
def test_an_example_trains_by_a_plan_as_in_one_process(given: Any, layout: Any, tmp_path: Path) -> None:
    judge(compare(given, "llama", 2, layout, tmp_path))


WRONG: dict[str, dict[str, Any]] = {
    "has one key, plan": {"parcompile": {"plan": "plan", "paln": 1}},
    "the section parcompile of the YAML is None": {"parcompile": None},
    "micro_batch_size is 4, the plan has 2": {"micro_batch_size": 4},
    "learning_rate is '2e-5', the plan has 0.001": {"learning_rate": "2e-5"},
    "optimizer is 'adamw_8bit', the plan has 'adamw'": {"optimizer": "adamw_8bit"},
    "tensor_parallel_size is 4, the plan has 2": {"tensor_parallel_size": 4},
    "context_parallel_size is 2, the plan has 1": {"context_parallel_size": 2},
    "gradient_checkpointing is True, the plan has 'none'": {"gradient_checkpointing": True},
    "deepspeed is 'zero1.json': the plan has ZeRO and dp": {"deepspeed": "zero1.json"},
    "rl is 'dpo': the plug-in has axolotl's SFT alone": {"rl": "dpo"},
    "liger_rms_norm is True: it writes over layers": {"liger_rms_norm": True},
    "adapter is 'qlora'": {"adapter": "qlora"},
    "multipack_real_batches is False": {"multipack_real_batches": False},
}


@pytest.mark.parametrize("words", WRONG)
def test_what_the_yaml_says_otherwise_than_the_plan_is_named(words: str, tmp_path: Path) -> None:
    import yaml
    from axolotl.integrations.base import load_plugin
    from axolotl.utils.dict import DictDefault

    from parcompile.runtime import RunError

    tree = shrunken(PADDED, tmp_path)
    _, file = write(tmp_path, plan_for(tree, "llama", 2, {"tp": 2}), tree)
    given = DictDefault({**yaml.safe_load(file.read_text()), "axolotl_config_path": str(file), **WRONG[words]})
    with pytest.raises(RunError) as error:
        load_plugin(given["plugins"][0]).register(given)
    assert words in str(error.value)


def test_what_the_plan_decides_may_be_left_out(tmp_path: Path) -> None:
    from axolotl.integrations.base import load_plugin
    from axolotl.utils.dict import DictDefault

    tree = shrunken(PADDED, tmp_path)
    write(tmp_path, plan_for(tree, "llama", 2, {"tp": 2}), tree)
    given = DictDefault({"parcompile": {"plan": "plan"}, "axolotl_config_path": str(tmp_path / "ranks.yaml")})
    load_plugin("parcompile.runtime.axolotl.Plugin").register(given)
    assert (given.micro_batch_size, given.learning_rate, given.optimizer) == (2, 1e-3, "adamw_torch")
    assert json.dumps(given.to_dict())
    assert "parcompile" not in given
