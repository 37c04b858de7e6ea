"""A small run, written by the trainer's own writers."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.services.evaluation.rollouts import rollout as evaluated
from trackway.evaluation.store import EvaluationStore
from trackway.evaluation.summary import Evaluation
from trackway.learner.filtering import filter_trajectories
from trackway.run_config import compose, resolve
from trackway.trainer.run_state.folder import Activity, RunFolder
from trackway.trainer.run_state.trajectories import write_token_values, write_trajectories
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.chat import FunctionCall, Message, ToolCall
from trackway.wire.errors import ErrorBody, ErrorCode
from trackway.wire.trainer import MetricsRow, RunState
from trackway.wire.trajectory import (
    Incident,
    Reward,
    StopReason,
    Tags,
    Timings,
    ToolCallRecord,
    Trajectory,
    Turn,
    WeightSpan,
    trajectory_id,
)

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
MESSAGE = 'the tool "calculator" took 30 s'


def write_run(outputs: Path, name: str = "tidy", steps: int = 2, message: str = "") -> RunFolder:
    """A finished run of steps with two prompts of two rollouts each, and a validation before them."""
    folder = RunFolder(outputs / name)
    urls = ServiceUrls(agent_url="http://a", tools_url="http://t", weights_url="w")
    folder.create(compose([f"trainer.experiment_name={name}"]), urls, total_steps=steps)
    folder.move(RunState.RUNNING)
    write_trajectories(folder.path / "trajectories/val_step_0.parquet", [rollout(name, 0, 7, 0, validation=True)])
    accuracy = {"val-core/own/acc/mean@1": 0.25}
    folder.append_row(MetricsRow(step=0, timestamp=1000, data=accuracy))
    for step in range(1, steps + 1):
        write_step(folder, step)
    folder.write_activity(Activity(rollouts={"submitted": 4 * steps, "used": 4 * steps}))
    pages = {"mlflow_uri": "http://127.0.0.1:5000", "experiment_id": "3", "weave_url": "https://wandb.ai/team/own"}
    folder.update(step=steps, **pages)
    folder.move(RunState.FINISHED, message)
    return folder


def write_evaluation(folder: Path, rows: dict[int, list[float | None]], files: Sequence[str] = ("rows.jsonl",)) -> None:
    """A finished evaluation; None is a rollout that an infrastructure error ended."""
    store = EvaluationStore(folder)
    store.begin(Evaluation(name=folder.name, model="m", files=[*files], rows=len(rows), n=2), resolve({}))
    for row, scores in rows.items():
        store.add(evaluated(row, number, score) for number, score in enumerate(scores))
    store.finish()


def write_step(folder: RunFolder, step: int) -> None:
    """The trajectories and the metrics of a step: sample 7 is right in its rollout 1, sample 10 never."""
    rollouts = [rollout(folder.name, step, sample, n) for sample in (7, 10) for n in (0, 1)]
    write_trajectories(folder.path / f"trajectories/step_{step}.parquet", rollouts)
    data = {"critic/score/mean": 0.25, "timing_s/step": 2.0, "timing_s/gen": 1.5, "actor/entropy": float("nan")}
    folder.append_row(MetricsRow(step=step, timestamp=1000 + step, data=data))


class Values(NamedTuple):
    """As the learner's TokenValues, without torch."""

    lengths: list[int]
    logprobs: np.ndarray
    entropies: np.ndarray
    advantages: np.ndarray
    clipped: np.ndarray
    kept: np.ndarray


def write_values(folder: RunFolder, step: int) -> int:
    """Token values of a step: rollout 1 of sample 10 is stale; the second token of each is clipped, the last rejected.

    The learner's logprobs are 0.25 below the sampler's, but 1.5 at the fourth token of rollout 1 of sample 7.
    """
    rollouts = [rollout(folder.name, step, sample, n) for sample in (7, 10) for n in (0, 1)]
    rollouts[3].weight_versions = [WeightSpan(version=0, start=0, end=5)]
    batch = filter_trajectories(rollouts, step, max_staleness=step - 1)
    nan = float("nan")
    values: Any = Values(
        lengths=[5, 5],
        logprobs=np.array([-0.75, -0.5, nan, -2.25, -0.375, -0.75, -0.5, nan, -3.5, -0.375], np.float32),
        entropies=np.array([1.0, 0.5, nan, 2.0, nan] * 2, np.float32),
        advantages=np.array([-0.5, -0.5, nan, -0.5, -0.5, 0.5, 0.5, nan, 0.5, 0.5], np.float32),
        clipped=np.array([False, True, False, False, False] * 2),
        kept=np.array([True, True, False, True, False] * 2),
    )
    return write_token_values(folder.path / f"token_values/step_{step}.parquet", step, batch, values)


