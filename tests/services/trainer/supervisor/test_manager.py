"""The supervisor with real worker processes, a scripted agent over a socket, and a random tiny model."""

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.services.rollout.idle_engine import IdleEngine
from tests.services.trainer.real_runs import STEPS, ended, held_at, pid_of, run_request, standing_by, urls
from tests.serving import served_in_thread
from tests.waiting import async_until
from trackway.clients.weights import WeightStore
from trackway.rollout.app import create_app
from trackway.rollout.settings import RolloutSettings
from trackway.run_config import compose
from trackway.tracing import Tracing, TracingSettings
from trackway.trainer.run_state.checkpoint import LATEST
from trackway.trainer.run_state.folder import Owner, RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories
from trackway.trainer.supervisor.manager import RunManager
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import MetricsRow, RunInfo, RunRequest, RunState
from trackway.wire.weights import policy_url

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("shared_http")]


class Baseline(NamedTuple):
    """A run that nobody disturbed."""

    started: RunInfo
    ended: RunInfo
    rows: list[MetricsRow]
    weights: str


@pytest.fixture(scope="module")
def baseline(tiny_model: Path, sample, serving, new_agent, tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    folder = tmp_path_factory.mktemp("baseline")

    async def train(url: str) -> Baseline:
        runs = RunManager(folder / "outputs", urls(url, folder))
        request = run_request(tiny_model, folder, sample, "configured-name")
        started = await runs.start(request.model_copy(update={"run": "plain"}))
        info = await ended(runs, "plain")
        rows = [row async for row in runs.registry.rows("plain", follow=False)]
        await runs.close()
        return Baseline(started, info, rows, urls(url, folder).weights_url)

    with serving(new_agent().app()) as url:
        return asyncio.run(train(url))


@pytest.fixture
def request_of(tiny_model: Path, sample, tmp_path: Path) -> Callable[..., RunRequest]:
    return functools.partial(run_request, tiny_model, tmp_path, sample)


@pytest.fixture
async def runs(agent_url: str, agent, tmp_path: Path) -> AsyncIterator[RunManager]:
    runs = RunManager(tmp_path / "outputs", urls(agent_url, tmp_path), stop_deadline_s=60)
    yield runs
    agent.released.set()
    await runs.close()


async def rows_of(runs: RunManager, name: str) -> list[MetricsRow]:
    return [row async for row in runs.registry.rows(name, follow=False)]


def learned(rows: list[MetricsRow]) -> list[tuple[int, dict[str, float]]]:
    """Every row without what depends on the clock."""
    return [(row.step, {key: value for key, value in row.data.items() if not timed(key)}) for row in rows]


def timed(key: str) -> bool:
    return key.startswith(
        ("timing_", "fully_async/", "perf/time", "perf/throughput", "perf/max_memory", "perf/cpu_memory")
    )


async def test_a_run_trains_validates_publishes_and_writes_everything_down(baseline: Baseline):
    info, rows = baseline.ended, baseline.rows
    latest = WeightStore(baseline.weights).latest()
    trained = read_trajectories(Path(info.folder) / "trajectories" / "step_3.parquet")

    assert baseline.started.state is RunState.STARTING
    assert (info.run, RunFolder(Path(info.folder)).config().trainer.experiment_name) == ("plain", "plain")
    assert (info.state, info.step, info.total_steps) == (RunState.FINISHED, STEPS, STEPS)
    assert [row.step for row in rows] == [0, 1, 2, 3, 4]
    assert rows[0].data["val-core/openai/gsm8k/acc/mean@1"] == 0.0
    assert {"actor/pg_loss", "critic/score/mean", "timing_s/gen", "timing_s/save_checkpoint"} <= rows[1].data.keys()
    assert "val-core/openai/gsm8k/acc/mean@1" in rows[4].data
    assert [row.data["training/epoch"] for row in rows[1:]] == [0, 0, 0, 1]
    assert latest is not None and (latest.version, latest.run) == (5, "plain")
    assert {span.version for trajectory in trained for span in trajectory.weight_versions} == {3}


def saved(runs: RunManager, name: str, step: int) -> bool:
    """Whether the newest whole checkpoint is that of the step; it is written while the next step runs."""
    newest = Path(runs.registry.info(name).folder) / "checkpoints" / LATEST
    return newest.is_file() and newest.read_text().strip() == str(step)


def damage(runs: RunManager, name: str, step: int) -> None:
    """NaN in the weights of a checkpoint."""
    checkpoint = Path(runs.registry.info(name).folder) / "checkpoints" / f"global_step_{step}"
    weights = checkpoint / "actor" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1024] + b"\xff" * 1024)


