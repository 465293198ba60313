"""Writes the weights of a checkpoint as a Hugging Face model: safetensors that `from_pretrained` loads.

Tensors are made whole one at a time and written file by file, so that the memory needed is that of one file.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from parcompile.plan import Plan
from parcompile.progress import tracked
from parcompile.runtime.errors import RunError
from parcompile.runtime.model.configuration import check_folder, saved_config
from parcompile.runtime.model.lora import OF_EXPERTS, as_saved, matrix_of, merged
from parcompile.runtime.model.pretrained import PretrainedFolder
from parcompile.runtime.model.text_head import TORCH_DTYPES

from .manifest import refuse_inside
from .reading import SavedRun, whole_note
from .whole_tensors import WholeTensors

SHARD_BYTES = 2 * 10**9
INDEX = "model.safetensors.index.json"


def export(
    folder: str | Path, output: str | Path, *, shard_bytes: int = SHARD_BYTES, into: str | Path | None = None
) -> list[Path]:
    """Writes config.json (not for a user module) and one or several safetensors files, and returns them.

    Weights are those the run computes with, in its precision, bit for bit; the padding of the vocabulary is left out,
    and a tied head is not written, as Hugging Face does. LoRA adapters are merged, in fp32.

    Args:
        folder: a checkpoint, or a folder of them whose last one is meant.
        output: a folder that does not exist yet, or is empty.
        shard_bytes: the size at which a new file is begun.
        into: the folder of the multimodal model whose text part was trained: `output` gets the whole model, with the
            trained text part under its names there, the configuration as it was, and all other parts bit for bit.

    Raises:
        RunError: the checkpoint is damaged (which file is said), `output` holds files, or `into` is no multimodal
            model with this text part.
    """
    refuse_filled(output := Path(output))
    saved = SavedRun(note := whole_note(folder))
    whole_model = None if into is None else _whole_model(into, note.plan, saved.buffers)
    with _filled(output):
        return _write_model(saved, output, shard_bytes, whole_model)


def _write_model(saved: SavedRun, output: Path, shard_bytes: int, whole_model: PretrainedFolder | None) -> list[Path]:
    writer = ModelWriter(output, shard_bytes)
    for name, weight in whole_weights(saved):
        stored = {name: weight} if whole_model is None else whole_model.as_stored(name, weight)
        if whole_model is not None and stored is None:
            raise RunError(f"{whole_model.folder} stores {name} under no name of its own: export without it")
        writer.add_all(stored or {})
    for name, buffer in saved.buffers.items():
        # What a folder does not have its class makes itself.
        writer.add_all({name: buffer} if whole_model is None else whole_model.as_stored(name, buffer) or {})
    if whole_model is not None:
        for other in sorted(whole_model.beside):
            writer.add(other, whole_model.set_aside(other))
    files = writer.finish()
    if whole_model is not None:
        shutil.copyfile(whole_model.folder / "config.json", output / "config.json")
        return [output / "config.json", *files]
    return [*write_config(saved.plan, output), *files]


def whole_weights(tensors: WholeTensors) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a model by name, in the precision of its run, with its adapters merged into them."""
    dtype = TORCH_DTYPES[tensors.plan.spec.training.precision]
    for name in tracked(tensors.parameters, "writing the model"):
        whole = tensors.whole(name)
        assert whole is not None
        yield name, _merged(tensors, name, whole).to(dtype)


def write_config(plan: Plan, output: Path) -> list[Path]:
    """Writes config.json, and returns it; nothing for a user module, which no configuration describes."""
    if plan.spec.model.shape.user_module is not None:
        return []
    config = output / "config.json"
    values = saved_config(plan, TORCH_DTYPES[plan.spec.training.precision])
    config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return [config]


def export_adapter(folder: str | Path, output: str | Path) -> list[Path]:
    """Writes the LoRA adapters of a checkpoint as peft does, for `PeftModel.from_pretrained`, and returns the files.

    Raises:
        RunError: as `export`, or the checkpoint has no adapters.
    """
    refuse_filled(output := Path(output))
    note = whole_note(folder)
    if not note.adapters:
        raise RunError(f"{note.folder} has no adapters: export the model")
    with _filled(output):
        return write_adapter(output, note.adapters, dict(whole_adapters(SavedRun(note))))


