"""`trackway traces` against a real MLflow server, with spans as the services export them."""

import json
from pathlib import Path

import pytest
from exported import EXPERIMENT, Services, World, tags
from typer.testing import CliRunner

from trackway import traces
from trackway.deploy.commands.traces import app
from trackway.deploy.runs import demo
from trackway.traces import rules
from trackway.traces.store import TraceFilter

pytestmark = pytest.mark.slow


def trackway(world: World, *words: str, status: int = 0) -> str:
    """What `trackway traces` prints."""
    where = ["--outputs", str(world.outputs), "--mlflow-uri", world.uri, "--project", EXPERIMENT]
    done = CliRunner().invoke(app, [*words, *where])
    assert done.exit_code == status, (done.output, done.exception)
    return done.stdout


def listed(world: World, *words: str) -> list[str]:
    """Ids of the traces that a list has, in its order."""
    return [row["trace_id"] for row in json.loads(trackway(world, "list", *words, "--json"))]


@pytest.fixture(scope="module")
def world(mlflow_server: str, tmp_path_factory: pytest.TempPathFactory) -> World:
    """One run whose traces are whole, one whose traces have gaps."""
    world = World(mlflow_server, tmp_path_factory.mktemp("outputs"))
    services = Services(mlflow_server, world.experiment_id)
    world.add("s1n0", services.trajectory(tags(1)))
    world.add("s1n1", services.trajectory(tags(1, rollout_n=1), reward=0.0))
    world.add("s2n0", services.trajectory(tags(2, sample_index=8), reward=0.5, stumbles=True))
    world.add("s10n0", services.trajectory(tags(10), reward=-1.0, fail=True))
    world.add("val", services.trajectory(tags(2, validate=True)))
    world.add("rootless", services.trajectory(tags(3, run="gaps"), loses="agent"))
    world.add("chatless", services.trajectory(tags(3, rollout_n=1, run="gaps"), loses="rollout"))
    world.add("mistagged", services.trajectory(tags(3, rollout_n=2, run="gaps")))
    world.made["mistagged"].tags.step = 4
    world.add("absent", world.made["s1n0"].model_copy(update={"trace_id": "f" * 32, "tags": tags(3, run="gaps")}))
    services.train_step(1, [(world.made["s1n0"].trace_id or "", "ab" * 8)])
    for one in services.all.values():
        assert one.shutdown(30)
    world.wait_for_roots(7)
    world.say("s1n0", "reward", 0.25)
    world.say("s1n0", "reward", 0.75)  # the newest counts
    world.say("s1n1", "fate", "used")
    world.dump("whole", 1, "s1n1", untraced=2)
    world.dump("whole", 2, "s2n0")
    world.dump("whole", 10, "s10n0")
    world.dump("gaps", 3, "rootless", "chatless", "mistagged", "absent")
    return world


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["s1n0", "s1n1", "s2n0", "s10n0", "val", "chatless", "mistagged"]),
        (["--step", "1"], ["s1n0", "s1n1"]),
        (["--step", "1-2", "--train"], ["s1n0", "s1n1", "s2n0"]),
        (["--step", "3-"], ["s10n0", "chatless", "mistagged"]),
        (["--step", "3-", "--experiment-name", "whole"], ["s10n0"]),
        (["--step", "2-200", "--validate"], ["val"]),
        (["--sample-index", "8"], ["s2n0"]),
        (["--rollout-n", "1"], ["s1n1", "chatless"]),
        (["--outcome", "tool_failed"], ["s2n0"]),
        (["--outcome", "error:*"], ["s10n0"]),
        (["--tag", "incidents=*failed*"], ["s2n0"]),
        (["--tag", "rollout_n=1", "--tag", "experiment_name=gaps"], ["chatless"]),
        (["--reward-max", "0.5", "--experiment-name", "whole"], ["s1n1", "s2n0", "s10n0"]),
        (["--reward-min", "0.6", "--reward-max", "0.9"], ["s1n0"]),
        (["--step", "99"], []),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_list_has_exactly_the_trajectories_that_match(world: World, words: list[str], names: list[str]) -> None:
    assert set(listed(world, *words)) == world.ids(*names)


def test_steps_of_the_trainer_are_listed_apart(world: World) -> None:
    [row] = json.loads(trackway(world, "list", "--kind", "step", "--json"))
    assert (row["name"], row["tags"]["train_step"], row["turns"]) == ("train step 1", "1", 0)
    assert listed(world, "--kind", "step", "--step", "2") == []
    [tree] = traces.MlflowStore.open(world.uri, EXPERIMENT).search(TraceFilter(traces.TraceKind.STEP))
    [update] = tree.of_kind("optimizer_step")
    assert [link.trace_id for link in update.links] == [world.made["s1n0"].trace_id]


def test_a_list_is_sorted_and_cut(world: World) -> None:
    order = listed(world, "--sort", "-reward", "--limit", "3", "--experiment-name", "whole")
    assert order == [f"tr-{world.made[name].trace_id}" for name in ("val", "s1n0", "s2n0")]
    shown = trackway(world, "list", "--step", "1", "--sort", "name", "--limit", "1", "--width", "160")
    [header, first, count] = [line.split() for line in shown.splitlines()]
    assert header[:4] == ["trace", "name", "step", "sample"]
    assert first == [
        *[f"tr-{world.made['s1n0'].trace_id}", "s1/i7/n0", "1", "7", "0", "ok", "0.75", "2", "30+20"],
        *[first[9], "so", "[the", "answer]", "is⏎####", "54"],
    ]
    assert " ".join(count) == "1 traces (more exist: raise --limit)"