@pytest.mark.extended
async def test_a_killed_worker_goes_back_past_a_damaged_checkpoint_and_learns_the_same(
    baseline, runs: RunManager, agent, request_of
):
    agent.holding_at = 3
    await runs.start(request_of("damaged"))
    await async_until(
        lambda: runs.registry.info("damaged").step == 2 and held_at(agent, 3) and saved(runs, "damaged", 2)
    )
    damage(runs, "damaged", 2)

    os.kill(pid_of(runs, "damaged"), signal.SIGKILL)
    await async_until(lambda: runs.registry.info("damaged").message.startswith("went back to step 1: "))
    told = runs.registry.info("damaged")
    agent.released.set()
    info = await ended(runs, "damaged")

    assert told.message.endswith("; it is kept as damaged_global_step_2")
    assert (info.state, info.restarts) == (RunState.FINISHED, 1)
    assert learned(await rows_of(runs, "damaged")) == learned(baseline.rows)


@pytest.mark.extended
async def test_a_person_is_offered_the_checkpoint_before_a_damaged_one_and_may_take_it(
    baseline, runs: RunManager, agent, request_of
):
    agent.holding_at = 3
    await runs.start(request_of("offered"))
    await async_until(
        lambda: runs.registry.info("offered").step == 2 and held_at(agent, 3) and saved(runs, "offered", 2)
    )
    await runs.stop("offered")
    await ended(runs, "offered")
    damage(runs, "offered", 2)
    agent.released.set()

    await runs.resume("offered")
    refused = await ended(runs, "offered")
    await runs.resume("offered", skip_damaged=True)
    info = await ended(runs, "offered")

    assert (refused.state, refused.interrupted) == (RunState.FAILED, False)
    assert refused.message.startswith("checkpoint_corrupt: the checkpoint ")
    assert "; global_step_1 before it is whole: `trackway train --resume offered --skip-damaged` " in refused.message
    assert info.state is RunState.FINISHED
    assert learned(await rows_of(runs, "offered")) == learned(baseline.rows)


async def test_a_stopped_run_resumes_and_learns_the_same(baseline, runs: RunManager, agent, request_of):
    agent.holding_at = 3
    await runs.stand_by()
    [waiting] = standing_by()
    await runs.start(request_of("stopped", "trainer.save_freq=-1"))
    await async_until(lambda: runs.registry.info("stopped").step == 2)
    began_in = pid_of(runs, "stopped")

    asked = await runs.stop("stopped")
    stopped = await ended(runs, "stopped")
    agent.released.set()
    resumed = await runs.resume("stopped")
    goes_on_in = pid_of(runs, "stopped")
    info = await ended(runs, "stopped")

    assert began_in == waiting and goes_on_in != waiting
    assert "step:1 - " in RunFolder(Path(info.folder)).log.read_text()
    assert asked.state is RunState.STOPPING
    assert (stopped.state, stopped.message) == (RunState.STOPPED, "stopped after step 2; it can be resumed")
    assert (resumed.state, info.state) == (RunState.STARTING, RunState.FINISHED)
    assert stopped.threads == 1
    assert learned(await rows_of(runs, "stopped")) == learned(baseline.rows)
    with pytest.raises(
        TrackwayError, match=f"run 'stopped' finished after step {STEPS}, so there is nothing to resume"
    ) as no:
        await runs.resume("stopped", changes={"trainer.total_training_steps": STEPS})
    assert no.value.code is ErrorCode.CONFLICT

    await runs.resume("stopped", changes={"trainer.total_training_steps": STEPS + 1})
    extended = await ended(runs, "stopped")
    assert (extended.state, extended.step, extended.total_steps) == (RunState.FINISHED, STEPS + 1, STEPS + 1)
    assert learned(await rows_of(runs, "stopped"))[: len(baseline.rows)] == learned(baseline.rows)


