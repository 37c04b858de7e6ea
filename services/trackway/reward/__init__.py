"""The reward service: scorers by data source. To add a scorer, implement `Scorer`."""

from trackway.reward.scorers import Scorer

__all__ = ["Scorer"]
