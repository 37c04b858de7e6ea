"""Which trajectories of a step are trained on, and why the others are not. Decided here, once per trajectory.

`GroupFilter` decides it for whole groups, before a step takes them. `OverlongPenalty` lowers their scores before.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from trackway.learner.measuring import Metrics
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Trajectory

INFRASTRUCTURE = frozenset(
    {
        ErrorCode.INSTANCE_LOST,
        ErrorCode.WEIGHTS_BEHIND,
        ErrorCode.REQUEST_INCOMPLETE,
        ErrorCode.OVERLOADED,
        ErrorCode.PAUSED,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.ENGINE_FAILED,
        ErrorCode.WEIGHTS_CORRUPT,
        ErrorCode.WEIGHTS_STALE,
        ErrorCode.DISK_FULL,
        ErrorCode.NOT_WRITABLE,
        ErrorCode.UNAVAILABLE,
    }
)
"""Errors of a service, a machine or the network. The others come from the row, the agent loop or a tool."""


class TrainStatus(StrEnum):
    """The training status of a trajectory: trained, or the first reason why not."""

    USED = "used"
    INFRASTRUCTURE = "infrastructure"
    """It failed with an error of INFRASTRUCTURE."""
    ERROR = "error"
    """It failed with another error."""
    NO_MODEL_TOKEN = "no_model_token"
    """The model wrote no token of the response."""
    GUIDED = "guided"
    """All that the model wrote was guided by a grammar (`response_format`), which the learner lacks."""
    UNSCORED = "unscored"
    STALE = "stale"
    """Its oldest token was sampled from weights that are too many versions behind."""
    NO_VARIANCE = "no_variance"
    """All rollouts of its group have the same value of `algorithm.filter_groups.metric`."""
    BASELINE = "baseline"
    """A greedy rollout, of which only the score is used, as the baseline of its group."""

    @property
    def feedback(self) -> str:
        """The value of the feedback `fate` on the trajectory's trace, and its state in the account of rollouts."""
        return _FEEDBACK[self]


_FEEDBACK = {
    TrainStatus.USED: "used",
    TrainStatus.INFRASTRUCTURE: "dropped_infrastructure",
    TrainStatus.ERROR: "dropped_failed",
    TrainStatus.NO_MODEL_TOKEN: "dropped_filtered",
    TrainStatus.GUIDED: "dropped_filtered",
    TrainStatus.UNSCORED: "dropped_failed",
    TrainStatus.STALE: "dropped_stale",
    TrainStatus.NO_VARIANCE: "dropped_filtered",
    TrainStatus.BASELINE: "baseline",
}
_TRAINABLE = (TrainStatus.USED, TrainStatus.STALE, TrainStatus.NO_VARIANCE, TrainStatus.BASELINE)
_UNTRAINABLE = [status for status in TrainStatus if status not in _TRAINABLE]


@dataclass(frozen=True)
class FilteredBatch:
    """The trajectories of a step, and the status of each in the same order."""

    trajectories: Sequence[Trajectory]
    statuses: Sequence[TrainStatus]

    @property
    def used(self) -> list[Trajectory]:
        """The trajectories to train on, in their order."""
        pairs = zip(self.trajectories, self.statuses, strict=True)
        return [trajectory for trajectory, status in pairs if status is TrainStatus.USED]

    @property
    def counts(self) -> dict[str, int]:
        """Return how many trajectories get each value of the feedback `fate`. `baseline` only if there is one."""
        counts = Counter(status.feedback for status in self.statuses)
        values = dict.fromkeys(_FEEDBACK.values())
        return {value: counts[value] for value in values if value != TrainStatus.BASELINE or counts[value]}

    def metrics(self) -> Metrics:
        """Return how many trajectories were dropped, by reason, and verl's share of the failed ones."""
        untrainable = {reason: self.statuses.count(reason) for reason in _UNTRAINABLE}
        sampled = len(self.statuses) - self.statuses.count(TrainStatus.BASELINE)
        return {
            **{f"training/{value}": float(count) for value, count in self.counts.items() if value != "used"},
            **{f"training/left_out/{reason}": float(count) for reason, count in untrainable.items()},
            "response/aborted_ratio": sum(untrainable.values()) / sampled,
        }


def filter_trajectories(trajectories: Sequence[Trajectory], version: int, max_staleness: int | None) -> FilteredBatch:
    """The status of each trajectory when weights `version` are trained.

    `max_staleness` is verl's `max_off_policy_threshold` with its strategy `drop`: the most versions that the oldest
    token may be behind. None keeps all.
    """
    statuses = [train_status(trajectory, version, max_staleness) for trajectory in trajectories]
    return FilteredBatch(trajectories, statuses)


