"""What DeepSpeed's own tools need to know of a checkpoint: how tensor-parallel ranks cut each parameter.

`ds_to_universal` puts slices together by `universal_checkpoint_info` in the files of weights (0.19.8,
checkpoint/affine_ir_spec.md): of each parameter, which blocks of it a rank holds. Without it, every slice is taken for
a block of rows. `zero_to_fp32.py`, which DeepSpeed writes beside a checkpoint, knows no slices, no padding, no stages,
and no files but those of ZeRO's optimizers; ours runs it where there are none of these, and says elsewhere what to run.
"""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path
from typing import Any

from parcompile.atomic import write_file
from parcompile.layout.shards import TensorLayout
from parcompile.plan import Plan

SCRIPT = "zero_to_fp32.py"

_SCRIPT = '''"""DeepSpeed's own zero_to_fp32.py, where each file of weights holds the whole model."""
import argparse
import json
import pathlib
import runpy
import sys

parser = argparse.ArgumentParser(add_help=False)
parser.add_argument("folder", nargs="?", type=pathlib.Path, default=pathlib.Path())
parser.add_argument("output", nargs="?")
parser.add_argument("-t", "--tag")
parser.add_argument("--max_shard_size")
given = parser.parse_known_args()[0]
latest = given.folder / "latest"
tag = given.tag or (latest.read_text().strip() if latest.is_file() else ".")
note = given.folder.resolve() / tag / "parcompile.json"
if note.is_file():
    plan = json.loads(note.read_text())["plan"]
    of_ranks = [one["name"] for one in plan["tensors"] if one["shape"] != one["local_shape"]]
    if of_ranks or plan["parallelism"]["pp"] > 1 or plan["zero"]["stage"] in (0, 3):
        one = note.parent
        sys.exit(f"DeepSpeed cannot read the weights of {one.name}: run parcompile checkpoint export {one} --hf OUTPUT")
runpy.run_module("deepspeed.utils.zero_to_fp32", run_name="__main__", alter_sys=True)
'''


def universal_checkpoint_info(plan: Plan, *, adapters: bool) -> dict[str, Any]:
    """As an entry of a file of weights; nothing where DeepSpeed's converter has no words for the layout.

    That is so with pipeline stages, which the converter does not join, with experts that are dealt over ep, which are
    not those of DeepSpeed's own layers, and with LoRA adapters, which the plan does not describe. A vocabulary is cut
    to its size, where it is a matrix.
    """
    from deepspeed.checkpoint import constants
    from deepspeed.checkpoint.affine import AFFINE_MAP_FORMAT_VERSION

    parallelism = plan.spec.parallelism
    if adapters or parallelism.pp > 1 or parallelism.ep > 1:
        return {}
    rows, maps, padded = plan.tensors(), {}, []
    for name, parameter in plan.parameters.expanded():
        layout, pattern = rows[parameter][1], f"^{re.escape(name)}$"
        maps[pattern] = _affine_map(layout, parallelism.tp)
        if layout.full_shape != tuple(parameter.shape) and len(layout.full_shape) == 2:
            padded.append(pattern)
    return {
        constants.UNIVERSAL_CHECKPOINT_INFO: {
            constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
            constants.AFFINE_MAP: {
                constants.AFFINE_MAP_VERSION: AFFINE_MAP_FORMAT_VERSION,
                constants.AFFINE_MAP_PARAMS: maps,
            },
            constants.VOCABULARY_PARAMETER_PATTERNS: padded,
            constants.ORIGINAL_VOCAB_SIZE: plan.spec.model.shape.vocab_size,
        }
    }


def leave_script(folder: Path) -> None:
    """Writes the script that stands in for DeepSpeed's.

    Raises:
        OSError: it cannot be written.
    """
    file = folder / SCRIPT
    if not file.is_file() or file.read_bytes() != _SCRIPT.encode():
        write_file(file, _SCRIPT)


def _affine_map(layout: TensorLayout, tp: int) -> dict[str, Any]:
    from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap

    whole, local, dim = layout.full_shape, layout.local_shape, layout.dim or 0
    ranges = layout.ranges or (((0, whole[dim]),),) * tp
    to_whole, to_local = _strides(whole), _strides(local)
    pieces = {}
    for rank, held in enumerate(ranges):
        offsets = accumulate((stop - start for start, stop in held), initial=0)
        pieces[rank] = [
            AffinePiece(
                shape=(*whole[:dim], stop - start, *whole[dim + 1 :]),
                source_offset=start * to_whole[dim],
                source_strides=to_whole,
                dest_offset=offset * to_local[dim],
                dest_strides=to_local,
                locations=[other for other in range(tp) if (start, stop) in ranges[other]],
            )
            for (start, stop), offset in zip(held, offsets, strict=False)
        ]
    found: dict[str, Any] = ParamAffineMap(whole, dict.fromkeys(pieces, local), pieces).to_dict()
    return found


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a tensor in one piece, row by row."""
    return tuple(accumulate(reversed((*shape[1:], 1)), lambda one, other: one * other))[::-1]