async def test_a_process_that_waits_for_a_run_ends_with_its_service_and_is_replaced_when_it_has_died(
    runs: RunManager, agent, request_of
):
    await runs.stand_by()
    [waiting] = standing_by()
    killed = runs._standby._process
    os.kill(waiting, signal.SIGKILL)
    await async_until(lambda: killed and killed.returncode is not None)
    agent.holding_at = 0
    await runs.start(request_of("first"))
    assert pid_of(runs, "first") != waiting

    await runs.stand_by()
    assert len(standing_by()) == 1
    await runs.close()
    assert standing_by() == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.logger=[console,mlflow]"], "trainer.logger: expected a tracking URI for mlflow, got none"),
        (["trainer.resume_mode=resume_path"], "trainer.resume_from_path: expected .../global_step_<n>"),
        (["trainer.default_hdfs_dir=hdfs2://b/c"], "expected a path or a URL that fsspec opens, got hdfs2://b/c"),
        (
            ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/nowhere/global_step_1"],
            "trainer.resume_from_path: expected a checkpoint, .../global_step_<n> with a state.json, got /nowhere",
        ),
    ],
)
async def test_a_run_that_cannot_log_or_begin_as_told_never_starts(runs: RunManager, request_of, overrides, said: str):
    with pytest.raises(TrackwayError) as caught:
        await runs.start(request_of("refused", *overrides))

    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert (caught.value.message.startswith(said), runs.registry.list()) == (True, [])


async def test_rows_of_an_agent_that_none_serves_fail_the_run_by_name_before_its_first_step(
    runs: RunManager, agent, request_of
):
    agent.agents = ["tool_agent"]
    await runs.start(request_of("unserved"))

    info = await ended(runs, "unserved")

    assert (info.state, info.step, info.total_steps, info.restarts, agent.requests) == (RunState.FAILED, 0, 0, 0, [])
    assert info.message.startswith(
        "invalid_request: actor_rollout_ref.rollout.agent.default_agent_loop: expected one of tool_agent, got "
        "'single_turn_agent', the loop of 8 rows without agent_name"
    )


async def test_one_run_is_active_at_a_time_and_the_other_is_named(agent, agent_url, request_of, tmp_path: Path):
    runs = RunManager(tmp_path / "outputs", urls(agent_url, tmp_path), stop_deadline_s=0)
    agent.holding_at = 0
    await runs.start(request_of("first"))

    with pytest.raises(TrackwayError, match="run 'first' is starting and one run is active at a time") as caught:
        await runs.start(request_of("second"))

    await runs.close()
    assert caught.value.code is ErrorCode.CONFLICT
    assert [info.run for info in runs.registry.list()] == ["first"]


