"""One update of a run: who is trained on, who is dropped, and what is said about it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from trackway.clients import AgentClient
from trackway.clients.weights import WeightStore
from trackway.tracing import Tracing, TracingSettings
from trackway.trainer.config import RunConfig, compose
from trackway.trainer.data.dataset import Prompts
from trackway.trainer.learner.learner import Learner, LearnerConfig
from trackway.trainer.loop.from_config import training_ask, validation_ask
from trackway.trainer.loop.rollout_client import RetryPolicy, Rollouts
from trackway.trainer.loop.training import Schedule, Training
from trackway.trainer.loop.weight_publisher import Publisher
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.settings import ServiceUrls
from trackway.trainer.traces.budget import DailyTraceBytes, TraceBudget
from trackway.trainer.traces.feedback import Assessment
from trackway.trainer.traces.run import RunTraces
from trackway.trainer.traces.span_counts import SpanAccounts
from trackway.trainer.traces.step import StepTrace
from trackway.wire.errors import ErrorBody, ErrorCode, TrackwayError
from trackway.wire.health import SpanCounts
from trackway.wire.tracing import TraceTarget
from trackway.wire.trajectory import Trajectory, WeightSpan

pytestmark = pytest.mark.anyio

FAILED = ErrorBody(code=ErrorCode.UNAVAILABLE, message="gone", retryable=True)
Rollout = Callable[..., Trajectory]


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
    learner = Learner(LearnerConfig(str(tiny_model), lr=1e-3))
    traces = RunTraces(
        target=TraceTarget(),
        own=StepTrace("experiment", TraceTarget()),
        budget=TraceBudget(DailyTraceBytes(tmp_path / "outputs" / "trace_bytes.json"), 1_000_000),
        accounts=SpanAccounts({}, SpanCounts),
        tracing=Tracing("trainer", TracingSettings(mlflow_uri=None, weave_api_key=None)),
        feedback=[backend],
    )

    def rollouts(ask) -> Rollouts:
        return Rollouts(AgentClient(agent_url), ask, RetryPolicy())

    training = Training(
        plan=Schedule(total_steps=9, seed=0, traced_prompts=2, traced_validation=2, rollouts=2, max_staleness=1),
        folder=folder,
        prompts=Prompts([sample(index) for index in range(4)], 2, 0, shuffle=False),
        rollouts=rollouts(training_ask(config, "run", TraceTarget())),
        validation_rows=[sample(index) for index in range(3)],
        validation_rollouts=rollouts(validation_ask(config, "run", TraceTarget())),
        learner=learner,
        publisher=Publisher(WeightStore(urls.weights_url), learner, "run", "", folder.path / "export", 2),
        sinks=[],
        traces=traces,
    )
    yield training
    training.publisher.close()


def from_weights(version: int) -> list[WeightSpan]:
    return [WeightSpan(version=version, start=0, end=6)]


async def test_the_dropped_change_nothing_and_every_trace_is_told_its_fate(
    training: Training, backend: RecordingBackend, tiny_model: Path, rollout: Rollout
):
    good = [
        rollout(0, n, score, weight_versions=from_weights(6), trace_id=f"g{n}") for n, score in enumerate((1.0, 0.0))
    ]
    stale = rollout(0, 2, 1.0, weight_versions=from_weights(5), trace_id="s2")
    failed = rollout(0, 3, error=FAILED, reward=None, trace_id="f3")
    alone = Learner(LearnerConfig(str(tiny_model), lr=1e-3))
    alone.update(good)

    metrics = await training.update([stale, good[0], failed, good[1]], version=7)

    assert training.learner.canary() == alone.canary()
    assert {one.trace_id: dict(one.values) for one in backend.given} == {
        "s2": {"reward": 1.0, "fate": "dropped_stale"},
        "g0": {"reward": 1.0, "advantage": pytest.approx(0.7071, abs=1e-4), "fate": "used"},
        "f3": {"fate": "dropped_failed"},
        "g1": {"reward": 0.0, "advantage": pytest.approx(-0.7071, abs=1e-4), "fate": "used"},
    }
    assert {key: metrics[key] for key in ("training/dropped_stale", "training/dropped_failed")} == {
        "training/dropped_stale": 1.0,
        "training/dropped_failed": 1.0,
    }
    assert (metrics["training/trajectories"], metrics["response/aborted_ratio"]) == (2.0, 0.25)
    assert (training.step, metrics["agent_loop/incidents/retried"]) == (1, 0.0)


async def test_a_step_of_which_nothing_is_left_says_what_became_of_it(training: Training, rollout: Rollout):
    stale = [rollout(0, n, 1.0, weight_versions=from_weights(2)) for n in range(3)]
    before = training.learner.canary()

    with pytest.raises(TrackwayError) as caught:
        await training.update([*stale, rollout(0, 3, error=FAILED)], version=7)

    assert caught.value.message.startswith("step 1: 0 used, 1 dropped failed, 3 dropped stale: expected a trajectory")
    assert "<" not in caught.value.message and "got none; look" in caught.value.message
    assert (training.learner.canary(), training.step) == (before, 0)


@pytest.mark.usefixtures("shared_http")
async def test_the_budget_lowers_what_is_asked_for_in_training_and_validation(training: Training, agent):
    agent.tracing = Tracing("agent", TracingSettings(mlflow_uri=None, weave_api_key=None))

    first = await training.rollout(training.next_batch(), 0)
    after_first = training.traces.metrics()
    validated = await training.validate(0)
    spent = training.traces.budget.bytes
    training.traces.budget.spend(1_000_000 - spent)
    second = await training.rollout(training.next_batch(), 0)

    traced = {(request.validation, request.sample.index) for request in agent.requests if request.trace}
    sizes = [one.trace_bytes for one in first if one.trace_id]
    assert len(sizes) == 2 and len({one.tags.sample_index for one in first if one.trace_id}) == 1
    assert after_first == {
        "trace/prompts_traced": 1.0,
        "trace/bytes": float(sum(sizes)),
        "trace/bytes_today": float(sum(sizes)),
    }
    assert {index for validation, index in traced if validation} == {0, 1}
    assert [one.trace_id for one in second] == [None] * 4
    assert "val-core/openai/gsm8k/acc/mean@1" in validated
