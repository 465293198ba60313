"""The report of a plan: one page that opens without a network.

What the page computes with: sizes and strides, from which it tells everything about any rank.

As long for a million ranks as for eight: nothing here grows with the world.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parcompile.cost.memory import static_memory
from parcompile.diagnostics import Diagnostic
from parcompile.layout.groups import DENSE_AXES, EMBEDDING_GROUPS, Axis
from parcompile.layout.shards import MASTER_BYTES
from parcompile.model import spans
from parcompile.plan import Plan, PlanError, written
from parcompile.plan.sections import strided
from parcompile.rules import MEMORY_RULES, check
from parcompile.schema import validate
from parcompile.show.pictures import NARROW, WIDE
from parcompile.show.pictures.front import draw
from parcompile.show.pictures.svg import SHADES, colour
from parcompile.spec import Origin
from parcompile.spec.resolve import Resolution
from parcompile.spec.values import workload_of
from parcompile.units import format_bytes, format_seconds
from parcompile.user_files import MAX_INDEX_BYTES, parse_json, read_text, shipped

from .sections import Html, both_widths, folded, joined, table, tag

_WORDS: Mapping[str, Mapping[str, str]] = shipped("parcompile.show.page", "assets/words.json")
"""What groups carry, by their names, and how a table says what a search may set besides the axes."""


def page_data(plan: Plan) -> dict[str, Any]:
    """The plan for the page's script."""
    spec, groups = plan.spec, plan.groups
    parallelism, training, cluster = spec.parallelism, spec.training, spec.cluster
    grid = groups.grid
    return {
        "world": plan.world_size,
        "perNode": cluster.gpus_per_node,
        "nodes": cluster.nodes,
        "axes": {
            **{axis: {"size": grid.size((axis,)), "stride": grid.stride(axis)} for axis in DENSE_AXES},
            # Experts are laid over the same ranks on a grid of their own.
            Axis.EP: {"size": groups.ep, "stride": groups.expert_grid.stride(Axis.EP) if groups.ep > 1 else 1},
        },
        "groups": [
            {
                "name": name,
                "use": _WORDS["groups"].get(name, ""),
                "members": strided(groups.family(name))["members"],
                "ends": name in EMBEDDING_GROUPS,
            }
            for name in groups.shown_names
        ],
        "sequence": {
            "length": training.sequence_length,
            "layout": parallelism.cp_layout.value,
            "chunks": parallelism.cp_layout.chunks_per_rank,
        },
        "batch": {"micro": training.micro_batch_size, "steps": training.gradient_accumulation_steps},
        "shards": spec.optimizer_shards,
        "shardsEach": spec.shards_weights,
        "stateBytes": MASTER_BYTES + workload_of(spec).state_bytes,
        "stages": _stages(plan),
        "tensors": _tensors(plan),
        "tied": spec.model.shape.tie_word_embeddings,
        "colours": {scheme: _colours(dark=scheme == "dark") for scheme in ("light", "dark")},
        "shades": SHADES,
    }


def _stages(plan: Plan) -> list[dict[str, Any]]:
    spec = plan.spec
    found = []
    for held, stage in zip(spec.virtual_stages, spec.stages, strict=True):
        work = workload_of(spec)
        memory, dealt = static_memory(work, stage), work.dealt_parameters(stage)
        expert_shard = work.sharded(stage).expert_numel
        found.append(
            {
                "layers": [[one.layers.start, one.layers.stop] for one in held],
                "embedding": stage.has_embedding,
                "head": stage.has_head,
                "numel": memory.numel - dealt,
                "shard": memory.shard_numel - expert_shard,
                "experts": {"numel": dealt, "shard": expert_shard} if dealt else None,
            }
        )
    return found


def _tensors(plan: Plan) -> list[dict[str, Any]]:
    """Each parameter with the slices of every tp rank; `place` says which stages hold it."""
    before = {parameter.name for parameter in plan.parameters.before}
    found = []
    for parameter, layout in plan.tensors().values():
        layers = parameter.numbers
        place = "layers" if layers is not None else "embedding" if parameter.name in before else "head"
        found.append(
            {
                "name": parameter.name,
                "place": place,
                "layers": None if layers is None else spans(layers),
                "shape": layout.local_shape,
                "dim": layout.dim,
                "ranges": layout.ranges,
                "expertDim": parameter.expert_dim if plan.groups.ep > 1 else None,
            }
        )
    return found


def _colours(*, dark: bool) -> dict[str, Any]:
    roles = ("surface", "ink", "soft", "track", "line", *DENSE_AXES, Axis.EP)
    return {
        **{role: colour(role, dark=dark) for role in roles},
        "ramps": {
            axis: [colour(f"{axis}-{shade}", dark=dark) for shade in range(SHADES)] for axis in (*DENSE_AXES, Axis.EP)
        },
    }