async def test_two_runs_at_once_learn_what_each_learns_alone_though_one_is_killed(
    baseline, agent, agent_url, request_of, tmp_path: Path
):
    runs = RunManager(tmp_path / "outputs", urls(agent_url, tmp_path), stop_deadline_s=60, max_runs=2)
    agent.holding_at = 2
    await runs.start(request_of("first"))
    second = await runs.start(request_of("second"))
    with pytest.raises(TrackwayError, match=r"and 2 runs are active at a time \(max_runs\); stop it") as third:
        await runs.start(request_of("third"))
    with pytest.raises(TrackwayError, match="run 'second' is "):
        await runs.resume("second")
    await async_until(lambda: all(runs.registry.info(name).step == 1 for name in ("first", "second")))
    await async_until(lambda: saved(runs, "second", 1) and held_at(agent, 2, "second"))
    os.kill(pid_of(runs, "second"), signal.SIGKILL)
    await async_until(lambda: runs.registry.info("second").restarts == 1)
    restarting = runs.registry.info("second")
    agent.released.set()
    infos = [await ended(runs, name) for name in ("first", "second")]
    rows = [learned(await rows_of(runs, name)) for name in ("first", "second")]
    await runs.close()

    store = WeightStore(urls(agent_url, tmp_path).weights_url)
    own = WeightStore(policy_url(store.url, "second"))
    assert third.value.code is ErrorCode.CONFLICT
    assert restarting.state is RunState.RESTARTING
    assert restarting.message == "the learner died (SIGKILL); restart 1 of 2 from the last checkpoint"
    assert [(info.state, info.policy, info.restarts) for info in infos] == [
        (RunState.FINISHED, None, 0),
        (RunState.FINISHED, "second", 1),
    ]
    assert second.policy == "second"
    assert rows == [learned(baseline.rows)] * 2
    assert {(request.run, request.policy) for request in agent.requests} == {("first", None), ("second", "second")}
    published = [weight_store.latest() for weight_store in (store, own)]
    assert [(found.run, found.version) for found in published if found] == [("first", 5), ("second", 6)]
    assert store.policies() == ["second"]


async def test_what_cannot_share_the_services_is_refused_beside_another_run(
    agent, agent_url, request_of, tiny_model: Path, tmp_path: Path
):
    rollout = create_app(RolloutSettings(model_path=tiny_model, model_name="actor"), IdleEngine())
    with served_in_thread(rollout) as url:
        services = urls(agent_url, tmp_path).model_copy(update={"rollout_url": url})
        runs = RunManager(tmp_path / "outputs", services, stop_deadline_s=0, max_runs=2)
        agent.holding_at = 0
        await runs.start(request_of("first"))

        async def refusal(name: str, *change: str) -> str:
            with pytest.raises(TrackwayError) as caught:
                await runs.start(request_of(name, *change))
            return caught.value.message

        changes = ("trackway.weights_transport=ipc", "trackway.functions_file=/none.json")
        by_setting = [await refusal("second", change) for change in changes]
        by_name = [await refusal(name) for name in ("base", "actor")]
        await runs.close()

    assert by_setting == [
        f"expected runs that can share the services, got first, and {key} for this run; wait until one ends, or leave "
        "that setting out"
        for key in ("trackway.weights_transport", "trackway.functions_file")
    ]
    assert by_name == [
        f"expected a run with another name beside first, got {name!r}, a policy of the rollout service; rename it "
        "(trainer.experiment_name)"
        for name in ("base", "actor")
    ]


async def test_no_run_starts_beside_one_whose_functions_would_score_it(agent, agent_url, request_of, tmp_path: Path):
    runs = RunManager(tmp_path / "outputs", urls(agent_url, tmp_path), stop_deadline_s=0, max_runs=2)
    agent.holding_at = 0
    await runs.start(request_of("first", "trackway.functions_file=/none.json"))

    with pytest.raises(TrackwayError) as caught:
        await runs.start(request_of("second"))
    await runs.close()

    assert caught.value.message == (
        "expected runs that can share the services, got first, and trackway.functions_file for first; "
        "wait until one ends, or leave that setting out"
    )


async def test_a_worker_that_keeps_dying_fails_after_its_restarts(runs: RunManager, agent, request_of):
    agent.holding_at = 0
    await runs.start(request_of("dying", "trackway.max_restarts=1"))
    killed = 0
    for _ in range(2):
        await async_until(lambda killed=killed: pid_of(runs, "dying") != killed)
        killed = pid_of(runs, "dying")
        os.kill(killed, signal.SIGKILL)

    info = await ended(runs, "dying")

    assert info.state is RunState.FAILED
    assert info.message.startswith("the learner died (SIGKILL) after 1 restarts; see ")