def whole_adapters(tensors: WholeTensors) -> Iterator[tuple[str, Tensor]]:
    """LoRA matrices by peft's names, in the precision of the run."""
    dtype, adapters = TORCH_DTYPES[tensors.plan.spec.training.precision], tensors.described_adapters
    assert adapters is not None
    for name in tensors.adapters:
        whole = tensors.whole(name)
        assert whole is not None
        stored, matrix = as_saved(name, whole, adapters)
        yield stored, matrix.to(dtype).contiguous()


def write_adapter(output: Path, adapters: Mapping[str, Any], state: dict[str, Tensor]) -> list[Path]:
    """Writes peft's two files, and returns them."""
    config, weights = output / "adapter_config.json", output / "adapter_model.safetensors"
    write_tensors(state, weights)
    values = {**adapters["config"], "inference_mode": True}
    config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return [config, weights]


def write_tensors(state: dict[str, Tensor], file: Path) -> None:
    """Writes a safetensors file with the permissions of a new file: safetensors 0.8 lets its owner alone read it."""
    from safetensors.torch import save_file

    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    save_file(state, str(file), metadata={"format": "pt"})
    file.chmod(mode)


def _whole_model(folder: str | Path, plan: Plan, buffers: Collection[str]) -> PretrainedFolder:
    """The files of a multimodal model whose text part is the plan's."""
    whole = PretrainedFolder(folder)
    check_folder(folder, plan)
    if not whole.beside:
        raise RunError(f"{folder} holds no other part than the text: export without it")
    whole.check(plan, buffers)
    return whole


def refuse_filled(folder: Path) -> None:
    """Refuses a folder to export into that holds something, is a file, or lies in a checkpoint.

    Raises:
        RunError: why.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file: export into a new folder")
    if folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder} is not empty: export into a new folder")
    refuse_inside(folder)


@contextlib.contextmanager
def _filled(folder: Path) -> Iterator[None]:
    """An empty folder to write into. Where that fails, what was written goes, and the folders that were made."""
    from safetensors import SafetensorError

    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            for one in folder.iterdir():
                one.unlink()
            for one in made:
                one.rmdir()
        if isinstance(error, OSError | SafetensorError):  # the second, where the disk is full
            raise RunError(f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}") from None
        raise


def _merged(tensors: WholeTensors, name: str, weight: Tensor) -> Tensor:
    linear = name.removesuffix(".weight") if name.endswith(".weight") else name + OF_EXPERTS
    adapter = (tensors.described_adapters or {"linears": {}})["linears"].get(linear)
    if adapter is None:
        return weight
    down, up = (tensors.whole(one) for kind in "AB" for one in tensors.adapters if matrix_of(one) == (linear, kind))
    assert down is not None
    assert up is not None
    return merged(weight.float(), down, up, adapter["scaling"])


class ModelWriter:
    """Collects tensors until a file is full; safetensors as Hugging Face names them."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder, self._limit = folder, shard_bytes
        self._waiting: dict[str, Tensor] = {}
        self._bytes = 0
        self._written: list[tuple[Path, list[str]]] = []
        self._total = 0

    def add_all(self, tensors: Mapping[str, Tensor]) -> None:
        """As `add`, for several."""
        for name, tensor in tensors.items():
            self.add(name, tensor.contiguous())

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes a tensor in; a file that is full is written first."""
        size = tensor.numel() * tensor.element_size()
        if self._waiting and self._bytes + size > self._limit:
            self._flush()
        self._waiting[name] = tensor
        self._bytes += size
        self._total += size

    def _flush(self) -> None:
        file = self._folder / f"part-{len(self._written)}.safetensors"
        write_tensors(self._waiting, file)
        self._written.append((file, list(self._waiting)))
        self._waiting, self._bytes = {}, 0

    def finish(self) -> list[Path]:
        """Names the files as Hugging Face does, with an index when there are several."""
        self._flush()
        count = len(self._written)
        if count == 1:
            return [self._written[0][0].rename(self._folder / "model.safetensors")]
        files, places = [], {}
        for number, (part, names) in enumerate(self._written, start=1):
            file = part.rename(self._folder / f"model-{number:05d}-of-{count:05d}.safetensors")
            places.update(dict.fromkeys(names, file.name))
            files.append(file)
        index = self._folder / INDEX
        tree = {"metadata": {"total_size": self._total}, "weight_map": places}
        index.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
        return [*files, index]
