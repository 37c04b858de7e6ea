"""Settings of the reward service."""

from pathlib import Path

from pydantic import Field

from trackway.reward.functions import RewardFunction
from trackway.reward.models import JudgeSettings, RewardModelSettings
from trackway.reward.weighted import WeightedScorers
from trackway.serving.user_code import OwnCodeSettings


class RewardSettings(OwnCodeSettings):
    """The scorers and their limits."""

    extra_scorers: list[str] = Field(default_factory=list)
    """Additional scorers by import path `pkg.mod:Class`: classes with `info` and `score` as in scorers.Scorer."""
    custom_reward_function: RewardFunction | None = None
    """A function of a Python file that scores every data source, as verl's `custom_reward_function`."""
    functions_file: Path | None = None
    """The file of a process that serves a reward function, which scores every data source. `trackway.train` writes
    it."""
    reward_model: RewardModelSettings | None = None
    """verl's reward model, which `custom_reward_function` asks. Without one, a classifier that scores every data
    source: the fields of reward_model.RewardModelSettings."""
    judges: list[JudgeSettings] = Field(default_factory=list[JudgeSettings])
    """Models that score: `base_url`, `model`, and the other fields of judge.JudgeSettings."""
    weighted_scorers: list[WeightedScorers] = Field(default_factory=list[WeightedScorers])
    """Weighted sums of scorers: `name`, `data_sources`, and `weights` by the name of each scorer, which then scores
    through its sums only."""
    score_timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one score in seconds. A slower one is answered 504."""

    @property
    def own_files(self) -> list[Path]:
        """Files of own code that the settings name."""
        function = self.custom_reward_function
        return [path for path in (function and function.path, self.functions_file) if path is not None]