async def test_a_step_without_any_rollout_fails_the_run_at_once_and_says_why(tmp_path: Path, request_of):
    runs = RunManager(tmp_path / "outputs", urls("http://127.0.0.1:9", tmp_path))
    await runs.start(request_of("lost", "trainer.val_before_train=False"))

    info = await ended(runs, "lost")
    await runs.close()

    assert (info.state, info.restarts) == (RunState.FAILED, 0)
    assert info.message.startswith("unavailable: all 8 rollouts of step 1 failed; the first: POST http://127.0.0.1:9")


@pytest.mark.extended
async def test_a_worker_ends_by_itself_when_its_service_is_gone(
    runs: RunManager, agent, agent_url, request_of, tmp_path
):
    await runs.start(request_of("plain"))
    await runs.close()  # leaves a folder that a worker can be started in by hand
    agent.holding_at = 1
    folder = RunFolder(tmp_path / "outputs" / "plain")
    folder.move(RunState.STARTING)
    command = [sys.executable, "-m", "trackway.trainer.worker", str(folder.path), "--lifeline"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert worker.stdin is not None
    worker.stdin.write(b'{"TRACKWAY_TOKEN": "s3cret"}\n')
    worker.stdin.flush()
    await async_until(lambda: held_at(agent, 1))
    with suppress(PermissionError) if os.geteuid() == 0 else pytest.raises(PermissionError):  # it refuses inspection
        assert b"s3cret" not in Path(f"/proc/{worker.pid}/environ").read_bytes()

    worker.stdin.close()
    await async_until(lambda: worker.poll() is not None)

    assert (worker.returncode, folder.info().state) == (0, RunState.STOPPED)


async def test_a_new_service_finds_an_orphan_and_can_resume_it(runs: RunManager, agent_url, request_of, tmp_path: Path):
    folder = RunFolder(tmp_path / "outputs" / "orphan")
    request = request_of("orphan")
    folder.create(compose([]).model_validate(request.config), urls(agent_url, tmp_path))
    folder.write_owner(Owner.of(2**22 + 1))
    folder.update(threads=2)

    found = runs.registry.info("orphan")
    await runs.resume("orphan")
    info = await ended(runs, "orphan")

    assert found.state is RunState.FAILED
    assert found.message.startswith("the trainer service was lost")
    assert (info.state, info.threads) == (RunState.FINISHED, 2)


async def test_a_run_and_its_traces_are_tracked_in_mlflow(
    request_of, agent, agent_url: str, tmp_path: Path, mlflow_server: str
):
    from mlflow import MlflowClient

    settings = TracingSettings(mlflow_uri=mlflow_server, spool_dir=tmp_path / "spool")  # the trainer service's own
    runs = RunManager(tmp_path / "outputs", urls(agent_url, tmp_path), 60, settings)
    agent.tracing = Tracing("agent", TracingSettings(mlflow_uri=mlflow_server, schedule_delay_s=0.1))
    trace = "actor_rollout_ref.rollout.trace"
    overrides = [f"{trace}.backend=mlflow", f"{trace}.max_samples_per_step_per_worker=1", "trainer.test_freq=2"]
    mini_batches = ["actor_rollout_ref.actor.ppo_mini_batch_size=1", "trackway.trace_validation_samples=1"]
    await runs.start(request_of("tracked", *overrides, *mini_batches, "trainer.logger=[]"))

    info = await ended(runs, "tracked")
    await runs.close()

    client = MlflowClient(mlflow_server)
    run = client.get_run(info.run_id or "")
    history = client.get_metric_history(run.info.run_id, "val-core/openai/gsm8k/acc/mean_at_1")
    assert info.state is RunState.FINISHED
    assert (tmp_path / "spool" / "mlflow").is_dir()
    assert (run.info.status, run.info.run_name, run.info.experiment_id) == ("FINISHED", "tracked", info.experiment_id)
    assert [point.step for point in history] == [0, 2, 4]
    assert run.data.params["actor_rollout_ref.rollout.n"] == "4"

    files = sorted((Path(info.folder) / "trajectories").glob("*.parquet"))
    traced = [trajectory for file in files for trajectory in read_trajectories(file) if trajectory.trace_id]
    assert info.experiment_id is not None and info.traces is not None
    found = client.search_traces(locations=[info.experiment_id], run_id=info.run_id, max_results=100)
    by_name = {trace.info.tags["mlflow.traceName"]: trace for trace in found}
    steps = {name: trace for name, trace in by_name.items() if name.startswith("train step")}
    assert len(traced) == 4 * 4 + 3  # one prompt of each step, one sample of each validation
    assert {trace.info.trace_id for trace in found} - {trace.info.trace_id for trace in steps.values()} == {
        f"tr-{trajectory.trace_id}" for trajectory in traced
    }
    assert set(steps) == {f"train step {step}" for step in range(STEPS + 1)}
    assert {span.name for span in steps["train step 2"].data.spans} == {
        *("train step 2", "rollout", "update_actor", "optimizer_step 0", "optimizer_step 1", "update_weights"),
        *("testing", "save_checkpoint"),
    }
    consumed = [link.trace_id for span in steps["train step 2"].data.spans for link in span.links]
    asked = [trajectory for trajectory in traced if trajectory.tags.step == 2 and not trajectory.tags.validation]
    assert sorted(consumed) == sorted(f"tr-{trajectory.trace_id}" for trajectory in asked)
    for trajectory in traced:
        [root] = [span for span in by_id(found)[f"tr-{trajectory.trace_id}"].data.spans if span.parent_id is None]
        assert [link.trace_id for link in root.links] == [steps[f"train step {trajectory.tags.step}"].info.trace_id]
    root = steps["train step 2"].data.spans[0]
    numbers = {key: root.get_attribute(f"agentic.{key}") for key in ("weights_before", "weights_after", "used", "lr")}
    assert numbers == {"weights_before": 2, "weights_after": 3, "used": 8, "lr": 1e-3}
    assert root.outputs["traced"] == 5

    def feedback(of: str) -> dict[str, object]:
        assessments = by_id(found)[of].info.assessments or []
        return {assessment.name: assessment.feedback.value for assessment in assessments if assessment.feedback}

    advantages = [feedback(f"tr-{trajectory.trace_id}")["advantage"] for trajectory in asked]
    assert [feedback(f"tr-{trajectory.trace_id}")["fate"] for trajectory in asked] == ["used"] * 4
    assert advantages == pytest.approx([-0.866, 0.866, -0.866, 0.866], abs=1e-3)
    validated = next(trajectory for trajectory in traced if trajectory.tags.validation)
    assert feedback(f"tr-{validated.trace_id}") == {"reward": 0.0}

    size = sum(trajectory.trace_bytes for trajectory in traced)
    assert info.traces.trajectories == 19 and size < info.traces.bytes < 4 * size
    lost = info.traces.model_dump(exclude={"trajectories", "bytes"})
    assert lost == {"spans_dropped": 0, "spans_refused": 0, "spans_waiting": 0, "spool_bytes": 0, "unknown": ["tools"]}
    ledger = json.loads((Path(info.folder).parent / "trace_bytes.json").read_text())
    rows = await rows_of(runs, "tracked")
    assert ledger["bytes"] == info.traces.bytes == sum(row.data["trace/bytes"] for row in rows)
    assert [row.data["trace/prompts_traced"] for row in rows] == [1.0, 1.0, 2.0, 1.0, 2.0]


def by_id(traces) -> dict:
    return {trace.info.trace_id: trace for trace in traces}
