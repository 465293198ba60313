"""The report page in a real browser: picking, keys, sizes, colours, and that it says what the compiler says."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Page, find_browser
from layout_cases import compile_tree, spec_tree

from parcompile.diagnostics import Diagnostic, Fix, Safety, Severity
from parcompile.layout.sequence import token_ranges
from parcompile.layout.shards import padded_shard
from parcompile.plan import Plan, load_plan, written
from parcompile.show.page import remarks, section
from parcompile.show.page.render import page
from parcompile.show.pictures import Subject

GOLDEN = Path(__file__).parents[1] / "golden"
LARGE = "llama-3.1-405b-128k-16384-gpus"
SMALL = "llama-3-8b-64k-32-gpus"
GRID = "document.getElementById('grid')"
ROWS = "[...document.querySelectorAll('#values-table tbody tr')]"
GO = (
    "((hash) => new Promise((done) => { addEventListener('hashchange', done, { once: true }); location.hash = hash; }))"
)
"""Goes to a part of the page's address."""
PICTURES = "[...document.querySelectorAll('.picture')].filter((one) => one.offsetParent)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        assert not os.environ.get("CI"), "CI tests the page in a browser: install chromium"
        pytest.skip("there is no chromium here: the page is not tested (make browser installs one)")
    found = Browser(path, tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    """The golden plans, and plans with the oddities that a page has to get right."""
    folder = tmp_path_factory.mktemp("specs")
    found = {one.parent.name: load_plan(one) for one in GOLDEN.glob("*/plan.json")}
    odd = spec_tree(
        2,
        8,
        name='</script><img src=x onerror="alert(1)"> <!-- & "x"',
        parallelism={"tp": 2, "cp": 2, "pp": 2, "cp_layout": "striped", "num_virtual_stages_per_pipeline_rank": 2},
        training={"global_batch_size": 8, "gradient_accumulation_dtype": "fp32"},
    )
    replicas = spec_tree(1, 8, parallelism={"tp": 8, "sequence_parallel": True}, training={"global_batch_size": 2})
    contiguous = spec_tree(1, 8, parallelism={"cp": 4, "cp_layout": "contiguous", "order": "cp-dp-tp-pp"})
    for name, tree in (("odd", odd), ("replicas", replicas), ("contiguous", contiguous)):
        found[name] = compile_tree(tree, folder)
    return found


@pytest.fixture(scope="module")
def files(plans: dict[str, Plan], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of each plan."""
    folder, found = tmp_path_factory.mktemp("pages"), {}
    for name, plan in plans.items():
        found[name] = folder / f"{name}.html"
        found[name].write_text(page(Subject.of(plan)), encoding="utf-8")
    return found


@pytest.fixture
def opened(browser: Browser, files: dict[str, Path]) -> Iterator[Any]:
    pages: list[Page] = []

    def call(name: str, **options: Any) -> Page:
        pages.append(Page(browser, files[name], **options))
        return pages[-1]

    yield call
    for one in pages:
        # Whatever a test does: nothing is asked of a network, nothing is complained of.
        assert one.requests == [one.requests[0]]
        assert one.requests[0].startswith("file:")
        assert one.complaints == []
        one.close()


@pytest.mark.parametrize(
    "name", [*(one.parent.name for one in sorted(GOLDEN.glob("*/plan.json"))), "odd", "replicas", "contiguous"]
)
def test_the_page_says_of_a_rank_what_the_compiler_says(opened: Any, plans: dict[str, Plan], name: str) -> None:
    world = plans[name].world_size
    ranks = sorted({0, 1, 5, world // 3, world // 2, 2 * world // 3 + 1, world - 1} & set(range(world)))
    shown = opened(name).value(f"JSON.stringify({ranks}.map(window.parcompile.describe))")
    for rank, found in zip(ranks, json.loads(shown), strict=True):
        agrees(plans[name], rank, found)


def agrees(plan: Plan, rank: int, found: dict[str, Any]) -> None:
    spec, groups = plan.spec, plan.groups
    place = groups.grid.coordinates(rank)
    assert found["place"] == {axis: place[axis] for axis in ("tp", "cp", "dp", "pp")}
    assert found["node"] == rank // spec.cluster.gpus_per_node
    for one in found["groups"]:
        assert one["ranks"] == list(groups.of_rank(one["name"], rank)), one["name"]
    assert {one["name"] for one in found["groups"]} >= set(groups.names)
    ranges = token_ranges(spec.parallelism.cp_layout, spec.parallelism.cp, place["cp"], spec.training.sequence_length)
    assert found["tokens"] == {"ranges": [[one.start, one.stop] for one in ranges], "step": ranges[0].step}
    assert found["layers"] == [[one.layers.start, one.layers.stop] for one in spec.virtual_stages[place["pp"]]]
    index = groups.of_rank("dp-cp", rank).index(rank)
    shard = padded_shard(found["optimizer"]["numel"], spec.parallelism.zero_shards, index)
    assert (found["optimizer"]["start"], found["optimizer"]["stop"]) == (shard.start, shard.stop)
    # The slices are those of the plan, and together they are all that the rank holds.
    tensors, total = {row.name: pair for row, pair in plan.tensors().items()}, 0
    for row in found["slices"]:
        _, layout = tensors[row["name"]]
        pieces = None if layout.ranges is None else [list(piece) for piece in layout.ranges[place["tp"]]]
        assert (row["pieces"], row["shape"]) == (pieces, list(layout.local_shape))
        total += layout.local_numel * row["count"]
    experts = found["experts"]
    assert (experts is None) == (spec.parallelism.ep == 1)
    if experts is not None:
        ranks = groups.of_rank("expert-dp", rank)
        shard = padded_shard(experts["numel"], len(ranks), ranks.index(rank))
        assert (experts["start"], experts["stop"]) == (shard.start, shard.stop)
        total -= experts["numel"]
    assert total == found["optimizer"]["numel"]


def test_a_click_lights_a_rank_and_its_groups(opened: Any) -> None:
    shown = opened(SMALL)
    left, top = shown.value(f"[{GRID}.getBoundingClientRect().x, {GRID}.getBoundingClientRect().y]")
    x, y = shown.value("window.parcompile.corner(13)")
    shown.click(left + x + 5, top + y + 5)
    assert shown.value("window.parcompile.state.rank") == 13
    text = shown.value("document.getElementById('panel').textContent")
    for part in ("Rank 13", "node 1, GPU 5", "tp 1, cp 2, dp 1, pp 0", "9-15:2", "5-29:8", "[16,384, 24,576)"):
        assert part in text
    assert "Rank 13" in shown.value("document.getElementById('said').textContent")
    # Itself, tp, cp, dp and a rank that shares nothing with it: five colours.
    seen = {rank: colour_of(shown, rank) for rank in (13, 12, 9, 5, 0)}
    assert len(set(seen.values())) == 5
    buttons = "[...document.querySelectorAll('#panel .groups button')]"
    shown.value(f"{buttons}.find((one) => one.textContent.startsWith('dp-cp')).click()")
    assert colour_of(shown, 12) == seen[0]
    shown.value("document.getElementById('clear').click()")
    assert "No rank is picked" in shown.value("document.getElementById('panel').textContent")


def colour_of(shown: Page, rank: int) -> tuple[int, ...]:
    """The colour in the corner of a rank's cell."""
    found = shown.value(f"""(() => {{
        const copy = new OffscreenCanvas({GRID}.width, {GRID}.height).getContext("2d", {{ willReadFrequently: true }});
        copy.drawImage({GRID}, 0, 0);
        const [x, y] = window.parcompile.corner({rank});
        return [...copy.getImageData(x + 3, y + 3, 1, 1).data];
    }})()""")
    return tuple(found)


def test_the_page_works_by_keyboard(opened: Any) -> None:
    shown = opened(SMALL)
    reached = []
    for _ in range(24):
        shown.press("Tab")
        reached.append(shown.value("document.activeElement.id || document.activeElement.textContent"))
        if reached[-1] == "grid":
            break
    assert reached[0] == "Skip to the report"
    assert reached[-4:] == ["axis", "rank", "clear", "grid"]
    # What has the focus can be seen.
    assert shown.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    expected = {"ArrowRight": 0, "End": 7, "PageDown": 15, "Home": 8, "ArrowLeft": 7, "PageUp": 0}
    for key, rank in expected.items():
        shown.press(key)
        assert shown.value("window.parcompile.state.rank") == rank, key
    shown.press("Escape")
    assert shown.value("window.parcompile.state.rank") is None
    shown.value("document.getElementById('rank').focus()")
    shown.type("21")
    assert shown.value("window.parcompile.state.rank") == 21
    # Groups are buttons behind the grid.
    shown.value("document.querySelector('#panel .groups button').focus()")
    shown.press("Enter")
    assert shown.value("window.parcompile.state.group") == "tp"


@pytest.mark.parametrize("dark", [False, True])
def test_16384_ranks_are_shown_in_two_seconds(opened: Any, dark: bool) -> None:
    shown = opened(LARGE, dark=dark)
    assert shown.value("performance.getEntriesByName('drawn')[0].startTime") < 2000
    assert shown.value("document.getElementsByTagName('*').length") < 8000
    took = (
        "(() => { const start = performance.now(); window.parcompile.pick(9999); return performance.now() - start })()"
    )
    assert shown.value(took) < 500
    ground = shown.value("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(18, 23, 30)") is dark


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama-3-8b", {"tp": 2, "cp": 2, "pp": 2, "sequence_parallel": True}),
    "experts": ("mixtral-8x7b", {"tp": 2, "ep": 4, "pp": 2, "sequence_parallel": True}),
    "hybrid": ("qwen3-next-80b-a3b", {"tp": 2, "ep": 8, "sequence_parallel": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_of_each_kind_of_page_is_kept_for_people(kind: str, browser: Browser, tmp_path: Path) -> None:
    model, layout = KINDS[kind]
    tree = spec_tree(2, 8, parallelism=layout, training={"activation_checkpointing": "full"})
    tree["model"] = {"preset": model}
    file, folder = tmp_path / "page.html", Path(os.environ.get("SCREENSHOTS") or tmp_path)
    file.write_text(page(Subject.of(compile_tree(tree, tmp_path))), encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    for width in (1280, 390):
        shown = Page(browser, file, width=width)
        assert shown.value("document.documentElement.scrollWidth") <= width
        assert "`" not in shown.value("document.body.innerText")
        shown.picture(folder / f"{kind}-{width}.png")
        assert shown.complaints == []
        shown.close()


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", [LARGE, SMALL, "odd"])
def test_nothing_runs_over_the_edge(opened: Any, name: str, width: int) -> None:
    shown = opened(name, width=width)
    shown.value("window.parcompile.pick(5); document.querySelectorAll('details').forEach((one) => { one.open = true })")
    assert shown.value("document.documentElement.scrollWidth") <= width
    assert set(shown.value(f"{PICTURES}.map((one) => one.className)")) == {
        "picture wide" if width == 1280 else "picture narrow"
    }
    # Text of the pictures can be read, and stays inside them.
    sizes = shown.value(f"""{PICTURES}.flatMap((one) => {{
        const frame = one.getBoundingClientRect();
        const scale = frame.width / one.firstChild.viewBox.baseVal.width;
        return [...one.querySelectorAll('text')].map((text) => {{
            const box = text.getBoundingClientRect();
            const size = parseFloat(text.getAttribute('font-size')) * scale;
            return [size, box.right - frame.right, frame.left - box.left, text.textContent];
        }})
    }})""")
    for size, right, left, text in sizes:
        assert size >= 9.5, text
        assert max(right, left) <= 12, text


def test_what_a_spec_is_called_is_text(opened: Any) -> None:
    shown = opened("odd")
    name = '</script><img src=x onerror="alert(1)"> <!-- & "x"'
    assert shown.value("document.querySelector('h1').textContent") == name
    assert shown.value("document.querySelectorAll('img').length") == 0
    assert shown.value("document.title").startswith(name)


def test_values_are_narrowed_by_what_is_searched_for(opened: Any) -> None:
    shown = opened(SMALL)
    shown.value("document.getElementById('value-text').focus()")
    shown.type("parallelism.dp")
    visible = f"{ROWS}.filter((one) => !one.hidden).map((one) => one.textContent)"
    assert shown.value(visible) == ["parallelism.dp4derivedworld 32 / (tp 2 · cp 4 · pp 1)"]
    assert shown.value("document.getElementById('value-count').textContent").startswith("1 of ")


def test_it_prints_light_and_without_controls(opened: Any) -> None:
    shown = opened(SMALL, dark=True)
    shown.media("print", dark=True)
    assert shown.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert shown.value("getComputedStyle(document.querySelector('nav')).display") == "none"
    printed = shown.call("Page.printToPDF", printBackground=True)["data"]
    assert printed.startswith("JVBER")


def test_everything_on_the_page_has_a_name(opened: Any) -> None:
    shown = opened(SMALL)
    shown.value("window.parcompile.pick(3)")
    tree = shown.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "spinbutton", "combobox", "searchbox", "link", "application", "region", "image", "table"}
    unnamed = [
        one
        for one in tree
        if not one.get("ignored") and one["role"]["value"] in roles and not one.get("name", {}).get("value")
    ]
    assert not unnamed
    levels = shown.value("[...document.querySelectorAll('h1,h2,h3')].map((one) => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert shown.value("document.documentElement.lang") == "en"


def test_the_file_holds_all_that_it_needs(files: dict[str, Path]) -> None:
    for file in files.values():
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#)|@import|url\(|https?://", text.split("<nav")[0])
        assert "default-src 'none'" in text
    assert files[LARGE].stat().st_size < 700_000


def test_a_plan_alone_tells_the_remarks_of_its_spec(tmp_path: Path) -> None:
    plan = compile_tree(spec_tree(4, 8, model={"preset": "llama-3-8b"}, parallelism={"tp": 2, "cp": 4}), tmp_path)
    tree = json.loads((tmp_path / "spec.json").read_text(encoding="utf-8"))
    found = written(plan)
    assert {name: found[name] for name in tree if name != "parallelism"} == {
        name: value for name, value in tree.items() if name != "parallelism"
    }
    assert {"W005", "B005"} <= {one.code for one in remarks(plan)}


def test_what_a_search_rejected_is_shown_and_the_plan_is_marked() -> None:
    def layout(tp: int, reason: str | None) -> dict[str, Any]:
        return {
            "layout": {"tp": tp, "cp": 4, "sequence_parallel": True},
            "step_seconds": 1.5,
            "tokens_per_second_per_gpu": 1000.0,
            "peak_bytes": 2**30,
            "probability_to_fit": 0.9,
            "reason": reason,
        }

    tree = {
        "fitting": [layout(2, None), layout(4, "3.0% slower <b>")],
        "too_large": [layout(1, "memory: 90 of 74")],
        "refused": [{"layout": {"tp": 3, "micro_batch_size": 2}, "code": "T001", "message": "8 heads / 3 & more"}],
    }
    text = section(tree, {"tp": 2, "cp": 4, "sequence_parallel": True})
    assert text.count("(this plan)") == 1
    assert "tp 2 · cp 4, sequence parallel (this plan)" in text
    for part in (
        "3.0% slower &lt;b&gt;",
        "tp 3, micro 2",
        "memory: 90 of 74",
        "8 heads / 3 &amp; more",
        "T001: 1",
        "2 fit, 1 do not",
    ):
        assert part in text


def test_the_address_holds_the_picked_rank_and_the_axis(opened: Any) -> None:
    shown = opened(SMALL)
    assert shown.value("location.hash") == ""
    choose = "{ const axis = document.getElementById('axis'); axis.value = 'AXIS'; "
    choose += "axis.dispatchEvent(new Event('change')); }"
    first, *_, last = shown.value("[...document.getElementById('axis').options].map((one) => one.value)")
    shown.value("window.parcompile.pick(5)")
    assert shown.value("location.hash") == "#rank=5"
    shown.value(choose.replace("AXIS", last))
    shown.value("window.parcompile.pick(9)")
    assert shown.value("location.hash") == f"#rank=9&axis={last}"
    # Whoever follows the link sees the same.
    shown.value(choose.replace("AXIS", first))
    shown.value(f"{GO}('#rank=9&axis={last}')")
    assert shown.value("[window.parcompile.state.rank, window.parcompile.state.axis]") == [9, last]
    assert shown.value("document.getElementById('panel').textContent").startswith("Rank 9")


def test_a_wrong_address_picks_nothing(opened: Any) -> None:
    shown = opened(SMALL)
    for wrong in ("#rank=99999", "#rank=-1", "#rank=x&axis=zz", "#memory"):
        shown.value(f"{GO}('{wrong}')")
        assert shown.value("window.parcompile.state.rank") is None


def test_ranks_can_be_coloured_by_their_experts(opened: Any, plans: dict[str, Plan]) -> None:
    name = "mixtral-8x7b-64-gpus"
    groups, ep = plans[name].groups, plans[name].spec.parallelism.ep
    assert ep > 1
    shown = opened(name)
    assert "ep" in shown.value("[...document.getElementById('axis').options].map((one) => one.value)")
    axis = shown.value("JSON.parse(document.getElementById('plan').textContent).axes.ep")
    found = [(rank // axis["stride"]) % axis["size"] for rank in range(plans[name].world_size)]
    assert found == [groups.expert_grid.coordinates(rank)["ep"] for rank in range(plans[name].world_size)]


def test_two_plans_stand_beside_each_other(tmp_path: Path, browser: Browser, plans: dict[str, Plan]) -> None:
    first, second = plans[SMALL], plans["qwen3-8b-16-gpus"]
    file = tmp_path / "both.html"
    file.write_text(page(Subject.of(first), other=Subject.of(second)), encoding="utf-8")
    for width in (1280, 400):
        shown = Page(browser, file, width=width)
        text = shown.value("document.getElementById('beside').textContent")
        assert first.spec.name in text
        assert second.spec.name in text
        assert f"{first.world_size:,}{second.world_size:,}" in text
        assert shown.value("document.documentElement.scrollWidth") <= width
        assert shown.value("document.querySelectorAll('#beside figure').length") == 4
        assert shown.complaints == []
        shown.close()


def test_fixes_and_the_commands_of_the_launch_stand_on_the_page(plans: dict[str, Plan]) -> None:
    fix = Fix("set tp to 2", Safety.CHANGES_COST, ())
    one = Diagnostic("T001", Severity.ERROR, "tp is wrong", ("parallelism", "tp"), help="write 2", fixes=(fix,))
    text = page(Subject.of(plans[SMALL]), [one])
    assert "Fix: set tp to 2 (changes cost)" in text
    for command in ("plan/launch/deepspeed.sh", "plan/launch/torchrun.sh", "sbatch plan/launch/slurm.sbatch"):
        assert f"{command} train.py --plan plan" in text
