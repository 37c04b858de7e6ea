import pytest
from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, path_not_unique, validate_param_and_metric_name

from trackway.trainer.metrics import MOST_KEYS, rollout_metrics, tool_metrics, validation_metrics
from trackway.wire.errors import ErrorBody, ErrorCode
from trackway.wire.trajectory import Reward, StopReason, Tags, ToolCallRecord, Trajectory, Turn


def called(tool: str, seconds: float = 1.0, **fields: object) -> ToolCallRecord:
    return ToolCallRecord.model_validate({"tool": tool, "tool_call_id": "c", "seconds": seconds, **fields})


def trajectory(*turns: list[ToolCallRecord], components: dict[str, float] | None = None) -> Trajectory:
    """With these calls in its turns; without a reward it failed at its scoring."""
    failed = components is None
    return Trajectory(
        id="i",
        session_id="s",
        tags=Tags(experiment_name="e", step=1, sample_index=0, rollout_n=0),
        agent_name="a",
        data_source="d",
        turns=[
            Turn(
                index=index,
                messages=[],
                response_start=0,
                response_end=0,
                finish_reason="stop",
                calls=calls,
                calls_executed=len(calls),
            )
            for index, calls in enumerate(turns)
        ],
        reward=None if failed else Reward(score=1.0, components=components),
        stop_reason=StopReason.ERROR if failed else StopReason.ANSWERED,
        error=ErrorBody(code=ErrorCode.UNAVAILABLE, message="m", retryable=True) if failed else None,
    )


STEP = [
    trajectory(
        [called("python", 1.0, reward=1.0, metrics={"succeeded": 1.0, "lines": 4.0}), called("search", 8.0)],
        [called("python", 3.0, reward=-0.5, metrics={"succeeded": 0.0}, truncated=True)],
        components={"correct": 1.0, "tool/python": 2.0},
    ),
    trajectory([called("python", 2.0, error=ErrorCode.TOOL_FAILED)], components={"tool/python": 1.0}),
    trajectory([called("python", 6.0, error=ErrorCode.TOOL_TIMEOUT)]),
    trajectory(),
]


def test_each_tool_has_its_calls_errors_seconds_rewards_and_own_metrics():
    assert tool_metrics(STEP) == {
        "tools/python/calls": 4.0,
        "tools/python/errors": 2.0,
        "tools/python/error_codes/tool_timeout": 1.0,
        "tools/python/error_codes/tool_failed": 1.0,
        "tools/python/truncated": 1.0,
        "tools/python/seconds/mean": 3.0,
        "tools/python/seconds/max": 6.0,
        "tools/python/reward/mean": 0.25,
        "tools/python/metrics/lines/mean": 4.0,
        "tools/python/metrics/succeeded/mean": 0.5,
        "tools/python/instance_reward/mean": 1.5,
        "tools/search/calls": 1.0,
        "tools/search/errors": 0.0,
        "tools/search/truncated": 0.0,
        "tools/search/seconds/mean": 8.0,
        "tools/search/seconds/max": 8.0,
        "tools/search/reward/mean": 0.0,
    }


def test_a_tool_that_never_answered_has_no_mean_reward():
    metrics = tool_metrics([trajectory([called("python", error=ErrorCode.UNAVAILABLE)])])

    assert (metrics["tools/python/calls"], metrics["tools/python/errors"]) == (1.0, 1.0)
    assert "tools/python/reward/mean" not in metrics


def test_the_rows_of_steps_and_validations_carry_them_also_when_nothing_was_scored():
    unscored = [trajectory([called("python", 6.0)])]

    step, validation = rollout_metrics(unscored), validation_metrics(unscored, n=1)

    assert (step["tools/python/calls"], step["tools/python/seconds/max"]) == (1.0, 6.0)
    assert (validation["val-aux/tools/python/calls"], validation["val-aux/tools/python/seconds/max"]) == (1.0, 6.0)
    assert step["training/rollout_failure/failed_trajectories"] == 1.0


def test_executed_calls_are_counted_by_trajectory():
    metrics = rollout_metrics(STEP)

    assert [metrics[f"tool_call_counts/executed/{kind}"] for kind in ("mean", "max", "min")] == [2.0, 3.0, 1.0]


@pytest.mark.parametrize("name", ["mcp:files/read", "..", ".", "", "naïve search", "pass@1", "a//b", "n" * 300, "%\n"])
def test_every_name_is_one_that_mlflow_takes(name: str):
    metrics = tool_metrics([trajectory([called(name, metrics={name: 1.0})], components={f"tool/{name}": 1.0})])

    assert len(metrics) == 8
    for metric in metrics:
        assert validate_param_and_metric_name(metric) and not path_not_unique(metric)
        assert len(metric) < MAX_ENTITY_KEY_LENGTH


def test_no_metric_is_the_folder_of_another():
    names = tool_metrics(STEP)

    assert [(name, longer) for name in names for longer in names if longer.startswith(f"{name}/")] == []


def test_a_tool_that_measures_under_ever_new_names_is_bounded():
    metrics = tool_metrics([trajectory([called("t", metrics={f"id_{place}": 1.0 for place in range(1000)})])])

    assert sum(name.startswith("tools/t/metrics/") for name in metrics) == MOST_KEYS
