"""Settings of the reward service."""

from pydantic import Field

from trackway.serving import ServiceSettings


class RewardSettings(ServiceSettings):
    """Which scorers there are, and how long one may take."""

    extra_scorers: list[str] = Field(default_factory=list)
    """Further scorers by import path `pkg.mod:Class`: classes with `info` and `score` as in scorers.Scorer."""
    score_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that one score may take; then it is answered 504."""
    batch_concurrency: int = Field(default=64, ge=1)
    """Scores of one batch that run at the same time."""
