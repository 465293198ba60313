import json

import pytest
from click.testing import CliRunner
from layout_cases import AXES, compile_tree, enumerated, orders, spec_tree

from parcompile.backends.artefacts import to_text
from parcompile.cli.showing import groups_command as command
from parcompile.layout.groups import NETWORK, NODE, Grid, Groups, Reach, expert_grid, reach
from parcompile.plan import plan_tree


@pytest.mark.parametrize(
    "order", [("tp", "cp", "ep", "dp", "pp"), ("tp", "ep", "dp", "pp", "cp"), ("ep", "tp", "cp", "pp", "dp")]
)
@pytest.mark.parametrize(("ep", "expert_tp"), [(1, 4), (2, 4), (4, 2), (8, 1)])
def test_the_expert_grid_is_megatrons_second_grid(order, ep, expert_tp) -> None:
    dense = Grid.of(order, {"tp": 4, "cp": 2, "dp": 4, "pp": 2})
    grid = expert_grid(dense, ep, expert_tp)
    expert_dp = 64 // (expert_tp * ep * 2)
    sizes = {"tp": expert_tp, "cp": 1, "ep": ep, "dp": expert_dp, "pp": 2}
    for axes in (("ep",), ("tp",), ("dp",), ("tp", "ep"), ("tp", "ep", "pp"), ("pp",)):
        assert [list(group) for group in grid.groups(axes)] == enumerated(order, sizes, axes).tolist()
    if order[-1] == "pp":
        assert list(grid.groups(("pp",))) == list(dense.groups(("pp",)))


def test_an_expert_grid_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="expert-tp 2 · ep 3 · pp 1 = 6 does not divide the world of 8 ranks"):
        expert_grid(Grid.of(AXES, {"tp": 2, "dp": 4}), 3)


def test_embedding_groups_are_the_ends_of_the_pipeline() -> None:
    groups = Groups(Grid.of(AXES, {"tp": 2, "pp": 4}))
    assert list(groups.all("embedding")) == [(0, 6), (1, 7)]
    assert list(groups.all("position-embedding")) == [(0,), (1,)]
    assert groups.of_rank("embedding", 7) == (1, 7)
    assert groups.of_rank("embedding", 2) == ()
    assert groups.of_rank("position-embedding", 6) == ()
    one_stage = Groups(Grid.of(AXES, {"tp": 2}))
    assert list(one_stage.all("embedding")) == [(0,), (1,)]


def test_the_runtime_creates_the_same_groups_in_the_same_order_on_every_rank() -> None:
    assert Groups(Grid.of(AXES, {"tp": 4})).names == ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp")
    assert Groups(Grid.of(AXES, {"tp": 4}), kv_replicas=2).names[-1] == "kv-replica"


