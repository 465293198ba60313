"""The names of targets, and what a file is, told by keys that only one tool has.

Files of the first four kinds are checked. The others are known only so that they are not taken for one of those:
a trainer's configuration has many keys of DeepSpeed's beside its own.
"""

from __future__ import annotations

import difflib
import enum
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parcompile import entry_points
from parcompile.user_files import shipped

from .statements import Facts, Values, holds, rows_of

SPEC, DEEPSPEED, MEGATRON, GPT_NEOX = "spec", "ds_config", "megatron", "gpt_neox"
CHECKED = (SPEC, DEEPSPEED, MEGATRON, GPT_NEOX)
"""Kinds that have a checker."""
ACCELERATE, AXOLOTL, LLAMA_FACTORY = "accelerate", "axolotl", "llama_factory"
TRAINER, LIGHTNING = "trainer", "lightning"
FILLERS = ("transformers", "accelerate", "lightning", "bare")
"""Who reads a DeepSpeed configuration and replaces "auto" in it; bare is `deepspeed.initialize` alone."""
PARALLELISM, DISTRIBUTED = "parallelism_config", "distributed_config"
TORCHTITAN, BRIDGE, AUTOMODEL = "torchtitan", "megatron_bridge", "automodel"
SWIFT, MEGATRON_SWIFT = "ms_swift", "megatron_swift"
MODEL, PACKAGE, UNKNOWN = "model_config", "package", "unknown"


class Certainty(enum.IntEnum):
    """How sure a recognition is. Files are changed by `--fix` only when it is certain."""

    UNKNOWN = 0
    LIKELY = 1
    CERTAIN = 2


class Recognition(NamedTuple):
    """What a file is, and how sure that is."""

    kind: str
    certainty: Certainty

    @property
    def is_checked(self) -> bool:
        """Whether there is a checker for it."""
        return self.kind in CHECKED


_KEY = re.compile(r"""^[\s{,-]*["']?([A-Za-z_][\w-]*)["']?\s*:""", re.M)
_NOTHING = Recognition(UNKNOWN, Certainty.UNKNOWN)

_SPEC_SECTIONS = ("model", "cluster", "parallelism", "training", "zero", "deepspeed")
_STORED = shipped("parcompile.backends", "kinds.json")
_DEEPSPEED_ALONE = frozenset(_STORED["deepspeed"])
"""Keys that stand in DeepSpeed configurations and in no other tool's, as a rule with a section under them."""
_DEEPSPEED_SECTIONS: Mapping[str, frozenset[str]] = {
    key: frozenset(known) for key, known in _STORED["deepspeed_sections"].items()
}
"""Keys that other tools have too, told apart by what stands in them."""
_DEEPSPEED_SMALL = frozenset({"train_batch_size", "gradient_accumulation_steps", "gradient_clipping"}) | frozenset(
    _DEEPSPEED_SECTIONS
)
"""Keys that make a DeepSpeed configuration where two stand together and nothing else does."""
_NEOX = frozenset(_STORED["gpt_neox"])
NEOX_KEYS = frozenset({"pipe_parallel_size", "model_parallel_size"})
"""Keys that only whole gpt-neox files have; it writes them with hyphens or underscores, and DeepSpeed's beside them."""


def recognise(tree: object) -> Recognition:
    """The kind of a parsed file."""
    if not isinstance(tree, dict):
        return _NOTHING
    keys = {str(key).replace("-", "_").lstrip("_") for key in tree}
    if isinstance(tree.get("step_scheduler"), dict) and isinstance(tree.get("model"), dict):
        return Recognition(AUTOMODEL, Certainty.CERTAIN)
    spec = _spec_sections(tree)
    if len(spec) >= 2 and (tree.get("version") == 1 or spec & {"cluster", "parallelism"}):
        certain = len(spec) >= 3 or tree.get("version") == 1
        return Recognition(SPEC, Certainty.CERTAIN if certain else Certainty.LIKELY)
    foreign = _foreign(tree, keys)
    if foreign is not None:
        return Recognition(foreign, Certainty.CERTAIN)
    # Only here: a spec needs none of what reads Megatron-LM's arguments.
    from .megatron.file import is_argument_tree

    if is_argument_tree(tree):
        return Recognition(MEGATRON, Certainty.CERTAIN)
    if keys & NEOX_KEYS or len(keys & _NEOX) >= 2:
        return Recognition(GPT_NEOX, Certainty.CERTAIN if keys & NEOX_KEYS else Certainty.LIKELY)
    signs = _deepspeed_signs(tree)
    if signs:
        return Recognition(DEEPSPEED, Certainty.CERTAIN if signs >= 2 else Certainty.LIKELY)
    if "train_batch_size" in tree and len(tree) >= 2 and tree.keys() <= _DEEPSPEED_SMALL:
        return Recognition(DEEPSPEED, Certainty.LIKELY)
    if spec and tree.get("version") == 1:
        return Recognition(SPEC, Certainty.LIKELY)
    return _NOTHING


