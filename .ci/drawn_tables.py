"""Compares the tables of drawn configurations with the models that transformers builds: names, order and shapes.

    python .ci/drawn_tables.py [--count 300] [--first 0] [--family llama] [--write docs/drawn_tables.md]

Types take turns. A draw varies sizes, and the keys of the type's class that `tests/runtime/drawn_configurations.py`
knows. Models are built on the meta device: no weights, no ranks. The exit code is 1 when a table differs, or a
configuration is refused without the name of a key that was drawn.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime"))

SWITCHES = (
    *("conv_bias", "norm_bias", "classifier_bias", "decoder_bias", "enable_bias", "use_sandwich_norm"),
    *("use_attention_gate", "alibi", "parallel_attn", "multi_query"),
)
NUMBERS: dict[str, tuple[Any, ...]] = {
    "H_cycles": (1, 2, 3),
    "L_cycles": (1, 2),
    "intermediate_multiple_size": (1, 3),
    "conv_L_cache": (2, 3, 5),
    "sliding_window_pattern": (2, 3),
}
KINDS = ("equal", "refused", "no model", "different")
PAGE = """# Drawn tables

Names, order and shapes of the parameters in the compiler's tables beside those of transformers {version}'s models on
the meta device: {count} drawn configurations of {families} model types, each type as often as the others. A draw varies
sizes, heads, experts, kinds of layers, and the switches of the type's class. *Equal*: every name, its place and its
shape. *Refused*: the message names a key that was drawn. *No model*: transformers builds none. Written by
`python .ci/drawn_tables.py --count {count} --write docs/drawn_tables.md`; the suite compares a sample.

{table}
"""


class Outcome(NamedTuple):
    """What became of a draw."""

    family: str
    kind: str
    """One of `KINDS`."""
    text: str = ""


def configuration(number: int, family: str) -> tuple[dict[str, Any], set[str]]:
    """A configuration of the type, and the keys that were drawn: the same for the same number."""
    from drawn_configurations import draw
    from families import tiny_config

    choose, changes = random.Random(number), dict(draw(number, (family,)).changes)
    rope = str(changes.get("rope_parameters"))
    changes["vocab_size"] = choose.choice([61, 96, 130])
    changes["max_position_embeddings"] = choose.choice([32, 64, 96])
    # What follows from the hidden size would have to be drawn with it.
    follows = ("head_dim", "word_embed_proj_dim", "linear_key_head_dim", "mamba_d_head", "mamba_n_heads")
    if "longrope" not in rope and not any(key in tiny_config(family) or key in changes for key in follows):
        changes["hidden_size"] = choose.choice([32, 64, 96])
    changes.setdefault("intermediate_size", choose.choice([24, 48, 80]))
    changes |= further(choose, family, changes)
    return tiny_config(family, **changes), set(changes)


def further(choose: random.Random, family: str, changes: dict[str, Any]) -> dict[str, Any]:
    """What draws for training leave as it is: it changes parameters rather than numbers, or few types have it."""
    from families import FAMILIES, tiny_config
    from transformers import CONFIG_MAPPING

    from parcompile.model.blocks.indexer import IndexerTraits
    from parcompile.model.blocks.mamba2 import Mamba2Traits
    from parcompile.model.blocks.ngrams import NgramTraits
    from parcompile.model.blocks.recurrent import RecurrentTraits

    traits, base = FAMILIES[family], tiny_config(family)
    known = vars(CONFIG_MAPPING[family]).get("__dataclass_fields__", {})
    found: dict[str, Any] = {key: choose.choice([False, True]) for key in SWITCHES if key in known}
    found |= {key: choose.choice(values) for key, values in NUMBERS.items() if key in known}
    states, layers = traits.part(RecurrentTraits), changes["num_hidden_layers"]
    # Which layers have n-grams follows from the kinds that were drawn.
    own_kinds = any(isinstance(one, NgramTraits) for one in traits.parts)
    if (
        not own_kinds
        and states is not None
        and not isinstance(states, Mamba2Traits)
        and states.layers_key == "layer_types"
    ):
        words = [states.word, *states.attending_words]
        found["layer_types"] = [states.word, "full_attention", *(choose.choice(words) for _ in range(layers - 2))]
    chosen = traits.part(IndexerTraits)
    if chosen and chosen.pool is None and not chosen.block_key:
        found |= {"layer_types": None, "index_head_dim": 2 * changes["qk_rope_head_dim"]}
    if traits.paired_heads:
        found["num_key_value_heads"] = choose.choice([2, 4])
    if "vocab_size_per_layer_input" in base:
        found["vocab_size_per_layer_input"] = changes["vocab_size"]
    if changes.get("q_lora_rank", 8) is None and ("q_lora_rank" not in known or known["q_lora_rank"].type is int):
        found["q_lora_rank"] = 12
    return found


def compare(number: int, family: str) -> Outcome:
    """One draw."""
    from test_parameters_of_families import registered

    from parcompile.model.derived_rows import parameter_table
    from parcompile.model.hf_config import ModelConfigError, shape_from_config

    config, drawn = configuration(number, family)
    try:
        expected, _ = registered(config)
    except Exception as error:
        return Outcome(family, "no model", f"{type(error).__name__}: {error}")
    try:
        table = parameter_table(shape_from_config(config))
    except ModelConfigError as error:
        named = any(key in str(error) for key in drawn | config.keys())
        return Outcome(family, "refused" if named else "different", str(error))
    found = [(name, parameter.shape) for name, parameter in table.expanded()]
    if found == expected:
        return Outcome(family, "equal")
    place = next((one for one, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return Outcome(family, "different", f"{len(found)} parameters, and {len(expected)} of the model")
    return Outcome(family, "different", f"{found[place]} in the place of {expected[place]}")


def page(outcomes: list[Outcome]) -> str:
    """The table, by type."""
    import transformers

    by_family: dict[str, Counter[str]] = defaultdict(Counter)
    for one in outcomes:
        by_family[one.family][one.kind] += 1
    rows = [f"| model type | draws | {' | '.join(KINDS)} |", f"|---|---|{'---|' * len(KINDS)}"]
    every: Counter[str] = sum(by_family.values(), Counter())
    for name, counts in [*sorted(by_family.items()), ("all", every)]:
        rows.append(f"| {name} | {sum(counts.values())} | {' | '.join(str(counts[kind]) for kind in KINDS)} |")
    return PAGE.format(
        version=transformers.__version__, count=len(outcomes), families=len(by_family), table="\n".join(rows)
    )


def main() -> int:
    """Compares, and writes the page."""
    from transformers.utils import logging

    from parcompile.model.catalogue import RUNTIME_FAMILIES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--family", action="append", choices=RUNTIME_FAMILIES)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    families = tuple(given.family or RUNTIME_FAMILIES)
    numbers = range(given.first, given.first + given.count)
    outcomes = [compare(number, families[number % len(families)]) for number in numbers]
    for number, one in zip(numbers, outcomes, strict=True):
        if one.kind != "equal":
            print(f"{number}: {one.family}: {one.kind}: {one.text[:200]}", flush=True)
    text = page(outcomes)
    print(text.rstrip().rpartition("\n")[2])
    if given.write:
        given.write.write_text(text, encoding="utf-8")
    return int(any(one.kind == "different" for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