def test_reach_equals_counting_nodes_and_rails_group_by_group() -> None:
    checked = 0
    for order in orders():
        for sizes in ((2, 2, 2, 3), (3, 2, 4, 1), (4, 3, 1, 2), (1, 6, 2, 2), (8, 1, 3, 1)):
            grid = Grid.of(order, dict(zip(AXES, sizes, strict=True)))
            groups = Groups(grid, ep=2 if grid.size(("cp", "dp")) % 2 == 0 else 1)
            for per_node in (1, 2, 4, 5, 6, 8, 10, 12, 24):
                for name in groups.all_names:
                    members = list(groups.all(name))
                    nodes = [len({rank // per_node for rank in group}) for group in members]
                    rails = [len({rank % per_node for rank in group}) for group in members]
                    expected = Reach(
                        count=len(members),
                        leaving_node=sum(number > 1 for number in nodes),
                        nodes=(min(nodes), max(nodes)),
                        rails=(min(rails), max(rails)),
                    )
                    assert reach(groups.family(name), per_node) == expected, (grid, name, per_node)
                    checked += 1
    assert checked > 5000


def test_reach_of_a_million_ranks_needs_no_enumeration() -> None:
    groups = Groups(Grid.of(("tp", "cp", "dp", "pp"), {"tp": 8, "cp": 16, "dp": 512, "pp": 16}))
    assert reach(groups.family("tp"), 8) == Reach(131_072, 0, (1, 1), (8, 8))
    assert reach(groups.family("tp"), 8).slowest_link == NODE
    assert reach(groups.family("cp"), 8) == Reach(65_536, 65_536, (16, 16), (1, 1))
    assert reach(groups.family("dp-cp"), 8) == Reach(128, 128, (8192, 8192), (1, 1))
    assert reach(groups.family("dp-cp"), 8).slowest_link == NETWORK
    # Nodes of 100 ranks, with strides that none of them divides.
    odd = Groups(Grid.of(("dp", "tp", "cp", "pp"), {"dp": 93_750, "tp": 8, "cp": 4, "pp": 2}))
    assert reach(odd.family("dp"), 100) == Reach(64, 64, (938, 938), (100, 100))
    assert reach(odd.family("tp-pp"), 100) == Reach(375_000, 375_000, (16, 16), (2, 2))


def test_the_plan_names_orders_that_send_less_between_nodes(tmp_path) -> None:
    parallelism = {"tp": 4, "cp": 2, "order": "dp-cp-tp-pp"}
    topology = plan_tree(compile_tree(spec_tree(2, 8, parallelism=parallelism), tmp_path))["topology"]
    assert topology["families"]["tp"]["groups_leaving_node"] == 4
    best = topology["other_orders"][0]
    assert best["order"].startswith(("tp-cp-dp", "cp-tp-dp"))
    assert best["bytes_leaving_node"] < topology["bytes_leaving_node"]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    compiled = compile_tree(spec_tree(2, 8, parallelism={"tp": 8, "cp": 2}), folder)
    (folder / "plan.json").write_text(to_text(plan_tree(compiled)), encoding="utf-8")
    return folder


class TestCommand:
    def run(self, *arguments):
        return CliRunner().invoke(command, [str(argument) for argument in arguments])

    def test_it_prints_the_coordinates_and_groups_of_a_rank(self, plan) -> None:
        found = json.loads(self.run(plan, "--rank", 9, "--format", "json").output)
        assert found["rank"] == 9
        assert found["coordinates"] == {"tp": 1, "cp": 1, "dp": 0, "pp": 0}
        assert found["groups"]["tp"] == {"ranks": [8, 9, 10, 11, 12, 13, 14, 15], "nodes": [1]}
        assert found["groups"]["cp"] == {"ranks": [1, 9], "nodes": [0, 1]}
        assert found["groups"]["dp-cp"] == {"ranks": [1, 9], "nodes": [0, 1]}
        assert found["groups"]["kv-replica"] == {"ranks": [8, 9], "nodes": [1]}
        assert set(found["groups"]) == {"tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "kv-replica"}

    def test_without_options_it_is_a_table_of_rank_0(self, plan) -> None:
        assert self.run(plan).output.startswith("rank 0: tp 0, cp 0, dp 0, pp 0\ngroup")

    def test_it_takes_a_spec_too_and_a_plan_of_any_name(self, plan) -> None:
        (plan / "spec.json").write_text(json.dumps(spec_tree(2, 8, parallelism={"tp": 8, "cp": 2})), encoding="utf-8")
        (plan / "renamed.json").write_text((plan / "plan.json").read_text(encoding="utf-8"), encoding="utf-8")
        found = self.run(plan, "--rank", 9).output
        assert self.run(plan / "spec.json", "--rank", 9).output == self.run(plan / "renamed.json", "--rank", 9).output
        assert self.run(plan / "spec.json", "--rank", 9).output == found

    def test_it_shows_one_group_when_asked(self, plan) -> None:
        assert list(json.loads(self.run(plan, "--rank", 3, "--axis", "tp", "--format", "json").output)["groups"]) == [
            "tp"
        ]
        both = json.loads(
            self.run(plan, "--rank", 3, "--axis", "cp-dp", "--axis", "embedding", "--format", "json").output
        )["groups"]
        assert both == {
            "dp-cp": {"ranks": [3, 11], "nodes": [0, 1]},
            "embedding": {"ranks": [3], "nodes": [0]},
        }

    def test_csv_has_one_line_for_each_member(self, plan) -> None:
        lines = self.run(plan, "--rank", 9, "--axis", "cp", "--format", "csv").output.splitlines()
        assert lines == ["rank,group,index,member,node", "9,cp,0,1,0", "9,cp,1,9,1"]

    def test_the_table_shows_runs_of_ranks(self, plan) -> None:
        text = self.run(plan, "--rank", 9, "--table").output
        assert "rank 9: tp 1, cp 1, dp 0, pp 0" in text
        assert "8-15" in text

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--rank", 16), "rank 16 is not in a world of 16: it needs 0 ≤ rank < 16"),
            (("--rank", 0, "--axis", "zp"), "there is no group 'zp'; there are tp, cp"),
        ],
    )
    def test_what_does_not_exist_is_an_error(self, plan, arguments, message) -> None:
        result = self.run(plan, *arguments)
        assert result.exit_code != 0
        assert message in result.output


def test_whole_experts_are_dealt_over_the_ranks_of_tp_too() -> None:
    groups = Groups(Grid.of(("tp", "cp", "ep", "dp", "pp"), {"tp": 2, "dp": 4}), ep=4, expert_tp=1)
    assert groups.of_rank("ep", 5) == (4, 5, 6, 7)
    assert groups.of_rank("expert-dp", 5) == (1, 5)
    assert groups.of_rank("expert-tp", 5) == (5,)
