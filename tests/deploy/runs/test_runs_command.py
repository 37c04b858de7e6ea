"""`trackway runs`: a run is found in its files or at its service, and shown with its reward over the steps."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from trackway.deploy.cli import app
from trackway.deploy.commands.why import reasons
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs.found import find_run
from trackway.deploy.terminal.progress import sparkline
from trackway.run_config import RunConfig
from trackway.system.process import UserError
from trackway.trainer.run_state.checkpoint import save_checkpoint
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.errors import TrackwayError
from trackway.wire.service import Wait
from trackway.wire.trainer import MetricsRow, RunInfo, RunState, TraceSummary

URLS = ServiceUrls(agent_url="http://127.0.0.1:9", tools_url="", reward_url="", weights_url="file:///nowhere")


def make_run(path: Path, rewards: list[float], *states: RunState) -> RunFolder:
    folder = RunFolder(path)
    folder.create(RunConfig(), URLS, total_steps=4)
    for state in states:
        folder.move(state)
    for step, reward in enumerate(rewards, start=1):
        folder.append_row(MetricsRow(step=step, data={"critic/score/mean": reward}))
        folder.update(step=step, metrics={"critic/score/mean": reward})
    return folder


def trackway(*words: str) -> str:
    result = CliRunner().invoke(app, ["runs", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    make_run(tmp_path / "old", [0.0, 0.5, 1.0, 0.25], RunState.RUNNING, RunState.FINISHED)
    make_run(tmp_path / "demo" / "inner", [0.5], RunState.RUNNING)
    return tmp_path


def test_runs_are_listed_with_those_of_the_folders_in_it(outputs: Path) -> None:
    lines = [line.split() for line in trackway("list", "--outputs", str(outputs)).splitlines() if line.strip()]

    inner, old = lines[1:]
    state = ["running", "when", "last", "written"]
    assert inner == ["inner", *state, "1/4", "▁", "reward", "0.50", f"{outputs}/demo"]
    assert old == ["old", "finished", "4/4", "▁▅█▃", "reward", "0.25", str(outputs)]


def test_a_run_is_shown_with_the_policy_that_it_trains(outputs: Path) -> None:
    make_run(outputs / "other", [0.5], RunState.RUNNING).update(policy="other")
    shown = {
        name: [line.split() for line in trackway("show", name, "--outputs", str(outputs)).splitlines()]
        for name in ("other", "inner")
    }

    assert ["policy", "other"] in shown["other"]
    assert ["policy", "the", "default", "one"] in shown["inner"]


def test_the_newest_run_is_taken_unless_one_is_named(outputs: Path, tmp_path: Path) -> None:
    assert find_run(outputs, None).folder.path == outputs / "demo" / "inner"
    (outputs / "demo" / "inner" / "evaluation.json").write_text("{}")
    assert find_run(outputs, None).folder.path == outputs / "old"
    assert find_run(outputs, "inner").folder.path == outputs / "demo" / "inner"
    assert find_run(outputs, "old").folder.path == outputs / "old"
    with pytest.raises(UserError, match=r"expected a run in .*/nowhere, found none; start one with"):
        find_run(tmp_path / "nowhere", None)


def test_json_has_every_run_whole(outputs: Path) -> None:
    listed = json.loads(trackway("list", "--json", "--outputs", str(outputs)))

    assert {run["run"]: (run["state"], run["outputs"]) for run in listed} == {
        "inner": ("running", f"{outputs}/demo"),
        "old": ("finished", str(outputs)),
    }
    assert json.loads(trackway("show", "old", "--json", "--outputs", str(outputs)))["step"] == 4


def test_a_run_is_shown_with_the_command_that_lists_its_traces(outputs: Path) -> None:
    RunFolder(outputs / "old").update(traces=TraceSummary(trajectories=1))

    shown = " ".join(trackway("show", "old", "--outputs", str(outputs)).split())

    assert f"traces trackway traces list --run old --outputs {outputs}" in shown


def test_a_run_is_shown_with_its_newest_metrics(outputs: Path) -> None:
    shown = " ".join(trackway("show", "old", "--outputs", str(outputs)).split())

    assert "state finished step 4 of 4 progress ▁▅█▃ reward 0.25" in shown
    assert "metrics of step 4 metric value critic/score/mean 0.25" in shown


def test_a_run_is_shown_with_where_its_rollouts_are(outputs: Path) -> None:
    account = {"submitted": 24, "used": 20, "dropped_failed": 0, "dropped_infrastructure": 1, "finished": 3}
    RunFolder(outputs / "old").update(rollout_states=account, metrics={"training/rollout_retries": 2.0})

    shown = " ".join(trackway("show", "old", "--outputs", str(outputs)).split())

    assert "24 rollouts submitted: 20 used, 1 dropped infrastructure, 3 finished; 2 were requested again" in shown


def test_a_run_is_shown_with_how_long_each_side_waited(outputs: Path) -> None:
    assert " idle " not in trackway("show", "old", "--outputs", str(outputs))
    ahead = {"fully_async/rollouter/version_time": 9.5, "fully_async/rollouter/active_time": 7.0}
    for step in (5, 6):
        timings = {"timing_s/step": 10.0, "timing_s/gen": 4.0, **ahead}
        RunFolder(outputs / "old").append_row(MetricsRow(step=step, data=timings))

    shown = " ".join(trackway("show", "old", "--outputs", str(outputs)).split())

    waited = "in 20 s of steps the learner waited 8 s for rollouts (40%), and for 5 s (25%) no rollout was requested"
    assert f"idle {waited}" in shown


def test_a_supervised_run_is_shown_with_its_losses_and_no_policy(outputs: Path) -> None:
    folder = make_run(outputs / "taught", [], RunState.RUNNING)
    for step, loss in enumerate((2.0, 0.5), start=1):
        losses = {"train/loss": loss, "val/loss": 0.75, "timing_s/step": 3.0}
        folder.append_row(MetricsRow(step=step, data=losses))
        folder.update(step=step, metrics=losses)

    shown = trackway("show", "taught", "--outputs", str(outputs))

    assert " █▁  loss 0.5000  validation loss 0.7500" in shown
    assert "policy" not in shown and "idle" not in shown


def test_why_prints_each_wait_below_the_one_that_it_causes() -> None:
    groups = [
        Wait(who="group 5/17", waits_for="the agent service", since=60_000, until=1_860_000, progress="3 of 4 [ended]"),
        Wait(who="group 5/18", waits_for="the agent service", since=61_000, until=1_861_000),
    ]
    waits = [Wait(who="the run", waits_for="the rollouts of step 5", since=59_000, because=groups)]
    info = RunInfo(run="a", state=RunState.RUNNING, step=4, total_steps=9, message="its disk is full", waits=waits)

    assert list(reasons(info, 101.0)) == [
        "run a is running, after step 4 of 9: its disk is full",
        "  the run waits for the rollouts of step 5, 42 s",
        "    group 5/17 waits for the agent service, 41 s of 1800 s: 3 of 4 [ended]",
        "    group 5/18 waits for the agent service, 40 s of 1800 s",
    ]


@pytest.mark.parametrize("state", [RunState.STARTING, RunState.RESTARTING])
def test_why_says_that_a_run_is_starting(state: RunState) -> None:
    info = RunInfo(run="a", state=state, total_steps=9)

    assert list(reasons(info, 101.0)) == [
        f"run a is {state}, after step 0 of 9",
        "  its process is starting; imports alone take seconds",
    ]


def test_why_says_where_a_run_stands_that_waits_for_nothing(outputs: Path) -> None:
    def why(name: str, *words: str) -> str:
        result = CliRunner().invoke(app, ["why", name, *words, "--outputs", str(outputs)], catch_exceptions=False)
        return result.stdout

    assert why("old") == "run old is finished, after step 4 of 4\n"
    assert why("inner").splitlines() == [
        "run inner is running, after step 1 of 4",
        "  it waits for nothing; a wait is shown after two seconds",
    ]
    RunFolder(outputs / "demo" / "inner").update(policy="inner")
    assert why("inner").startswith("run inner (policy inner) is running, ")
    assert json.loads(why("old", "--json")) == {
        "run": "old",
        "policy": None,
        "state": "finished",
        "step": 4,
        "message": "",
        "waits": [],
    }


def test_the_end_of_a_log_is_printed_and_followed_until_the_run_has_ended(outputs: Path) -> None:
    log = outputs / "old" / "worker.log"
    log.write_text("first\nsecond\nthird \x1b[31mred\n")

    assert trackway("logs", "old", "-n", "2", "--outputs", str(outputs)) == "second\nthird \\x1b[31mred\n"
    assert trackway("logs", "old", "-n", "0", "--follow", "--outputs", str(outputs)).startswith("first\nsecond\n")
    for follow in ([], ["--follow"]):
        document = json.loads(trackway("logs", "old", "-n", "2", "--json", *follow, "--outputs", str(outputs)))
        assert document == {"log": str(log), "lines": ["second", "third \x1b[31mred"]}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["show", "nope"], "expected a run of {outputs} (inner, old), got 'nope'"),
        (["logs", "old"], "run old: expected a log at {outputs}/old/worker.log, got none"),
    ],
)
def test_what_is_not_there_is_named(words: list[str], expected: str, outputs: Path) -> None:
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(app, ["runs", *words, "--outputs", str(outputs)], catch_exceptions=False)
    assert str(caught.value).startswith(expected.format(outputs=outputs))


def test_two_runs_of_one_name_are_told_apart_by_their_folder(outputs: Path) -> None:
    make_run(outputs / "demo" / "old", [], RunState.RUNNING)

    with pytest.raises(UserError, match=r"expected one run 'old', got one in each of .*; give --outputs"):
        trackway("show", "old", "--outputs", str(outputs))
    assert "running when last written" in trackway("show", "old", "--outputs", str(outputs / "demo"))


def test_an_empty_folder_has_no_runs_and_says_how_to_start_one(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["runs", "list", "--outputs", str(tmp_path)])

    assert (result.exit_code, result.stdout) == (0, "")
    assert "start one with `trackway demo` or `trackway train`" in " ".join(result.stderr.split())


@pytest.mark.slow  # five real services
def test_runs_of_attached_services_are_asked_for_and_their_log_is_elsewhere(
    there: Deployment, folder: RunFolder
) -> None:
    folder.append_row(MetricsRow(step=1, data={"critic/score/mean": 0.5}))

    listed = trackway("list", "--outputs", str(there.outputs)).split()
    assert listed[listed.index(folder.name) : listed.index(folder.name) + 4] == [folder.name, "starting", "0", "▁"]
    with pytest.raises(UserError, match="expected a log on this machine, got a run of attached services"):
        trackway("logs", folder.name, "--outputs", str(there.outputs))


def test_a_sparkline_has_the_newest_values_between_the_least_and_the_greatest() -> None:
    assert sparkline([9.0, 0.0, 1.0, 2.0, float("nan"), 7.0], width=4) == "▁▂▃█"
    assert (sparkline([]), sparkline([0.5, 0.5])) == ("", "▁▁")


def test_a_checkpoint_is_exported_by_the_runs_name(outputs: Path, tmp_path: Path) -> None:
    def write(actor: Path) -> None:
        (actor / "huggingface").mkdir(parents=True)
        (actor / "huggingface/config.json").write_text("{}")

    def export(*words: str) -> Result:
        return CliRunner().invoke(app, ["export", *words, "--outputs", str(outputs)])

    save_checkpoint(outputs / "old/checkpoints", 3, write, {})
    told = export("old", str(tmp_path / "model"))
    assert told.exit_code == 0
    assert told.stdout.endswith(f"global_step_3 is now the model {tmp_path}/model, which transformers loads\n")
    assert (tmp_path / "model/config.json").read_text() == "{}"
    assert json.loads(export("old", str(tmp_path / "json"), "--step", "3", "--json").stdout)["files"] == ["config.json"]
    with pytest.raises(TrackwayError, match="expected a checkpoint of inner, got none"):
        CliRunner().invoke(app, ["export", "inner", "x", "--outputs", str(outputs)], catch_exceptions=False)