def train_status(trajectory: Trajectory, version: int, max_staleness: int | None) -> TrainStatus:
    """The status of one trajectory; arguments as in `filter_trajectories`."""
    if trajectory.error is not None:
        return TrainStatus.INFRASTRUCTURE if trajectory.error.code in INFRASTRUCTURE else TrainStatus.ERROR
    if trajectory.is_baseline:
        return TrainStatus.BASELINE
    if not any(any(row.response_mask) for row in trajectory.rows):
        guided = any(turn.guided for row in trajectory.rows for turn in row.turns)
        return TrainStatus.GUIDED if guided else TrainStatus.NO_MODEL_TOKEN
    if trajectory.reward is None:
        return TrainStatus.UNSCORED
    oldest = min((span.version for row in trajectory.rows for span in row.weight_versions), default=version)
    stale = max_staleness is not None and version - oldest > max_staleness
    return TrainStatus.STALE if stale else TrainStatus.USED


REWARD_BASELINE = "reward_baseline"
"""Component of a reward: the score of a greedy rollout of the same prompt, under verl's name."""
UNSHAPED = "score"
"""The reward component with the score before the penalty on long responses, where there is one."""
_REWARD_METRICS = ("reward", "seq_reward", "seq_final_reward")
"""verl's names of the reward: 0.9.1 has the first, its DAPO recipe the others."""


@dataclass(frozen=True)
class GroupFilter:
    """Leaves out groups whose rollouts all have the same value of a metric (DAPO, arXiv:2503.14476, section 3.2)."""

    metric: str
    """verl's `algorithm.filter_groups.metric`."""
    at_once: int = 1
    """Prompts that replace what was left out are requested in multiples of this."""
    max_prompts: int | None = None
    """Most prompts that one step may take, those left out included."""

    def sift(self, trajectories: Sequence[Trajectory]) -> FilteredBatch | None:
        """Reason why a group is left out, or None for a group that is kept.

        Failed rollouts have no value. A group with fewer than two values is kept, as in verl
        (verl/trainer/ppo/v1/replay_buffer.py, `_dapo_filtered_keys`). Raises TrackwayError for a missing metric.
        """
        statuses = [train_status(trajectory, 0, None) for trajectory in trajectories]
        pairs = zip(trajectories, statuses, strict=True)
        values = [metric_value(trajectory, self.metric) for trajectory, status in pairs if status is TrainStatus.USED]
        if len(values) < 2 or min(values) != max(values):
            return None
        left_out = [TrainStatus.NO_VARIANCE if status is TrainStatus.USED else status for status in statuses]
        return FilteredBatch(trajectories, left_out)


def metric_value(trajectory: Trajectory, metric: str) -> float:
    """The value of `algorithm.filter_groups.metric` for a scored trajectory. TrackwayError when it has none."""
    if trajectory.reward is None:
        raise ValueError(f"expected a scored trajectory, got {trajectory.id} without a reward; leave it out")
    score, components = trajectory.reward.score, trajectory.reward.components
    if metric in _REWARD_METRICS:
        return score
    if metric in components:
        return components[metric]
    if metric in (UNSHAPED, "acc"):
        return components.get(UNSHAPED, score)
    message = (
        f"algorithm.filter_groups.metric: expected a component of the reward, got {metric!r}, and {trajectory.id} has "
        f"{', '.join(components) or 'none'}; take one of them, reward or acc"
    )
    raise TrackwayError(ErrorCode.INVALID_REQUEST, message)


PENALTY, IS_PENALISED = "overlong_reward", "overlong"
"""Components of a penalised reward, under verl's names."""


@dataclass(frozen=True)
class OverlongPenalty:
    """Lowers the score in the last `buffer` tokens before `max_length`, linearly down to `factor`.

    The formula follows verl's reward manager `dapo` (verl/experimental/reward_loop/reward_manager/dapo.py).
    """

    max_length: int
    buffer: int
    factor: float
    log: bool = False
    """Add the penalty to the reward's components."""

    def penalty(self, length: int) -> float:
        """Penalty on the score of a response of `length` tokens, observations included; at most 0."""
        exceeding = length - (self.max_length - self.buffer)
        return min(-exceeding / self.buffer * self.factor, 0.0)

    def applied(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with the penalty in its score. The score before is the component `score`.

        Of several rows of tokens the last one counts. A trajectory without a reward is unchanged.
        """
        if trajectory.reward is None:
            return trajectory
        score, components = trajectory.reward.score, trajectory.reward.components
        penalty = self.penalty(len(trajectory.rows[-1].response_ids))
        more = {PENALTY: penalty, IS_PENALISED: float(penalty < 0)} if self.log else {}
        changes = {"score": score + penalty, "components": {**components, UNSHAPED: score, **more}}
        return trajectory.model_copy(update={"reward": trajectory.reward.model_copy(update=changes)})
