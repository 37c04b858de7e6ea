"""What must hold of a run however its processes were killed, held against a run that was left alone."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.chaos.fault_injection import ChaosRun
from tests.chaos.fault_schedule import Target
from trackway.traces import rules
from trackway.traces.store import TraceStore
from trackway.traces.tree import SERVICE_OF_SPAN, TraceTree
from trackway.traces.verify import Gap, settle
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories
from trackway.wire.trainer import RunInfo
from trackway.wire.trajectory import Trajectory

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPORT_S = 5.0
"""A span leaves its process within this time of its end: it waits 1 s for its batch, which is then sent or spooled."""
_OF_PROMPTS = ("training/global_step", "training/epoch", "prompt_length/")
"""Metrics that follow from the rows alone, whatever the policy writes."""
_SPAN_COUNT = re.compile(r"\d+ of \d+ (\w+) spans")
_OF_THE_AGENT = ("the root is missing", "the trace is still IN_PROGRESS", "the trace is absent")


class Rollout(NamedTuple):
    """What a trajectory is, without what depends on time, on traces and on the run's name."""

    key: str
    """`<step>/<sample_index>/<rollout_n>`, with `val` before the step in validation."""
    prompt: str
    content: str


def trajectories_of(folder: Path) -> list[Trajectory]:
    """Every trajectory that a run used, in the order of its files."""
    files = sorted((folder / "trajectories").glob("*.parquet"))
    return [trajectory for file in files for trajectory in read_trajectories(file)]


def rollout_of(trajectory: Trajectory) -> Rollout:
    """The parts of a trajectory that can be compared between runs."""
    prompt = {"prompt_ids": trajectory.prompt_ids, "agent": trajectory.agent_name, "source": trajectory.data_source}
    turns = [
        {"text": [message.model_dump(mode="json") for message in turn.messages], "end": turn.response_end}
        for turn in trajectory.turns
    ]
    content = {
        "response_ids": trajectory.response_ids,
        "response_mask": trajectory.response_mask,
        "turns": turns,
        "reward": None if trajectory.reward is None else trajectory.reward.model_dump(mode="json"),
        "stop_reason": trajectory.stop_reason,
    }
    return Rollout(trajectory.id.split("/", 1)[1], json.dumps(prompt), json.dumps(content))


def rows_of(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Each row of metrics: its step and the values that are those of every run of these rows.

    Of all steps these are the metrics of the prompts, and of the first validation, by the model's own weights, all but
    the seconds.
    """

    def is_compared(name: str, step: int) -> bool:
        return name.startswith(_OF_PROMPTS if step else "val-") and "/seconds/" not in name

    return [
        (row.step, {name: value for name, value in row.data.items() if is_compared(name, row.step)})
        for row in RunFolder(folder).rows()
    ]


def drift_of(folder: Path) -> list[float]:
    """Per training step, the largest difference of a token's logprob between the engine and the learner."""
    return [row.data["training/rollout_logprob_diff_max"] for row in RunFolder(folder).rows() if row.step > 0]


def of_the_first_weights(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Those that the model's own weights made: of the first validation and the first step."""
    return [rollout for rollout in rollouts if rollout.key.split("/")[0] in ("val0", "1")]


def unexplained_gaps(store: TraceStore, chaos: ChaosRun, wait_s: float) -> list[Gap]:
    """What the traces of the run still lack after `wait_s` seconds and no killed process explains."""
    traced = [trajectory for trajectory in trajectories_of(chaos.folder.path) if trajectory.trace_id]

    def rule(tree: TraceTree | None, trajectory: Trajectory) -> list[str]:
        return unexplained(trajectory.id, rules.gaps(tree, trajectory), chaos)

    return settle(store, traced, wait_s, rule)


def unexplained(trajectory_id: str, reasons: list[str], chaos: ChaosRun) -> list[str]:
    """The reasons of a gap, none when killed processes explain them all: their last spans died with them."""
    windows = {Target(service): _windows(chaos, Target(service)) for service in set(SERVICE_OF_SPAN.values())}
    return [] if _are_explained(trajectory_id, reasons, windows) else reasons


def _windows(chaos: ChaosRun, service: Target) -> list[range]:
    """The steps whose spans may have been in a replica of the service when it was killed."""
    windows: list[range] = []
    for injection in chaos.injections:
        if injection.fault.target is service and not injection.fault.stop_s:
            exported = [step for seen, step in chaos.steps_seen if seen <= injection.since - EXPORT_S]
            windows.append(range(max(exported, default=0), injection.step_after + 2 + chaos.ahead))
    return windows


def _are_explained(trajectory_id: str, reasons: list[str], windows: Mapping[Target, Sequence[range]]) -> bool:
    step = int(trajectory_id.split("/")[1].removeprefix("val"))
    killed = {service for service, ranges in windows.items() if any(step in steps for steps in ranges)}
    return bool(killed) and all(_explains(reason, killed) for reason in reasons)


def _explains(reason: str, killed: set[Target]) -> bool:
    if count := _SPAN_COUNT.match(reason):
        return Target(SERVICE_OF_SPAN[count[1]]) in killed
    return reason.endswith("has lost its parent") or (reason in _OF_THE_AGENT and Target.AGENT in killed)


def mlflow_differences(client: "MlflowClient", info: RunInfo) -> list[str]:
    """What MLflow's run lacks or has differently from the run's folder, a sentence each."""
    assert info.experiment_id and info.run_id
    own = client.search_runs([info.experiment_id], filter_string=f"tags.`trackway.run_uid` = '{info.uid}'")
    if [found.info.run_id for found in own] != [info.run_id]:
        return [f"expected one run {info.run_id} in MLflow, got {[found.info.run_id for found in own]}"]
    stored = client.get_run(info.run_id).info
    differences = [] if stored.status == "FINISHED" and stored.end_time else [f"MLflow's run is {stored.status}"]
    expected: dict[str, dict[int, float]] = {}
    for row in RunFolder(Path(info.folder)).rows():
        for name, value in row.data.items():
            expected.setdefault(name.replace("@", "_at_"), {})[row.step] = value
    for name, values in expected.items():
        history = sorted(client.get_metric_history(info.run_id, name), key=lambda metric: metric.timestamp)
        newest = {metric.step: metric.value for metric in history}  # a step that was trained again has a newer row
        if newest != values:
            differences.append(f"{name}: expected {values}, got {newest}")
    return differences