def rollout(
    run: str, step: int, sample: int | str, n: int, *, validation: bool = False, text: str = "How much is 7 x 6?"
) -> Trajectory:
    """A tool call and an answer; rollout 0 of sample 10 ends by an error, and rollout 1 of sample 7 is traced."""
    tags = Tags(experiment_name=run, step=step, sample_index=sample, rollout_n=n, validate=validation)
    call = ToolCall(id="c0", function=FunctionCall(name="calculator", arguments='{"expression": "7*6"}'))
    right, fails = (sample, n) == (7, 1), (sample, n) == (10, 0)
    turns = [
        Turn(
            index=0,
            messages=[
                Message(role="assistant", content="", tool_calls=[call]),
                Message(role="tool", content="42", tool_call_id="c0", name="calculator"),
            ],
            response_start=0,
            response_end=2,
            finish_reason="stop",
            calls_executed=1,
            calls=[
                ToolCallRecord(
                    tool="calculator",
                    tool_call_id="c0",
                    seconds=0.25,
                    error=ErrorCode.TOOL_TIMEOUT if fails else None,
                )
            ],
            generate_s=0.5,
            tools_s=0.25,
        ),
        Turn(
            index=1,
            messages=[Message(role="assistant", content="#### 42" if right else "#### 13")],
            response_start=3,
            response_end=5,
            finish_reason="stop",
            generate_s=0.25,
        ),
    ]
    return Trajectory(
        id=trajectory_id(run, tags),
        session_id=trajectory_id(run, tags),
        ground_truth="42",
        tags=tags,
        agent_name="tool_agent",
        data_source="own",
        prompt_ids=[1, 2],
        response_ids=[3, 4, 5, 6, 7],
        response_mask=[1, 1, 0, 1, 1],
        response_logprobs=[-0.5, -0.25, 0.0, -2.0, -0.125],
        weight_versions=[WeightSpan(version=step, start=0, end=2), WeightSpan(version=step + 1, start=3, end=5)],
        prompt_messages=[Message(role="user", content=text)],
        turns=turns,
        reward=None if fails else Reward(score=float(right), components={"correct": float(right)}),
        offered_tools=["add"],
        tool_rewards=[0.0],
        num_turns=4,
        stop_reason=StopReason.ERROR if fails else StopReason.ANSWERED,
        timings=Timings(generate_sequences=0.75, tool_calls=0.25, compute_score=0.125, total=1.5 + n),
        trace_id=TRACE_ID if right else None,
        span_id=SPAN_ID if right else None,
        incidents=[Incident.RETRIED] if right else [],
        incident_services={Incident.RETRIED: ["tools"]} if right else {},
        error=ErrorBody(code=ErrorCode.TOOL_TIMEOUT, message=MESSAGE, retryable=False) if fails else None,
    )


def write_remax_step(folder: RunFolder, step: int) -> None:
    """The rollouts of `write_step` and a greedy one of each prompt, with a score of 1."""
    rollouts = [rollout(folder.name, step, sample, n) for sample in (7, 10) for n in (0, 1)]
    greedy = [rollout(folder.name, step, sample, 2).model_copy(update={"is_baseline": True}) for sample in (7, 10)]
    for baseline in greedy:
        baseline.reward = Reward(score=1.0)
    write_trajectories(folder.path / f"trajectories/step_{step}.parquet", rollouts + greedy)


def mlflow_span(
    number: int, parent: int | None, start: float, end: float, error: str = "", **attributes: str
) -> dict[str, object]:
    """A span in MLflow's reply, of the tools unless attributes are given."""
    values = attributes or {"agentic.service": "tools"}
    return {
        "name": f"span {number}",
        "span_id": base64.b64encode(number.to_bytes(8)).decode(),
        "parent_span_id": base64.b64encode(parent.to_bytes(8)).decode() if parent else "",
        "start_time_unix_nano": str(int(start * 1e9)),
        "end_time_unix_nano": str(int(end * 1e9)),
        "status": {"code": "STATUS_CODE_ERROR", "message": error} if error else {},
        "attributes": [{"key": key, "value": {"string_value": value}} for key, value in values.items()],
    }
