"""The reward service: scorers by data source. To add one, decorate a function with `@scorer`, or implement `Scorer`."""

from trackway.reward.functions import scorer
from trackway.reward.scorers import Scorer

__all__ = ["Scorer", "scorer"]