# What the rules say of a plan whose spec is not at hand.


def remarks(plan: Plan) -> tuple[Diagnostic, ...]:
    """What there is to say of a plan, without places in a file: that it does not fit is its only possible error.

    Raises:
        PlanError: what the plan says of its spec is none.
    """
    tree = written(plan)
    is_file = any(one.origin is Origin.CONFIG for one in plan.spec.provenance.values())
    wrong = validate({**tree, "model": {"hf_config": "config.json"}} if is_file else tree, "spec").diagnostics
    if wrong:
        raise PlanError(f"the plan is damaged (provenance: {wrong[0].message}): compile it again")
    return tuple(one for one in check(Resolution(tree)) if not one.is_error or one.code in MEMORY_RULES)


_VIRTUAL = "num_virtual_stages_per_pipeline_rank"
SHOWN = 20
"""Layouts that are shown at once; the others are in a part that opens."""


class SearchError(ValueError):
    """A file that is no search's result; the message is meant for the user."""


def read_search(file: Path) -> dict[str, Any]:
    """The result in a file.

    Raises:
        SearchError: it cannot be read, or holds something else.
    """
    try:
        tree = parse_json(read_text(file, MAX_INDEX_BYTES))
    except OSError as error:
        raise SearchError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SearchError(f"{file} is not valid JSON: {error}") from None
    try:
        section(tree, {})
    except (KeyError, TypeError, AttributeError, ValueError):
        raise SearchError(f"{file} is not what `parcompile search SPEC --format json` prints") from None
    return dict(tree)


def section(tree: Mapping[str, Any], plan: Mapping[str, object]) -> Html:
    """The chosen layout, the next ones, and why every other one lost; the row of `plan`'s layout is marked.

    Raises:
        KeyError, TypeError: the tree is not a search's.
    """
    fitting, large, refused = tree["fitting"], tree["too_large"], tree["refused"]
    counts = Counter(one["code"] for one in refused)
    words = (
        f"{len(fitting) + len(large):,} layouts were predicted: {len(fitting):,} fit, {len(large):,} do not; "
        f"{len(refused):,} settings of the axes were refused by rules."
    )
    parts = [tag("p", words), *_front(tree)]
    for title, found in (("Layouts that fit, the chosen one first", fitting), ("Layouts that do not fit", large)):
        if found:
            parts.append(_layouts(title, found[:SHOWN], plan))
        if len(found) > SHOWN:
            rest = _layouts(title, found[SHOWN:], plan)
            parts.append(folded(f"{len(found) - SHOWN:,} more", rest))
    if refused:
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(counts.items()))
        rows = [("layout", "rule", "why"), *((_name(one["layout"]), one["code"], one["message"]) for one in refused)]
        parts.append(folded(f"Refused by rules ({codes})", table(rows, caption="Settings that rules refuse")))
    return joined(parts)


def _front(tree: Mapping[str, Any]) -> list[Html]:
    """Time against memory, wide and narrow."""
    if not tree["fitting"]:
        settings = (one["settings"].items() for one in tree.get("remedies", ()))
        remedies = "".join(f" It would with {', '.join(f'{name} {value}' for name, value in one)}." for one in settings)
        return [tag("p", f"Nothing fits.{remedies}")]
    if "pareto_front" not in tree:
        return []  # written by a version that did not say
    pair = [draw(tree, width) for width in (WIDE, NARROW)]
    return [*both_widths(pair), tag("p", pair[0].description, class_="note")]


def _layouts(title: str, found: list[dict[str, Any]], plan: Mapping[str, object]) -> Html:
    rows: list[tuple[str, ...]] = [("layout", "step", "tokens/s per GPU", "memory", "fits", "why it lost")]
    for one in found:
        chance = one["probability_to_fit"]
        layout = {_VIRTUAL: 1, **one["layout"]}
        same = plan and all({_VIRTUAL: 1, **plan}.get(name) == value for name, value in layout.items())
        here = " (this plan)" if same else ""
        rows.append(
            (
                _name(one["layout"]) + here,
                format_seconds(one["step_seconds"]),
                f"{one['tokens_per_second_per_gpu']:,.0f}",
                format_bytes(one["peak_bytes"]),
                "-" if chance is None else f"{chance:.0%}",
                one["reason"] or "chosen",
            )
        )
    return table(rows, caption=title)


def _name(layout: Mapping[str, object]) -> str:
    """A layout in few words: its axes, then what else it sets."""
    axes = [f"{axis} {layout[axis]}" for axis in (Axis.TP, Axis.CP, Axis.EP, Axis.PP, Axis.DP) if axis in layout]
    more = []
    for name, value in layout.items():
        words = _WORDS["layout"].get(name)
        if words is not None and value not in (False, "none"):
            more.append(words.format(", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value))
    return ", ".join([" · ".join(axes), *more])
