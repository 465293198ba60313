"""Trains axolotl's own examples, shrunken, by its plug-in on live ranks and in one process.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python .ci/axolotl_matrix.py EXAMPLES [--first 0] [--count 20]

EXAMPLES is the folder `examples` of axolotl's source distribution. The exit code is 1 when a number of the log or a
weight is further from one process than 1e-5 (relative).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime"))

TP, CP, BOTH = {"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}
EXAMPLES = (
    ("llama-3/fft-8b.yaml", "llama", TP),
    ("llama-3/fft-8b-liger-fsdp.yaml", "llama", CP),
    ("llama-3/lora-1b.yml", "llama", TP),
    ("llama-3/lora-8b.yml", "llama", CP),
    ("llama-3/lora-1b-sample-packing-sequentially.yml", "llama", TP),
    ("llama-3/lora-1b-kernels.yml", "llama", BOTH),
    ("llama-3/3b-qat-fsdp2.yaml", "llama", {"tp": 2, "sequence_parallel": True}),
    ("llama-3/qlora-1b.yml", "llama", {"cp": 2, "cp_implementation": "ulysses", "cp_layout": "contiguous"}),
    ("llama-2/fft_optimized.yml", "llama", {"cp": 2, "cp_implementation": "all_gather"}),
    ("llama-2/lora.yml", "llama", TP),
    ("mistral/config.yml", "mistral", CP),
    ("mistral/lora.yml", "mistral", TP),
    ("mistral/mixtral/mixtral.yml", "mixtral", TP),
    ("qwen2/qlora-fsdp.yaml", "qwen2", CP),
    ("qwen3/8b-qat-fsdp2.yml", "qwen3", TP),
    ("qwen3/8b-lora-fused-attn.yaml", "qwen3", CP),
    ("gemma2/qlora.yml", "gemma2", TP),
    ("phi/phi3-ft.yml", "phi3", CP),
    ("olmo3/olmo3-7b-qlora.yaml", "olmo3", TP),
    ("cohere/command-r-7b-qlora.yml", "cohere2", CP),
)
"""Each with a family and a layout."""


def main() -> int:
    """One row for each example."""
    from axolotl_runs import compare

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=len(EXAMPLES))
    options = parser.parse_args()
    print("| example | model and layout | log | norm | weights |\n|---|---|---|---|---|")
    failed, chosen = 0, EXAMPLES[options.first : options.first + options.count]
    for name, family, layout in chosen:
        sizes = ", ".join(f"{axis} {size}" for axis, size in layout.items())
        world = layout.get("tp", 1) * layout.get("cp", 1)
        try:
            given = yaml.safe_load((options.examples / name).read_text())
            with tempfile.TemporaryDirectory() as folder:
                found = compare(given, family, world, layout, Path(folder))
        except Exception as error:  # a rank's, whose message says what failed
            print(f"| {name} | {family}, {sizes} | {str(error).strip().splitlines()[-1][:400]} |", flush=True)
            failed += 1
            continue
        worst = max(found, key=lambda one: one.ratio)
        failed += worst.ratio > 1
        log = max((one for one in found if one.what.startswith("log")), key=lambda one: one.difference)
        norm = max(one.difference for one in found if one.what.endswith("grad_norm"))
        weights = max(one.difference for one in found if one.what.startswith("parameters"))
        mark = f" {worst.text}" if worst.ratio > 1 else ""
        of = log.what.split("] ")[-1]
        print(
            f"| {name} | {family}, {sizes} | {log.difference:.1e} ({of}) | {norm:.1e} | {weights:.1e} |{mark}",
            flush=True,
        )
    print(f"\n{len(chosen) - failed} of {len(chosen)} within their limits")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
