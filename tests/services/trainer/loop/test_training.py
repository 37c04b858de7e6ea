"""One update of a run: what is trained on, what is dropped, the step's metrics and the feedback on traces."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
from torch import Tensor

from tests.services.trainer.learner_settings import learner_config, logprobs_of
from tests.waiting import async_until
from trackway.clients import AgentClient
from trackway.clients.weights import WeightStore
from trackway.learner import filtering
from trackway.learner import learner as learner_module
from trackway.learner.advantages import AdvantageInputs
from trackway.learner.learner import Learner, StepObserver, UpdateResult
from trackway.learner.measuring import ActiveTime, Clock
from trackway.run_config import RunConfig, compose
from trackway.run_config.algorithm import AlgorithmConfig
from trackway.tracing import Tracing, TracingSettings
from trackway.trainer.data.dataset import Position, Prompts
from trackway.trainer.delivery import FileSink
from trackway.trainer.loop.from_config import training_template, validation_template
from trackway.trainer.loop.resume import Beginning
from trackway.trainer.loop.rollout_client import RetryPolicy, Rollouts
from trackway.trainer.loop.schedule import Progress, Schedule
from trackway.trainer.loop.scheduler import GroupScheduler, Pacing
from trackway.trainer.loop.training import Training, Validation
from trackway.trainer.loop.weight_publisher import Publisher
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.trainer.traces.run import (
    STEP_SHARE,
    Assessment,
    DailyTraceBytes,
    RunTraces,
    SpanAccounts,
    StepTrace,
    TraceBudget,
)
from trackway.wire.errors import ErrorBody, ErrorCode, TrackwayError
from trackway.wire.service import SpanCounts
from trackway.wire.trajectory import TraceTarget, Trajectory, WeightSpan
from trackway.wire.weights import WeightManifest

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

FAILED = ErrorBody(code=ErrorCode.UNAVAILABLE, message="gone", retryable=True)
Rollout = Callable[..., Trajectory]

ROW = {
    "critic/score/mean": 0.40625,
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "critic/rewards/mean": 0.40625,
    "critic/rewards/max": 1.0,
    "critic/rewards/min": 0.0,
    "critic/advantages/mean": -0.10101486955370222,
    "critic/advantages/max": 0.7071057558059692,
    "critic/advantages/min": -0.7071057558059692,
    "critic/returns/mean": -0.10101486955370222,
    "critic/returns/max": 0.7071057558059692,
    "critic/returns/min": -0.7071057558059692,
    "response_length/mean": 5.0,
    "response_length/max": 6.0,
    "response_length/min": 2.0,
    "response_length/clip_ratio": 0.0,
    "prompt_length/mean": 3.0,
    "prompt_length/max": 3.0,
    "prompt_length/min": 3.0,
    "num_turns/mean": 3.5,
    "num_turns/max": 4.0,
    "num_turns/min": 2.0,
    "perf/total_num_tokens": 32.0,
    "training/trained_tokens": 14.0,
    "training/trajectories": 4.0,
    "response/aborted_ratio": 0.4444444444444444,
    "training/left_out/infrastructure": 2.0,
    "training/left_out/error": 0.0,
    "training/left_out/no_model_token": 1.0,
    "training/left_out/guided": 0.0,
    "training/left_out/unscored": 1.0,
    "training/rollout_probs_diff_valid": 1.0,
    "training/rollout_probs_diff_max": 0.3678736984729767,
    "training/rollout_probs_diff_mean": 0.0550503209233284,
    "training/rollout_probs_diff_std": 0.10538740456104279,
    "training/rollout_logprob_diff_max": 11.065948486328125,
    "training/rollout_actor_probs_pearson_corr": 0.06751525044955596,
    "actor/pg_clipfrac": 0.5714285969734192,
    "actor/pg_clipfrac_lower": 0.0,
    "actor/ppo_kl": 4.7562384605407715,
    "actor/pg_loss": 0.31362637877464294,
    "actor/entropy": 2.0001413822174072,
    "actor/grad_norm": 0.2371324598789215,
    "actor/skipped_steps": 0.0,
    "actor/lr": 0.001,
    "rollout_corr/training_ppl": 5410.67138671875,
    "rollout_corr/training_log_ppl": 8.557584762573242,
    "rollout_corr/kl": 4.756239414215088,
    "rollout_corr/k3_kl": 3.795419454574585,
    "rollout_corr/rollout_ppl": 48.448089599609375,
    "rollout_corr/rollout_log_ppl": 3.4250001907348633,
    "rollout_corr/log_ppl_diff": 5.132584571838379,
    "rollout_corr/log_ppl_abs_diff": 5.132584571838379,
    "rollout_corr/log_ppl_diff_max": 7.76700496673584,
    "rollout_corr/log_ppl_diff_min": 4.254444599151611,
    "rollout_corr/ppl_ratio": 643.1603393554688,
    "rollout_corr/chi2_token": -0.9946383833885193,
    "rollout_corr/chi2_seq": -1.0,
    "training/global_step": 1.0,
    "training/epoch": 0.0,
    "training/off_policy/trajectory_spans/mean": 1.0,
    "training/off_policy/trajectory_spans/max": 1.0,
    "training/off_policy/trajectory_spans/min": 1.0,
    "training/off_policy/trajectory_staleness/mean": 0.5,
    "training/off_policy/trajectory_staleness/max": 1.0,
    "training/off_policy/trajectory_staleness/min": 0.0,
    "training/off_policy/trajectory_staleness_worst/mean": 0.5,
    "training/off_policy/trajectory_staleness_worst/max": 1.0,
    "training/off_policy/trajectory_staleness_worst/min": 0.0,
    "prompt_length/clip_ratio": 0.0,
    "training/dropped_failed": 1.0,
    "training/dropped_infrastructure": 2.0,
    "training/dropped_filtered": 1.0,
    "training/dropped_stale": 1.0,
    "rollouts/submitted": 0.0,
    "rollouts/used": 4.0,
    "rollouts/dropped_failed": 1.0,
    "rollouts/dropped_infrastructure": 2.0,
    "rollouts/dropped_filtered": 1.0,
    "rollouts/dropped_stale": 1.0,
    "rollouts/running": 0.0,
    "rollouts/finished": 0.0,
    "rollouts/cancelled": 0.0,
    "training/rollout_retries": 0.0,
    "training/rollout_failure/failed_trajectories": 2.0,
    "tool_call_counts/mean": 0.0,
    "tool_call_counts/max": 0.0,
    "tool_call_counts/min": 0.0,
    "tool_call_counts/executed/mean": 0.0,
    "tool_call_counts/executed/max": 0.0,
    "tool_call_counts/executed/min": 0.0,
    "timing_s/agent_loop/generate_sequences/mean": 0.0,
    "timing_s/agent_loop/generate_sequences/max": 0.0,
    "timing_s/agent_loop/generate_sequences/min": 0.0,
    "timing_s/agent_loop/tool_calls/mean": 0.0,
    "timing_s/agent_loop/tool_calls/max": 0.0,
    "timing_s/agent_loop/tool_calls/min": 0.0,
    "timing_s/agent_loop/compute_score/mean": 0.0,
    "timing_s/agent_loop/compute_score/max": 0.0,
    "timing_s/agent_loop/compute_score/min": 0.0,
    "timing_s/agent_loop/slowest/generate_sequences": 0.0,
    "timing_s/agent_loop/slowest/tool_calls": 0.0,
    "timing_s/agent_loop/slowest/compute_score": 0.0,
    "timing_s/agent_loop/slowest/response_length": 6.0,
    "agent_loop/incidents/retried": 0.0,
    "agent_loop/incidents/generation_cut": 0.0,
    "agent_loop/incidents/weights_behind": 0.0,
    "agent_loop/incidents/prompt_cut": 0.0,
    "agent_loop/incidents/tool_failed": 0.0,
    "agent_loop/incidents/tool_timeout": 0.0,
    "agent_loop/incidents/instance_lost": 0.0,
    "agent_loop/incidents/replica_lost": 0.0,
}
"""Metrics of the update on `mixed_step`."""


class RecordingBackend:
    """A TraceFeedback that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[Assessment] = []

    def submit(self, assessments: Sequence[Assessment]) -> None:
        self.given += assessments

    def close(self) -> None:
        """Nothing to close."""


