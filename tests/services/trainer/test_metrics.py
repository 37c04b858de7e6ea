import pytest

from trackway.trainer.metrics import Clock, incident_metrics, rollout_metrics, throughput, validation_metrics
from trackway.wire.chat import FunctionCall, Message, ToolCall
from trackway.wire.errors import ErrorBody, ErrorCode
from trackway.wire.tracing import Incident
from trackway.wire.trajectory import Reward, StopReason, Tags, Timings, Trajectory, Turn


def trajectory(
    score: float = 0.0,
    source: str = "openai/gsm8k",
    components: dict[str, float] | None = None,
    calls: int = 0,
    tool_s: float = 0.0,
    failed: bool = False,
) -> Trajectory:
    call = ToolCall(id="c", function=FunctionCall(name="calculator", arguments="{}"))
    message = Message(role="assistant", content="", tool_calls=[call] * calls)
    return Trajectory(
        id="i",
        session_id="s",
        tags=Tags(experiment_name="e", step=1, sample_index=0, rollout_n=0),
        agent_name="a",
        data_source=source,
        prompt_ids=[1, 2],
        response_ids=[3],
        response_mask=[1],
        response_logprobs=[-1.0],
        turns=[Turn(index=0, messages=[message], response_start=0, response_end=1, finish_reason="stop")],
        reward=Reward(score=score, components=components or {}),
        num_turns=2 + 2 * calls,
        stop_reason=StopReason.ANSWERED,
        timings=Timings(tool_calls=tool_s, total=tool_s),
        error=ErrorBody(code=ErrorCode.INTERNAL, message="m", retryable=False) if failed else None,
    )


def test_the_clock_adds_up_one_activity_and_forgets_what_was_taken():
    clock = Clock()
    with clock("gen"):
        pass
    with clock("gen"), clock("step"):
        pass

    taken = clock.take()

    assert set(taken) == {"timing_s/gen", "timing_s/step"}
    assert taken["timing_s/gen"] >= taken["timing_s/step"] >= 0.0
    assert clock.take() == {}


def test_rollout_metrics_count_calls_and_seconds_of_the_good_and_how_many_failed():
    metrics = rollout_metrics([trajectory(calls=1, tool_s=2.0), trajectory(), trajectory(calls=9, failed=True)])

    assert metrics["training/rollout_failure/failed_trajectories"] == 1.0
    assert [metrics[f"tool_call_counts/{kind}"] for kind in ("mean", "max", "min")] == [0.5, 1.0, 0.0]
    assert metrics["timing_s/agent_loop/tool_calls/max"] == 2.0
    assert metrics["timing_s/agent_loop/slowest/tool_calls"] == 2.0


def test_incidents_are_counted_by_the_trajectories_they_happened_to():
    rows = [
        trajectory().model_copy(update={"incidents": [Incident.RETRIED, Incident.TOOL_TIMEOUT]}),
        trajectory(failed=True).model_copy(update={"incidents": [Incident.RETRIED]}),
        trajectory(),
    ]

    assert incident_metrics(rows) == {
        "agent_loop/incidents/retried": 2.0,
        "agent_loop/incidents/generation_cut": 0.0,
        "agent_loop/incidents/weights_behind": 0.0,
        "agent_loop/incidents/tool_failed": 0.0,
        "agent_loop/incidents/tool_timeout": 1.0,
        "agent_loop/incidents/instance_lost": 0.0,
        "agent_loop/incidents/replica_lost": 0.0,
    }


def test_throughput_is_tokens_over_the_seconds_of_the_step():
    assert throughput({"timing_s/step": 2.0, "perf/total_num_tokens": 6.0}) == {
        "perf/time_per_step": 2.0,
        "perf/throughput": 3.0,
    }
    assert throughput({"timing_s/testing": 2.0}) == {}


def test_validation_is_reported_by_data_source_without_the_failed():
    rows = [trajectory(1.0), trajectory(0.0), trajectory(0.0, failed=True), trajectory(0.5, "other", {"acc": 1.0})]

    metrics = validation_metrics(rows, n=1)

    assert metrics["val-core/openai/gsm8k/acc/mean@1"] == 0.5
    assert metrics["val-core/openai/gsm8k/reward/mean@1"] == 0.5
    assert metrics["val-core/other/acc/mean@1"] == 1.0
    assert metrics["val-core/other/reward/mean@1"] == 0.5
    assert metrics["val-aux/failed_trajectories"] == 1.0


@pytest.mark.parametrize("n", [1, 4])
def test_the_name_of_a_mean_says_over_how_many_rollouts(n: int):
    assert f"val-core/openai/gsm8k/acc/mean@{n}" in validation_metrics([trajectory()], n)
