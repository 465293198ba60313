"""Writes tests/compiler/gpt_neox_verdicts.json: what gpt-neox says of configurations with and without a mistake.

GPT_NEOX=CLONE python .ci/generate/gpt_neox_verdicts.py [--check]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpt_neox_fields import VERSIONS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from upstream import sources

OUTPUT = Path(__file__).resolve().parents[2] / "tests" / "compiler" / "gpt_neox_verdicts.json"
PROGRAM = Path(__file__).resolve().parents[1] / "upstream" / "gpt_neox.py"
BASE = "pipe_parallel_size: 0\nmodel_parallel_size: 1\n"
CASES = {
    "nothing": "",
    "hyphens": "num-layers: 4\n",
    "a misspelt key": "num_layer: 4\n",
    "a key that nothing is near to": "zzz: 4\n",
    "text for a whole number": "num_layers: four\n",
    "true for a whole number": "num_layers: true\n",
    "a fraction for a whole number": "num_layers: 4.0\n",
    "a whole number for a fraction": "hidden_dropout: 0\n",
    "text for a truth value": 'no_weight_tying: "yes"\n',
    "null": "rotary_pct: null\n",
    "a choice": "norm: rmsnorm\n",
    "a choice in capitals": "norm: RMSNorm\n",
    "no choice": "norm: rmsnrom\n",
    "a number with an exponent": "hidden_dropout: 1.0e-1\n",
    "an exponent without a point": "hidden_dropout: 1e-1\n",
    "an exponent without a sign": "hidden_dropout: 1.0e0\n",
    "grouped digits": "train_iters: 2_000\nlr_decay_iters: 2_000\n",
    "heads that tp does not divide": "num_attention_heads: 6\nmodel_parallel_size: 4\nhidden_size: 48\n",
    "key/value heads that do not divide heads": "num_attention_heads: 8\nnum_kv_heads: 3\n",
    "key/value heads that tp does not divide": "num_attention_heads: 8\nnum_kv_heads: 2\nmodel_parallel_size: 4\n",
    "heads that do not divide hidden_size": "num_attention_heads: 12\nhidden_size: 64\n",
    "a sequence beyond the positions": "seq_length: 128\nmax_position_embeddings: 64\n",
    "a lowest rate above the rate": "min_lr: 0.1\noptimizer: {type: Adam, params: {lr: 0.001}}\n",
    "a list of stages for autotuning": "autotuning: {enabled: true}\nzero_optimization: {stage: [0, 1]}\n",
    "a list of stages": "zero_optimization: {stage: [0, 1]}\n",
    "an unknown key of ZeRO": "zero_optimization: {stage: 1, overlap_com: true}\n",
    "text for a size of ZeRO": "zero_optimization: {stage: 1, reduce_bucket_size: big}\n",
    "a key of fp16 that nobody reads": "fp16: {enabled: true, fp16: true}\n",
    "an old key": "zero_optimization: {stage: 1, cpu_offload: false}\n",
    "a wrong extra": "deepspeed_extra_args: {comms_logger: {enabled: true, verbos: true}}\n",
    "an extra": "deepspeed_extra_args: {comms_logger: {enabled: true, verbose: true}}\n",
    "kinds of attention for fewer layers": 'num_layers: 4\nattention_config: [[["global"], 2]]\n',
    "experts with ZeRO 2": "moe_num_experts: 4\nzero_optimization: {stage: 2}\n",
    "experts with ZeRO 1": "moe_num_experts: 4\nzero_optimization: {stage: 1}\n",
    "a parameter of gpt-neox's own optimizer": "optimizer: {type: sm3, params: {lr: 0.001, momentum: 0.9}}\n",
}


def main() -> None:
    """Writes the file, or says whether it is up to date."""
    repository = sources.repository("GPT_NEOX")
    if repository is None:
        raise SystemExit("GPT_NEOX names no git repository")
    version, revision = list(VERSIONS.items())[-1]
    texts = {name: merged(text) for name, text in CASES.items()}
    with tempfile.TemporaryDirectory() as folder:
        sources.extract(repository, revision, Path(folder))
        asked = "".join(f"{json.dumps(text)}\n" for text in texts.values())
        run = subprocess.run([sys.executable, PROGRAM, folder], input=asked, capture_output=True, text=True, check=True)
    verdicts: list[dict[str, Any]] = [json.loads(line) for line in run.stdout.splitlines()]
    cases = [{"name": name, "text": text, **one} for (name, text), one in zip(texts.items(), verdicts, strict=True)]
    text = json.dumps({"version": version, "cases": cases}, indent=1) + "\n"
    if "--check" in sys.argv[1:]:
        raise SystemExit(0 if OUTPUT.read_text(encoding="utf-8") == text else f"{OUTPUT.name} is out of date")
    OUTPUT.write_text(text, encoding="utf-8")


def merged(text: str) -> str:
    """A file that is told for gpt-neox's, with the lines of a case."""
    names = {line.split(":")[0] for line in text.splitlines()}
    return "".join(line + "\n" for line in BASE.splitlines() if line.split(":")[0] not in names) + text


if __name__ == "__main__":
    main()
