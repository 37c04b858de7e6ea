"""The reward service: scorers by data source. A new scorer implements `Scorer`."""

from trackway.reward.scorers import Scorer

__all__ = ["Scorer"]