def recognise_text(text: str) -> Recognition:
    """The kind of a text whose syntax is too broken to be parsed, by the keys that can be made out."""
    keys = {match[1] for match in _KEY.finditer(text)}
    if len(keys & set(_SPEC_SECTIONS)) >= 2:
        return Recognition(SPEC, Certainty.LIKELY)
    if NEOX_KEYS & {key.replace("-", "_") for key in keys}:
        return Recognition(GPT_NEOX, Certainty.LIKELY)
    if keys & _DEEPSPEED_ALONE and not _foreign({}, keys):
        return Recognition(DEEPSPEED, Certainty.LIKELY)
    return _NOTHING


def _spec_sections(tree: Mapping[str, Any]) -> set[str]:
    """Sections of a spec, also misspelt ones: keys of its names with an object under them."""
    return {near for key, value in tree.items() if isinstance(value, dict) and (near := _spec_section(str(key)))}


@functools.lru_cache(maxsize=512)
def _spec_section(key: str) -> str | None:
    """The section that a key names, or misspells."""
    near = [key] if key in _SPEC_SECTIONS else difflib.get_close_matches(key, _SPEC_SECTIONS, 1, 0.75)
    return near[0] if near else None


def _deepspeed_signs(tree: Mapping[str, Any]) -> int:
    alone = sum(key in tree for key in _DEEPSPEED_ALONE)
    within = sum(
        isinstance(tree.get(key), dict) and bool(known & tree[key].keys()) for key, known in _DEEPSPEED_SECTIONS.items()
    )
    return alone + within


_FOREIGN = tuple(rows_of(_STORED["foreign"], {}))


def _foreign(tree: Mapping[str, Any], keys: set[str]) -> str | None:
    """A tool whose files are not checked here, by keys that it needs."""

    def is_under(_tree: Any, path: str) -> bool:
        section, _, key = path.partition(".")
        return isinstance(tree.get(section), dict) and key in tree[section]

    facts: Facts = {
        "has.": lambda _tree, key: key in keys,
        "only.": lambda _tree, name: keys <= {*_STORED[name]},
        "names.": lambda _tree, key: isinstance(tree.get(key), str),
        "under.": is_under,
        "is_like_deepspeed": _deepspeed_signs,
    }
    values = Values(tree, facts, lambda _name: None)
    return next((row["kind"] for row in _FOREIGN if holds(row, values)), None)


# DeepSpeed configurations that another tool's file names: they are checked with it.


def named_files(kind: str, tree: Any, file: Path) -> list[str]:
    """The DeepSpeed configurations that a file of this kind names, those of them that are there.

    accelerate names one at deepspeed_config.deepspeed_config_file, the trainers at deepspeed. Such a path is relative
    to the folder in which the tool is started, mostly that of the repository; here it is looked for from the folder of
    the file upwards.
    """
    return [found for name in _named_in(kind, tree) if (found := _existing(name, file)) is not None]


def _named_in(kind: str, tree: Any) -> Iterator[str]:
    if not isinstance(tree, dict):
        return
    if kind == ACCELERATE and isinstance(tree.get("deepspeed_config"), dict):
        yield str(tree["deepspeed_config"].get("deepspeed_config_file") or "")
    if kind in (AXOLOTL, LLAMA_FACTORY, TRAINER) and isinstance(tree.get("deepspeed"), str):
        yield tree["deepspeed"]


def _existing(name: str, file: Path) -> str | None:
    if not name.endswith((".json", ".yaml", ".yml")):
        return None
    for folder in (*file.parents, Path()):
        candidate = folder / name
        try:
            if candidate.is_file():
                return str(candidate)
        except OSError:
            return None
    return None


BUILT_IN = (
    *("deepspeed", "torchrun", "slurm", "kubernetes", "skypilot", "megatron", "torchtitan"),
    *("accelerate", "accelerate-deepspeed", "transformers"),
    *("trl", "axolotl", "llamafactory"),
)
ALL = "all"
DEFAULT = ("deepspeed", "torchrun", "slurm")
"""Targets that are written when none is named."""
LAUNCHERS = (*DEFAULT, "kubernetes", "skypilot", "trl", "axolotl")
"""Targets whose files start a script under the runtime; the others are tools that train by themselves."""


def names() -> tuple[str, ...]:
    """Every target, those of plug-ins behind the others."""
    offered = entry_points.offers(entry_points.TARGETS)
    return (*BUILT_IN, *(name for name in offered if name not in BUILT_IN and name != ALL))


def chosen(given: Sequence[str]) -> tuple[str, ...]:
    """The targets that are meant, each once and in a fixed order: without names the default ones.

    "all" means the built-in ones. Those of plug-ins are named one by one, so that "all" is the same on every machine.

    Raises:
        ValueError: there is no target of that name.
    """
    if set(given) <= set(BUILT_IN):
        return tuple(name for name in BUILT_IN if name in (given or DEFAULT))
    known = names()
    for name in given:
        if name != ALL and name not in known:
            raise ValueError(f"there is no target {name!r}; there are {', '.join(known)}, and {ALL}")
    wanted = set(BUILT_IN if ALL in given else ()) | set(given)
    return tuple(name for name in known if name in wanted)