@pytest.fixture
def backend() -> RecordingBackend:
    return RecordingBackend()


@pytest.fixture
def training(tiny_model: Path, tmp_path: Path, sample, agent_url: str, backend: RecordingBackend) -> Iterator[Training]:
    """A run before its first step, whose trajectories may be one version old."""
    urls = ServiceUrls(agent_url=agent_url, tools_url="http://127.0.0.1:9", weights_url=str(tmp_path / "weights"))
    folder, config = RunFolder(tmp_path / "outputs" / "run"), compose(["actor_rollout_ref.rollout.n=2"])
    folder.create(RunConfig(), urls)
    learner = Learner(learner_config(tiny_model, lr=1e-3))
    traces = RunTraces(
        target=TraceTarget(),
        own=StepTrace("experiment", TraceTarget()),
        budget=TraceBudget(DailyTraceBytes(tmp_path / "outputs" / "trace_bytes.json"), 1_000_000),
        accounts=SpanAccounts({}, SpanCounts),
        tracing=Tracing("trainer", TracingSettings(mlflow_uri=None, weave_api_key=None)),
        feedback=[backend],
    )

    def rollouts(template) -> Rollouts:
        return Rollouts(AgentClient(agent_url), template, RetryPolicy())

    prompts = Prompts([sample(index) for index in range(4)], 2, 0, shuffle=False)
    training = Training(
        plan=Schedule(total_steps=9, seed=0, traced_prompts=2, traced_validation=2, rollouts=2, max_staleness=1),
        folder=folder,
        scheduler=GroupScheduler(prompts, rollouts(training_template(config, "run", TraceTarget()))),
        validation=Validation(
            [sample(index) for index in range(3)], rollouts(validation_template(config, "run", TraceTarget()))
        ),
        learner=learner,
        publisher=Publisher(WeightStore(urls.weights_url), learner, "run", "", folder.path / "export", 2),
        sinks=[],
        traces=traces,
        beginning=Beginning(Progress(), None),
    )
    yield training
    training.publisher.close()


