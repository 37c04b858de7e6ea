"""The reward service: scorers by data source. `Scorer` is what a new scorer looks like."""

from trackway.reward.scorers import Scorer

__all__ = ["Scorer"]
