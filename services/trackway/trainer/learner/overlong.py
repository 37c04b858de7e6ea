"""DAPO's penalty on long responses, as part of the reward (arXiv:2503.14476, section 3.4)."""

from dataclasses import dataclass

from trackway.trainer.learner.filtering import UNSHAPED
from trackway.wire.trajectory import Trajectory

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
