"""Pictures of plans: what they show is what the plan says, in every form, for every plan."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from layout_cases import compile_tree, spec_tree

from parcompile.cli import main
from parcompile.layout.groups import AXES, AxisGroups
from parcompile.layout.sequence import CpLayout, work
from parcompile.plan import load_plan, plan_tree
from parcompile.show.markdown import plain, table
from parcompile.show.pictures import DENSE_AXES, NARROW, WIDE, Box, Cells, Subject, Text, ticks
from parcompile.show.pictures import svg as colours
from parcompile.show.pictures.front import KINDS, as_text, picture
from parcompile.show.pictures.svg import svg
from parcompile.show.pictures.timeline import ROLES

GOLDEN = Path(__file__).parents[1] / "golden"
PLANS = sorted(one.parent.name for one in GOLDEN.glob("*/plan.json"))
SVG = "{http://www.w3.org/2000/svg}"


def golden(name: str) -> Subject:
    return Subject.of(load_plan(GOLDEN / name))


def small(folder: Path, **sections: Any) -> Subject:
    return Subject.of(compile_tree(spec_tree(1, 8, **sections), folder))


@pytest.mark.parametrize("plan", PLANS)
def test_every_picture_is_well_formed_and_stays_inside_its_frame(plan: str) -> None:
    subject = golden(plan)
    for name in KINDS:
        for width in (WIDE, NARROW):
            drawn = picture(name, subject, width=width)
            assert ET.fromstring(svg(drawn)).tag == f"{SVG}svg"
            assert drawn.description
            for shape in drawn.shapes:
                if isinstance(shape, Box):
                    assert -0.5 <= shape.x <= shape.x + shape.width <= width + 0.5, (name, shape)
                    assert -0.5 <= shape.y <= shape.y + shape.height <= drawn.height + 0.5, (name, shape)
                if isinstance(shape, Cells):
                    assert max(x for x, _ in shape.corners) + shape.width <= width
        assert as_text(name, subject, unicode=False).isascii() or name == "splits"


def test_a_step_shows_what_waits_for_the_host(tmp_path: Path) -> None:
    subject = small(tmp_path, zero={"stage": 1, "offload_optimizer": {"device": "cpu"}})
    assert "optimizer on the host" in svg(picture("timeline", subject))
    every = replace(subject.estimate.time.step, host=1.0, activations=1.0).parts
    assert every.keys() == ROLES.keys()


def test_what_a_spec_is_called_is_shown_and_never_executed(tmp_path: Path) -> None:
    subject = small(tmp_path, name='</text><script>alert("1")</script> & more', parallelism={"tp": 2})
    text = svg(picture("splits", subject))
    assert "<script" not in text
    assert any('<script>alert("1")' in (one.text or "") for one in ET.fromstring(text).iter(f"{SVG}text"))


def test_the_grid_lights_the_groups_of_a_rank() -> None:
    subject = golden("llama-3-8b-64k-32-gpus")
    drawn = picture("grid", subject, rank=5)
    grid = subject.plan.groups.grid
    fills = {one.title.split(":")[0]: one.fill for one in drawn.shapes if isinstance(one, Box) and one.title}
    assert fills["rank 5"] == "ink"
    for axis in ("tp", "cp", "dp"):
        expected = {f"rank {rank}" for rank in AxisGroups(grid, (axis,)).of_rank(5)} - {"rank 5"}
        assert {rank for rank, fill in fills.items() if fill == axis} == expected


def test_the_grid_of_16384_ranks_is_one_shape_a_colour() -> None:
    drawn = picture("grid", golden("llama-3.1-405b-128k-16384-gpus"), axis="pp")
    cells = [shape for shape in drawn.shapes if isinstance(shape, Cells)]
    assert sum(len(shape.corners) for shape in cells) == 16384
    assert len(cells) == 16


def test_bars_of_memory_add_up_to_the_estimate() -> None:
    subject = golden("llama-3-70b-512-gpus")
    boxes = [one for one in picture("memory", subject).shapes if isinstance(one, Box) and one.title]
    stages = subject.estimate.memory.stages
    lengths = [sum(one.width for one in boxes if one.title.startswith(f"stage {stage.stage},")) for stage in stages]
    for length, stage in zip(lengths, stages, strict=True):
        assert length / lengths[0] == pytest.approx(stage.total_bytes / stages[0].total_bytes)


@pytest.mark.parametrize("layout", list(CpLayout))
def test_the_ring_shows_each_ranks_share_of_the_work(layout: CpLayout, tmp_path: Path) -> None:
    subject = small(tmp_path, parallelism={"cp": 8, "cp_layout": layout.value})
    shown = [one.text for one in picture("schedule", subject).shapes if isinstance(one, Text) and one.text[-1] == "%"]
    most = max(work(layout, 8, rank) for rank in range(8))
    assert shown == [f"{float(work(layout, 8, rank) / most):.0%}" for rank in range(8)]
    # In a terminal: contiguous rings compute full, half and nothing.
    rows = as_text("schedule", subject, unicode=False).splitlines()[2:]
    expected = {"zigzag": "+", "contiguous": "#", "striped": "+"}[layout.value]
    assert rows[7].split("|")[1].split() == ["+", *[expected] * 7]


@pytest.mark.parametrize(
    ("implementation", "said", "rows"),
    [
        ("ring", "4 steps, 3 exchanges", 4),
        ("all_gather", "gathered at once", 4),
        ("ulysses", "heads are exchanged", 1),
        ("usp", "2 ranks exchange heads and share one of 2 places", 2),
        ("double_ring", "4 steps, 3 exchanges", 4),
    ],
)
def test_the_schedule_follows_the_implementation(implementation: str, said: str, rows: int, tmp_path: Path) -> None:
    layout = {"cp": 4, "cp_implementation": implementation}
    layout |= {"hierarchical_cp_sizes": [2, 2]} if implementation in ("usp", "double_ring") else {}
    subject = small(tmp_path, parallelism=layout)
    drawn = picture("schedule", subject)
    assert said in drawn.subtitle
    titles = [one.title for one in drawn.shapes if isinstance(one, Box) and "keys of" in one.title]
    assert len(titles) == rows * rows
    context = subject.plan.spec.parallelism.context
    if implementation != "all_gather":
        for title in titles:
            place, step, source = map(int, re.findall(r"\d+", title)[:3])
            assert source == context.source(step, place)


def test_what_is_cut_is_cut_as_the_plan_says(tmp_path: Path) -> None:
    subject = small(tmp_path, parallelism={"tp": 2, "cp": 4})
    titles = [one.title for one in picture("splits", subject).shapes if isinstance(one, Box)]
    for rank, found in enumerate(plan_tree(subject.plan)["sequence"]["ranks"]):
        for start, stop, _ in found["tokens"]:
            assert f"cp {rank}: tokens [{start}, {stop})" in titles
    for row in plan_tree(subject.plan)["tensors"]:
        if row["ranges"] and row["layers"] and len(row["shape"]) > 1:
            for rank, ((start, stop),) in enumerate(row["ranges"]):
                assert f"{row['name']}: tp {rank} holds [{start}, {stop})" in titles


def test_text_can_be_read_on_every_shade_in_light_and_dark() -> None:
    shades = [f"{axis}-{place}" for axis in AXES for place in range(colours.SHADES)]
    for dark in (False, True):
        surface = colours.colour("surface", dark=dark)
        for role in ("ink", "soft", "bad", "good", "warn"):
            assert colours.contrast(colours.colour(role, dark=dark), surface) >= 4.5, (role, dark)
        for role in (*shades, *DENSE_AXES, "forward", "backward", "computation"):
            below = colours.colour(role, dark=dark)
            assert colours.contrast(colours.colour(f"on:{role}", dark=dark), below) >= 4.5, (role, dark)


def test_ticks_are_round() -> None:
    assert ticks(77.3) == (0, 20, 40, 60)
    assert ticks(0.9, 4) == pytest.approx((0, 0.5))
    assert ticks(100, 4) == (0, 50, 100)


def test_markdown_says_what_it_was_given() -> None:
    assert plain("a|b @team #1 <b> `x` global_batch_size") == (
        "a&#124;b &#64;team &#35;1 &#60;b&#62; &#96;x&#96; global_batch_size"
    )
    assert table([("a", "b"), ("x\ny", 1)]) == "| a | b |\n| --- | ---: |\n| x y | 1 |\n"


class TestCommand:
    PLAN = str(GOLDEN / "qwen3-8b-16-gpus")

    @pytest.fixture
    def run(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
        monkeypatch.chdir(tmp_path)

        def call(*arguments: str) -> tuple[int, str, str]:
            monkeypatch.setattr(sys, "argv", ["parcompile", "view", *arguments])
            with pytest.raises(SystemExit) as stopped:
                main()
            captured = capsys.readouterr()
            return int(stopped.value.code or 0), captured.out, captured.err

        return call

    def test_the_short_form_goes_to_the_terminal(self, run: Any) -> None:
        code, out, _ = run(self.PLAN)
        assert code == 0
        assert all(text in out for text in ("ranks by node", "memory by stage", "time of a step", "there is no ring"))

    @pytest.mark.parametrize("name", KINDS)
    def test_a_picture_is_written_in_the_form_that_the_file_is_called(self, run: Any, name: str) -> None:
        pytest.importorskip("matplotlib")
        for suffix, start in ((".svg", b"<svg"), (".png", b"\x89PNG\r\n"), (".md", b"### "), (".txt", b"")):
            assert run(self.PLAN, "--picture", name, "-o", f"x{suffix}")[0] == 0
            assert Path(f"x{suffix}").read_bytes().startswith(start)

    def test_the_whole_report_is_markdown_too(self, run: Any) -> None:
        code, out, _ = run(self.PLAN, "--format", "md")
        assert (code, len(re.findall(r"^### ", out, re.MULTILINE))) == (0, len(KINDS))

    @pytest.mark.parametrize(
        ("arguments", "said", "code"),
        [
            (("--format", "svg"), "add --picture", 2),
            (("--picture", "grid", "-o", "x.gif"), "add --format", 2),
            (("--picture", "grid", "--format", "png"), "add -o", 2),
            (("--axis", "tp"), "add --picture grid", 2),
            (("--picture", "memory", "--format", "svg", "--rank", "1"), "takes no --rank", 2),
            (("--picture", "grid", "--format", "svg", "--rank", "99"), "0 ≤ rank < 16", 2),
            (("--picture", "grid", "--format", "svg", "--axis", "xp"), "tp, cp, dp, pp", 2),
            (("--picture", "splits", "--format", "svg", "--axis", "xp"), "zero", 2),
            (("--picture", "grid", "--rank", "1"), "--axis and --rank colour pictures, not text", 2),
            (("--picture", "grid", "--axis", "cp", "--format", "md"), "colour pictures, not md: add --format svg", 2),
            (("--picture", "grid", "-o", "none/x.svg"), "cannot be written", 2),
        ],
    )
    def test_what_cannot_be_drawn_is_said(self, run: Any, arguments: tuple[str, ...], said: str, code: int) -> None:
        found = run(self.PLAN, *arguments)
        assert (found[0], found[1]) == (code, "")
        assert said in found[2]
        assert "Traceback" not in found[2]

    def test_without_matplotlib_a_png_is_refused(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("matplotlib.backends.backend_agg", "matplotlib.figure"):
            monkeypatch.setitem(sys.modules, module, None)
        code, _, err = run(self.PLAN, "--picture", "grid", "-o", "x.png")
        assert code == 2
        assert "[pictures]" in err
        assert not Path("x.png").exists()
