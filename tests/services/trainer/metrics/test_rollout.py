import math

import pytest
import torch

from trackway.learner.metrics import drift_metrics
from trackway.trainer.metrics import derived_metrics, incident_metrics, rollout_metrics, update_metrics
from trackway.wire.chat import FunctionCall, Message, ToolCall
from trackway.wire.errors import ErrorBody, ErrorCode
from trackway.wire.trajectory import Incident, Reward, StopReason, Tags, Timings, Trajectory, Turn, WeightSpan


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


def test_guided_tokens_are_counted_only_where_there_are_some():
    guided = trajectory()
    guided.turns[0].guided = True

    assert rollout_metrics([guided, trajectory()])["agent_loop/guided_tokens"] == 1.0
    assert "agent_loop/guided_tokens" not in rollout_metrics([trajectory()])


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
        "agent_loop/incidents/prompt_cut": 0.0,
        "agent_loop/incidents/tool_failed": 0.0,
        "agent_loop/incidents/tool_timeout": 1.0,
        "agent_loop/incidents/instance_lost": 0.0,
        "agent_loop/incidents/replica_lost": 0.0,
    }


def test_how_old_the_weights_were_is_told_of_the_newest_and_the_oldest_of_each_trajectory():
    spans = [[WeightSpan(version=v, start=0, end=1) for v in versions] for versions in ((7,), (4, 6), ())]
    rows = [trajectory().model_copy(update={"weight_versions": versions}) for versions in spans]

    metrics = update_metrics(rows, version=7, max_prompt_length=9)

    def told(name: str) -> list[float]:
        return [metrics[f"training/off_policy/trajectory_{name}/{kind}"] for kind in ("mean", "max", "min")]

    assert told("spans") == [pytest.approx(5 / 3), 3.0, 1.0]
    assert told("staleness") == [pytest.approx(1 / 3), 1.0, 0.0]
    assert told("staleness_worst") == [1.0, 3.0, 0.0]


def test_components_of_rewards_are_metrics_of_the_trajectories_that_have_them():
    given = [
        {"clarity": 0.25, "tool/calculator": 1.0, "overlong_reward": -0.5},
        {"clarity": 0.75, "reward_baseline": 1.0},
        {},
    ]
    rows = [trajectory().model_copy(update={"reward": Reward(score=1.0, components=found)}) for found in given]

    metrics = update_metrics([*rows, trajectory().model_copy(update={"reward": None})], 1, 3)

    found = {name: value for name, value in metrics.items() if name.startswith(("reward/", "critic/"))}
    assert found == {
        **{"reward/clarity/mean": 0.5, "reward/clarity/max": 0.75, "reward/clarity/min": 0.25},
        **{f"critic/overlong_reward/{kind}": -0.5 for kind in ("mean", "max", "min")},
        **{f"critic/reward_baseline/{kind}": 1.0 for kind in ("mean", "max", "min")},
    }


def test_a_step_has_metrics_of_512_components():
    components = {f"c{number:05}": 1.0 for number in range(20_000)}
    row = trajectory().model_copy(update={"reward": Reward(score=1.0, components=components)})

    metrics = update_metrics([row], 1, 3)

    means = [name for name in metrics if name.startswith("reward/") and name.endswith("/mean")]
    assert (len(means), means[0], means[-1]) == (512, "reward/c00000/mean", "reward/c00511/mean")


def test_scores_of_turns_and_of_tokens_are_metrics_over_all_of_them():
    rewards = [Reward(score=1.0, turn_scores=[0.5, 0.0]), Reward(score=2.0), Reward(score=0.0, turn_scores=[1.0])]
    rewards.append(Reward(score=1.0, token_scores=[0.25, 0.5, 0.0]))

    metrics = update_metrics([trajectory().model_copy(update={"reward": reward}) for reward in rewards], 1, 3)

    assert {name: value for name, value in metrics.items() if name.startswith("reward/")} == {
        **{"reward/turn_scores/mean": 0.5, "reward/turn_scores/max": 1.0, "reward/turn_scores/min": 0.0},
        **{"reward/token_scores/mean": 0.25, "reward/token_scores/max": 0.5, "reward/token_scores/min": 0.0},
    }


def test_the_clip_ratio_of_prompts_is_the_share_as_long_as_allowed():
    long = trajectory().model_copy(update={"prompt_ids": [1, 2, 3]})

    assert update_metrics([trajectory(), long, long, long], 1, 3)["prompt_length/clip_ratio"] == 0.75


def test_rates_follow_from_the_rows_own_seconds_and_tokens():
    row = {
        **{"timing_s/step": 2.0, "timing_s/gen": 0.5, "timing_s/update_actor": 0.25, "timing_s/testing": 9.0},
        **{"perf/total_num_tokens": 100.0, "response_length/mean": 5.0, "training/trajectories": 4.0},
    }

    assert derived_metrics(row, gpus=2) == {
        "fully_async/trainer/idle_ratio": 0.25,
        "timing_per_token_ms/gen": 25.0,  # of 20 response tokens
        "timing_per_token_ms/update_actor": 2.5,  # of all 100
        "perf/time_per_step": 2.0,
        "perf/throughput": 25.0,  # per second and GPU
        "response_length_non_aborted/mean": 5.0,
    }
    assert derived_metrics({"timing_s/testing": 2.0}) == {}


def test_turns_and_lengths_have_the_names_of_verls_newer_releases_too():
    row = {"num_turns/max": 6.0, "response_length/clip_ratio": 0.5, "prompt_length/max": 3.0}

    assert derived_metrics(row) == {"training/num_turns/max": 6.0, "response_length_non_aborted/clip_ratio": 0.5}


def test_a_correlation_with_what_is_no_number_is_none():
    metrics = drift_metrics(torch.tensor([-1.0, math.nan]), torch.tensor([-1.0, -2.0]))

    assert math.isnan(metrics["training/rollout_actor_probs_pearson_corr"])
