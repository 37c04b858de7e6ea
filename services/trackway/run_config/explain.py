"""Explains configuration keys: description, default, and origin (verl's, ours, moved, refused, or without effect)."""

from typing import NamedTuple

from pydantic import JsonValue

from trackway.run_config.algorithm import ESTIMATORS
from trackway.run_config.compose import free_key, known_keys, leaves, unknown_key
from trackway.run_config.models import RunConfig
from trackway.run_config.policy import LOSSES
from trackway.run_config.supervised import spelled
from trackway.run_config.unsupported_keys import (
    DEPLOYMENT,
    MOVED,
    NO_EFFECT,
    ONLY,
    OTHERS,
    Only,
    limited,
    without_effect,
)

NAMES = {"algorithm.adv_estimator": ESTIMATORS, "actor_rollout_ref.actor.policy_loss.loss_mode": LOSSES}
"""Names that a key accepts, other than a user's own function."""


class Explanation(NamedTuple):
    """A key's explanation. For a key without effect, `meaning` is the reason."""

    key: str
    meaning: str
    default: JsonValue
    source: str
    honoured: bool = True
    """False for a key that was moved, has no effect or only one value. It has no default."""


def explain(word: str = "") -> list[Explanation]:
    """The key of that name, or all keys of that section. An empty word returns all keys.

    Raises TrackwayError(INVALID_REQUEST) naming the nearest keys.
    """
    explanations, name = _all(), free_key(word) or spelled(word)
    matches = [known for known in explanations if not name or known.key == name or known.key.startswith(f"{name}.")]
    if matches:
        return matches
    only = limited(word)
    if only is not None:
        return [_of_few_values(word, ONLY[only])]
    covering = without_effect(word)
    if covering is not None:
        return [Explanation(word, NO_EFFECT[covering], None, "verl's, no effect here", False)]
    raise unknown_key(word, (explanation.key for explanation in explanations))


def _all() -> list[Explanation]:
    defaults = leaves(RunConfig().model_dump(mode="json"))
    honoured = [
        Explanation(key, _meaning(key, sentence), defaults.get(key), _source(key))
        for key, sentence in known_keys().items()
    ]
    moved = [Explanation(old, f"Read as {new}.", None, "verl's, moved", False) for old, new in MOVED.items()]
    few = [_of_few_values(key, only) for key, only in ONLY.items()]
    ignored = [Explanation(key, reason, None, "verl's, no effect here", False) for key, reason in NO_EFFECT.items()]
    return [*honoured, *moved, *few, *ignored]


def _meaning(key: str, sentence: str) -> str:
    """Meaning of the key, the names that it takes, and verl's values that it does not have."""
    other, names = OTHERS.get(key), NAMES.get(key)
    refused = f" verl's {', '.join(other.values)} is refused: {other.remedy}." if other else ""
    listed = f" One of {', '.join(names)}, or your own function as `module:function`." if names else ""
    return " ".join(sentence.split()) + listed + refused


def _of_few_values(key: str, only: Only) -> Explanation:
    return Explanation(key, f"only {only.allowed}: {only.remedy}", None, "verl's, other values are refused", False)


def _source(key: str) -> str:
    if key in DEPLOYMENT:
        return "verl's; decides how main_ppo deploys the services"
    return "ours" if key.startswith("trackway.") else "verl's"
