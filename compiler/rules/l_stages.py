"""The layers divide into pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parcompile.diagnostics import Edit, Fix, Safety
from parcompile.layout.groups import Axis, divisors
from parcompile.layout.pipeline import PipelineSplit, Stage, stages_from_counts
from parcompile.spec.resolve import Resolution, Unavailable
from parcompile.spec.resolve.reader import EMBEDDING, FIRST, LAST, LOSS, VIRTUAL

from . import Finding, also, layout_change, listed, nearest_divisors, nearest_multiples, rule

_PP = ("parallelism", "pp")
_VIRTUAL, _FIRST, _LAST = ("parallelism", VIRTUAL), ("parallelism", FIRST), ("parallelism", LAST)
_EMBEDDING, _LOSS = ("parallelism", EMBEDDING), ("parallelism", LOSS)


def _counted(spec: Resolution) -> tuple[int, str]:
    """The layers that are divided among the stages, with embedding and loss where they count as one, and their sum."""
    layers, split = spec.shape.num_hidden_layers, spec.pipeline_split
    terms = str(layers) + " + 1 for the embedding" * split.embedding + " + 1 for the loss" * split.loss
    total = layers + split.embedding + split.loss
    return total, f"{layers} layers" if total == layers else f"({terms}) layers"


def _has_ends(split: PipelineSplit) -> bool:
    return split.first is not None or split.last is not None


@rule("L001")
def layers_divide_into_stages(spec: Resolution) -> Iterator[Finding]:
    split, pp = spec.pipeline_split, spec.axis(Axis.PP)
    total, terms = _counted(spec)
    if _has_ends(split) or total % pp == 0:
        return
    layers = spec.shape.num_hidden_layers
    near = nearest_divisors(pp, total, count=4)
    hint = f"pp can be {listed(divisors(total))}"
    fixes = [_accounted(spec, embedding, loss) for embedding, loss in _accounts(layers, pp)]
    if fixes:
        extra = sum(edit.value is True for edit in fixes[0].edits)
        hint += f"; or {fixes[0].title}: ({layers} + {extra}) / {pp} = {(layers + extra) // pp}"
    fixes += [Fix.setting(_PP, size, layout_change(spec)) for size in near]
    yield Finding(
        f"{terms} on pp {pp}: {total} / {pp} is not whole; nearest: {listed(near[:2])}",
        _PP,
        help=hint,
        fixes=tuple(fixes),
        related=also(spec, _EMBEDDING, _LOSS),
    )


def _accounts(layers: int, pp: int) -> Iterator[tuple[bool, bool]]:
    """Whether embedding and loss count as a layer, wherever the layers then divide: both first, then one of them."""
    for embedding, loss in ((True, True), (False, True), (True, False), (False, False)):
        total = layers + embedding + loss
        if total % pp == 0:
            yield embedding, loss


def _accounted(spec: Resolution, embedding: bool, loss: bool) -> Fix:
    wanted = {_EMBEDDING: embedding, _LOSS: loss}
    edits = tuple(Edit(path, value) for path, value in wanted.items() if value or spec.given(*path))
    named = " and ".join(f"{edit.path[-1]} to {str(edit.value).lower()}" for edit in edits)
    return Fix(f"set {named}", Safety.CHANGES_COST, edits)


@rule("L004")
def middle_layers_divide(spec: Resolution) -> Iterator[Finding]:
    split, layers, pp = spec.pipeline_split, spec.shape.num_hidden_layers, spec.axis(Axis.PP)
    ends = {path: value for path, value in ((_FIRST, split.first), (_LAST, split.last)) if value is not None}
    if not ends or split.embedding or split.loss:
        return
    middle, rest = pp - len(ends), layers - sum(ends.values())
    if middle >= 0 and bool(middle) == bool(rest) and rest >= 0 and (not middle or rest % middle == 0):
        return
    terms = " − ".join(f"{path[-1].split('_')[3]} {value}" for path, value in ends.items())
    equation = f"({layers} layers − {terms}) on the {max(middle, 0)} other stages of pp {pp}"
    if middle < 0:
        why = "the first stage is the last"
    elif bool(middle) != bool(rest) or rest < 0:
        why = f"{rest} layers are left for {middle} stages"
    else:
        why = f"{rest} / {middle} is not whole"
    path = next(iter(ends))
    near = _nearest_end(path, ends, layers, middle)
    fixes = [Fix.setting(path, value, Safety.CHANGES_COST) for value in near]
    removal = f"remove {' and '.join(one[-1] for one in ends)}"
    fixes.append(Fix(removal, Safety.CHANGES_COST, tuple(Edit(one, remove=True) for one in ends)))
    yield Finding(
        f"{equation}: {why}" + (f"; nearest {path[-1]}: {listed(near)}" if near else ""),
        path,
        help=f"write a {path[-1]} that leaves a multiple of {middle}" if middle > 0 else "leave it out",
        fixes=tuple(fixes),
        related=also(spec, *[one for one in ends if one != path], _PP),
    )


def _nearest_end(path: tuple[str, str], ends: dict[tuple[str, str], int], layers: int, middle: int) -> tuple[int, ...]:
    """The numbers of layers next to the given one with which the rest divides."""
    room = layers - sum(value for other, value in ends.items() if other != path)
    if middle < 1:
        return (room,) if room > 0 and middle == 0 else ()
    lefts = nearest_multiples(max(room - ends[path], 1), middle)
    return tuple(room - left for left in lefts if room - left > 0)


def uneven_stages(spec: Resolution) -> Iterator[tuple[str, int, int, tuple[int, ...], set[int]]]:
    """The first stage of which virtual stages cannot have equally many layers: its share, its place and its layers.

    With the numbers of virtual stages that are next, and the layers that stages have.
    """
    split, virtual, pp = spec.pipeline_split, spec.virtual_stages, spec.axis(Axis.PP)
    counts = _per_rank(spec) if virtual > 1 and pp > 1 else ()
    bad = next((rank for rank, count in enumerate(counts) if count % virtual), None)
    if bad is not None:
        total, _ = _counted(spec)
        share = f"{total} / pp {pp} = {counts[bad]}" if not _has_ends(split) else f"{counts[bad]}"
        yield share, bad, counts[bad], nearest_divisors(virtual, *set(counts), count=3), set(counts)


def _per_rank(spec: Resolution) -> tuple[int, ...]:
    """Layers of each pp rank, with embedding and loss where they count as one."""
    split, total = spec.pipeline_split, _counted(spec)[0]
    if not _has_ends(split):
        if total % split.pp:
            raise Unavailable("pp")
        return (total // split.pp,) * split.pp
    try:
        return PipelineSplit(split.pp, 1, first=split.first, last=split.last).counts(spec.shape.num_hidden_layers)
    except ValueError:
        raise Unavailable("pp") from None


def stages_of(spec: Resolution) -> tuple[Stage, ...]:
    """The layers of each stage; none where they do not divide, of which another rule speaks."""
    try:
        return stages_from_counts(spec.pipeline_split.counts(spec.shape.num_hidden_layers))
    except ValueError:
        return ()


def stages_without_choice(
    spec: Resolution,
) -> Iterator[tuple[list[int], str, Sequence[int], list[int], tuple[Fix, ...]]]:
    """Where stages begin with layers that take the choice of one before them, what layers that choose have, which.

    With the numbers of stages that would do, and fixes.
    """
    layers, choosing = spec.shape.num_hidden_layers, [one for one in spec.shape.parts if one.behind]
    for one in choosing[:1]:
        begins = [stage.layers.start for stage in stages_of(spec) if len(stage.layers)]
        if starts := [start for start in begins if start in one.behind]:
            others = [path for path in (_FIRST, _LAST, _EMBEDDING, _LOSS, _VIRTUAL) if spec.given(*path)]
            sizes = [pp for pp in divisors(layers) if not one.behind.intersection(range(0, layers, layers // pp))]
            removed = f", remove {', '.join(path[-1] for path in others)}" if others else ""
            edits, change = [Edit(path, remove=True) for path in others], layout_change(spec)
            fewer = [pp for pp in sizes if pp <= spec.axis(Axis.PP)]
            fixes = tuple(Fix(f"set pp to {pp}{removed}", change, (Edit(_PP, pp), *edits)) for pp in fewer)
            yield starts, one.has, one.layers, sizes, fixes