def from_weights(version: int) -> list[WeightSpan]:
    return [WeightSpan(version=version, start=0, end=6)]


async def test_dropped_trajectories_change_nothing_and_each_trace_gets_its_fate(
    training: Training, backend: RecordingBackend, tiny_model: Path, rollout: Rollout
):
    good = [
        rollout(0, n, score, weight_versions=from_weights(6), trace_id=f"g{n}") for n, score in enumerate((1.0, 0.0))
    ]
    stale = rollout(0, 2, 1.0, weight_versions=from_weights(5), trace_id="s2")
    failed = rollout(0, 3, error=FAILED, reward=None, trace_id="f3")
    alone = Learner(learner_config(tiny_model, lr=1e-3))
    alone.update(good)

    metrics = await training.update([stale, good[0], failed, good[1]], version=7)

    assert logprobs_of(training.learner) == logprobs_of(alone)
    assert {assessment.trace_id: dict(assessment.values) for assessment in backend.given} == {
        "s2": {"reward": 1.0, "fate": "dropped_stale"},
        "g0": {"reward": 1.0, "advantage": pytest.approx(0.7071, abs=1e-4), "fate": "used"},
        "f3": {"fate": "dropped_infrastructure"},
        "g1": {"reward": 0.0, "advantage": pytest.approx(-0.7071, abs=1e-4), "fate": "used"},
    }
    assert {key: metrics[key] for key in ("training/dropped_stale", "training/dropped_infrastructure")} == {
        "training/dropped_stale": 1.0,
        "training/dropped_infrastructure": 1.0,
    }
    assert (metrics["training/trajectories"], metrics["response/aborted_ratio"]) == (2.0, 0.25)
    assert (training.step, metrics["agent_loop/incidents/retried"]) == (1, 0.0)


def mixed_step(rollout: Rollout) -> list[Trajectory]:
    """Two groups: four trajectories to train on, one stale, two failed, one silent, one unscored."""
    short = {"response_ids": [1, 2], "response_mask": [1, 1], "response_logprobs": [-1.0, -1.5], "num_turns": 2}
    return [
        rollout(0, 0, 1.0, weight_versions=from_weights(6)),
        rollout(0, 1, 0.0, weight_versions=from_weights(7)),
        rollout(0, 2, 1.0, weight_versions=from_weights(5)),
        rollout(0, 3, error=FAILED, reward=None),
        rollout(1, 0, 0.25, response_mask=[0] * 6),
        rollout(1, 1, reward=None),
        rollout(1, 2, 0.5, **short),
        rollout(1, 3, 0.125, weight_versions=from_weights(6)),
        rollout(1, 4, 0.125, error=FAILED),
    ]


async def test_the_metrics_of_a_step_are_these(training: Training, rollout: Rollout):
    metrics = await training.update(mixed_step(rollout), version=7)

    assert metrics == pytest.approx(ROW, rel=1e-4)