def test_a_trace_is_shown_by_its_name_its_id_and_the_beginning_of_its_id(world: World) -> None:
    trace_id = world.made["s1n1"].trace_id or ""
    by_name = trackway(world, "show", "s1/i7/n1")
    assert by_name == trackway(world, "show", f"tr-{trace_id}") == trackway(world, "show", trace_id[:12])
    for line in (
        "reward       0",
        "fate         used",
        "weights      1",
        "event  retry",
        "#### 54",
        "so [the answer] is",
    ):
        assert line in by_name
    assert '{"name": "calculator", "arguments": {"expression": "6*9"}}' in by_name
    plain = json.loads(trackway(world, "show", "s1/i7/n1", "--json"))
    assert (plain["feedback"], plain["state"], plain["roots"][0]["name"]) == ({"fate": "used"}, "OK", "trajectory")


def test_a_failed_trajectory_is_shown_with_its_error(world: World) -> None:
    shown = trackway(world, "show", "s10/i7/n0")
    assert shown.startswith("s10/i7/n0  ERROR") and "error     the engine is gone" in shown


def test_two_steps_of_a_sample_are_compared_on_the_terminal_and_as_a_page(world: World, tmp_path: Path) -> None:
    words = ["compare", "--sample-index", "7", "--steps", "1,10"]
    lines = [" ".join(line.split()) for line in trackway(world, *words).splitlines()]
    assert {"≠ reward 0.75 -1", "≠ outcome ok error:engine_failed", "≠ weights 1 10"} <= set(lines)
    assert lines[-1] == "all 2 turns are the same"
    page = tmp_path / "compare.html"
    assert trackway(world, *words, "--html", str(page)).strip() == str(page)
    assert "#### 54" in page.read_text() and "&lt;tool_call&gt;" in page.read_text()


def test_two_rollouts_of_a_group_are_compared(world: World) -> None:
    found = json.loads(trackway(world, "compare", "--step", "1", "--sample-index", "7", "--rollouts", "0,1", "--json"))
    assert [found[side]["trace_id"] for side in ("left", "right")] == [
        f"tr-{world.made[name].trace_id}" for name in ("s1n0", "s1n1")
    ]


def test_a_whole_run_verifies_with_status_0(world: World) -> None:
    found = json.loads(trackway(world, "verify", "--run", "whole", "--wait", "0", "--json"))
    assert found == {
        "run": "whole",
        "dumps": 3,
        "trajectories": 5,
        "traced": 3,
        "complete": 3,
        "gaps": [],
        "waiting": {"files": 0, "bytes": 0},
    }
    shown = trackway(world, "verify", "--run", "whole", "--step", "2", "--wait", "0")
    assert shown == "run whole: 1 of 1 traced trajectories are whole trees (1 trajectories in 1 files)\n"


def test_each_planted_gap_is_found_with_its_reason_and_status_1(world: World) -> None:
    found = json.loads(trackway(world, "verify", "--run", "gaps", "--step", "3", "--wait", "0", "--json", status=1))
    reasons = {gap["trace_id"]: gap["reasons"] for gap in found["gaps"]}
    assert (found["traced"], found["complete"]) == (4, 0)
    assert reasons == {
        world.made["rootless"].trace_id: [
            "the root is missing",
            "turn 0 has lost its parent",
            "turn 1 has lost its parent",
            "reward has lost its parent",
        ],
        world.made["chatless"].trace_id: ["1 of 2 chat spans: none below turn 0"],
        world.made["mistagged"].trace_id: ["tag step is '3', expected '4'"],
        "f" * 32: ["the trace is absent"],
    }
    shown = trackway(world, "verify", "--run", "gaps", "--wait", "0", status=1)
    assert "run gaps: 0 of 4 traced trajectories are whole trees" in shown and "the trace is absent" in shown


def test_a_reward_that_differs_from_the_dumps_is_a_gap(world: World) -> None:
    [tree] = traces.MlflowStore.open(world.uri, EXPERIMENT).get([world.made["s1n0"].trace_id or ""]).values()
    assert rules.gaps(tree, world.made["s1n0"]) == ["the reward is 0.75 in the feedback, 1 in the dump"]


def test_the_demo_counts_whole_trees(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TRACES_DEADLINE_S", 0.0)
    made = [world.made[name] for name in ("s1n1", "s2n0", "chatless")]
    # One process plays all services here, which the demo's five never do.
    assert demo.count_complete(world.uri, world.experiment_id, made) == 0
    monkeypatch.setattr(rules, "shared_processes", lambda tree: [])
    assert demo.count_complete(world.uri, world.experiment_id, made) == 2


def test_mlflows_own_objects_can_be_checked_by_their_turns(world: World) -> None:
    by_tag = traces.search(world.uri, [world.experiment_id], traces.tag_filter(step=1, rollout_n=1))
    [trace] = by_tag
    assert traces.missing_parts(trace, world.made["s1n1"].turns)[:-1] == []
    assert "served two services" in traces.missing_parts(trace, world.made["s1n1"].turns)[-1]
    assert traces.missing_parts(trace, world.made["s1n1"].turns[:1])[0] == "2 turn spans, expected 1"
