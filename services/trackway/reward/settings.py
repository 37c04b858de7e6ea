"""Settings of the reward service."""

from pydantic import Field

from trackway.serving import ServiceSettings


class RewardSettings(ServiceSettings):
    """The scorers and their limits."""

    extra_scorers: list[str] = Field(default_factory=list)
    """Additional scorers by import path `pkg.mod:Class`: classes with `info` and `score` as in scorers.Scorer."""
    score_timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one score in seconds; a slower one is answered 504."""
    batch_concurrency: int = Field(default=64, ge=1)
    """Concurrent scores of a batch."""