async def test_the_values_of_tokens_are_written_beside_the_trajectories_and_stop_no_run(
    training: Training, rollout: Rollout
):
    training.learner.config = replace(training.learner.config, save_token_values=True)
    file = training.folder.path / "token_values" / "step_1.parquet"

    metrics = await training.update(mixed_step(rollout), version=7)

    rows = pq.read_table(file).to_pylist()
    statuses = [
        "used",
        "used",
        "stale",
        "infrastructure",
        "no_model_token",
        "unscored",
        "used",
        "used",
        "infrastructure",
    ]
    assert [row["status"] for row in rows] == statuses
    assert [None if row["kept"] is None else sum(row["kept"]) for row in rows] == [4, 4, *[None] * 4, 2, 4, None]
    assert [row["sample_index"] for row in rows] == ["0"] * 4 + ["1"] * 5
    written = metrics.pop("training/token_values_bytes")
    assert written == file.stat().st_size and metrics == pytest.approx(ROW, rel=1e-4)

    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("")  # a file where the folder belongs
    assert (await training.update(mixed_step(rollout), version=7))["training/token_values_bytes"] == 0.0


async def test_a_step_decides_once_for_each_trajectory_and_computes_its_advantages_once(
    training: Training, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
):
    decided: list[str] = []
    groups_seen: list[list[str]] = []
    decide, compute = filtering.train_status, learner_module.estimate

    def counted_status(trajectory: Trajectory, version: int, max_staleness: int | None) -> filtering.TrainStatus:
        decided.append(trajectory.id)
        return decide(trajectory, version, max_staleness)

    def counted_advantages(config: AlgorithmConfig, inputs: AdvantageInputs) -> Tensor:
        groups_seen.append(list(inputs.groups))
        return compute(config, inputs)

    monkeypatch.setattr(filtering, "train_status", counted_status)
    monkeypatch.setattr(learner_module, "estimate", counted_advantages)
    step = mixed_step(rollout)

    await training.update(step, version=7)

    assert decided == [trajectory.id for trajectory in step]
    assert groups_seen == [["1/0", "1/0", "1/1", "1/1"]]


async def test_each_update_of_a_version_counts_as_its_share(
    training: Training, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
):
    """The staleness of `proximal_logprobs=loglinear` is measured against these versions."""
    training.scheduler.pacing = Pacing(sync_every=4)
    versions: list[float | None] = []
    update = training.learner.update

    def recorded(used: Sequence[Trajectory], version: float | None, observe: StepObserver) -> UpdateResult:
        versions.append(version)
        return update(used, version, observe)

    monkeypatch.setattr(training.learner, "update", recorded)
    for version in (7, 7, 7, 7, 8):
        await training.update(mixed_step(rollout), version)

    assert versions == [7.0, 7.25, 7.5, 7.75, 8.0]


@pytest.mark.usefixtures("shared_http")
async def test_a_row_says_how_long_the_learner_and_the_engines_were_idle(
    training: Training, monkeypatch: pytest.MonkeyPatch
):
    now = [100.0]
    training.clock = Clock(lambda: now[0])
    training.scheduler.rollouts.active = ActiveTime(lambda: now[0])
    take, update = training.scheduler.take, training.learner.update

    async def generated(steps: int, position: Position) -> list[Trajectory]:
        now[0] += 2.0
        return await take(steps, position)

    def learned(*given: Any) -> UpdateResult:
        now[0] += 6.0
        return update(*given)

    monkeypatch.setattr(training.scheduler, "take", generated)
    monkeypatch.setattr(training.learner, "update", learned)
    training.sinks = [FileSink(training.folder)]

    with training.one_step():
        metrics = await training.update(await training.rollout(0), version=0)
    await training.log(metrics)

    [row] = training.folder.rows()
    assert {name: value for name, value in row.data.items() if name.startswith("fully_async/")} == {
        "fully_async/trainer/idle_ratio": 0.25,
        "fully_async/rollouter/active_time": 2.0,
        "fully_async/rollouter/version_time": 8.0,
        "fully_async/rollouter/idle_ratio": 0.75,
    }


@pytest.mark.usefixtures("shared_http")
async def test_a_step_names_the_groups_that_it_waits_for(training: Training, agent):
    agent.holding_at = 1
    waiting = asyncio.create_task(training.rollout(0))
    await async_until(lambda: len(agent.requests) >= 2)

    [wait] = training.waits.current()
    agent.released.set()
    await waiting

    assert (wait.who, wait.waits_for, wait.until) == ("the run", "the rollouts of step 1", None)
    assert wait.progress == "0 of 2 groups have finished, and it takes 2 of the oldest"
    assert [(group.who, group.waits_for, group.progress) for group in wait.because] == [
        ("group 1/0", "the agent service", "0 of 2 rollouts have ended"),
        ("group 1/1", "the agent service", "0 of 2 rollouts have ended"),
    ]
    assert {(group.until or 0) - group.since for group in wait.because} == {1_800_000}
    assert training.waits.current() == []


async def test_a_slow_learner_and_a_slow_weight_store_are_named_by_what_they_do(training: Training, tmp_path: Path):
    reached, released = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]

    class SlowStore(WeightStore):
        def publish(self, *given: Any, **named: Any) -> WeightManifest:
            reached[1].set()
            assert released[1].wait(30)
            return super().publish(*given, **named)

    class SlowExport:
        def __init__(self, learner: Learner) -> None:
            self.proof = learner.proof
            self._export = learner.export

        def export_to_engines(self, folder: Path) -> None:
            reached[0].set()
            assert released[0].wait(30)
            self._export(folder)

    training.publisher.close()
    store, learner = SlowStore(str(tmp_path / "slow")), cast(Learner, SlowExport(training.learner))
    training.publisher = Publisher(store, learner, "run", "uid", tmp_path / "export", 2)
    publishing, said = asyncio.create_task(training.publish()), []
    for begun, go_on in zip(reached, released, strict=True):
        await asyncio.to_thread(begun.wait, 30)
        said += [(wait.waits_for, wait.progress) for wait in training.waits.current()]
        go_on.set()

    assert await publishing == 1
    assert said == [
        ("the publication of the weights after step 0", f"exports version 1 to {tmp_path}/export"),
        ("the publication of the weights after step 0", f"copies version 1 to the weight store {tmp_path}/slow"),
    ]


async def test_a_step_with_no_trajectory_to_train_on_fails_with_the_counts(training: Training, rollout: Rollout):
    stale = [rollout(0, n, 1.0, weight_versions=from_weights(2)) for n in range(3)]
    before = logprobs_of(training.learner)

    with pytest.raises(TrackwayError) as caught:
        await training.update([*stale, rollout(0, 3, error=FAILED)], version=7)

    assert caught.value.message.startswith(
        "step 1: 0 used, 1 dropped infrastructure, 0 dropped failed, 0 dropped filtered, 3 dropped stale: expected a "
    )
    assert "<" not in caught.value.message and "got none; look" in caught.value.message
    assert (logprobs_of(training.learner), training.step) == (before, 0)


@pytest.mark.usefixtures("shared_http")
async def test_the_budget_lowers_what_is_asked_for_in_training_and_validation(training: Training, agent):
    agent.tracing = Tracing("agent", TracingSettings(mlflow_uri=None, weave_api_key=None))

    first = await training.rollout(0)
    after_first = training.traces.metrics()
    await training.update(first, 0)
    validated = await training.validate(0)
    spent = training.traces.budget.bytes
    training.traces.budget.spend(1_000_000 - spent)
    second = await training.rollout(0)

    traced = {(request.validation, request.sample.index) for request in agent.requests if request.trace}
    sizes = [trajectory.trace_bytes for trajectory in first if trajectory.trace_id]
    assert len(sizes) == 2 and len({trajectory.tags.sample_index for trajectory in first if trajectory.trace_id}) == 1
    assert after_first == {
        "trace/prompts_traced": 1.0,
        "trace/bytes": float(sum(sizes)),
        "trace/bytes_today": float(sum(sizes)),
    }
    assert {index for validation, index in traced if validation} == {0, 1}
    assert [trajectory.trace_id for trajectory in second] == [None] * 4
    assert "val-core/openai/gsm8k/acc/mean@1" in validated


@pytest.mark.usefixtures("shared_http")
async def test_the_number_of_rollouts_of_a_validations_rows_is_in_its_metrics_and_in_the_bytes_of_its_traces(
    training: Training, agent_url: str, agent
):
    template = replace(validation_template(compose([]), "run", TraceTarget()), n=2)
    training.plan = replace(training.plan, validation_n=2)
    training.validation.rollouts = Rollouts(AgentClient(agent_url), template, RetryPolicy())
    spent = 1_000_000 - round(3000 / STEP_SHARE)  # 3000 bytes are left to this step, at 1000 of each trajectory
    training.traces.budget.spend(spent, spent // 1000)

    metrics = await training.validate(0)

    assert {request.sample.index for request in agent.requests if request.trace} == {0}
    assert "val-core/openai/gsm8k/acc/mean@2" in metrics and "val-core/openai/gsm8k/acc/mean@1" not in metrics
