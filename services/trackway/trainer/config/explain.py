"""What a key means: its sentence, its default, and whether it is verl's, ours, moved, or without effect here."""

from typing import NamedTuple

from pydantic import JsonValue

from trackway.trainer.config.compose import known_keys, leaves, unknown_key
from trackway.trainer.config.models import RunConfig
from trackway.trainer.config.unsupported_keys import DEPLOYMENT, MOVED, NO_EFFECT, without_effect


class Explanation(NamedTuple):
    """One key; the meaning of one without effect is the reason."""

    key: str
    meaning: str
    default: JsonValue
    source: str
    honoured: bool = True
    """False for a key that has moved or has no effect: it has no default."""


def explain(word: str = "") -> list[Explanation]:
    """The key of that name, or all below that section, or, for an empty word, all there are.

    Raises TrackwayError(INVALID_REQUEST) naming the nearest keys.
    """
    found = [one for one in _all() if not word or one.key == word or one.key.startswith(f"{word}.")]
    if found:
        return found
    covering = without_effect(word)
    if covering is not None:
        return [Explanation(word, NO_EFFECT[covering], None, "verl's, no effect here", False)]
    raise unknown_key(word, (one.key for one in _all()))


def _all() -> list[Explanation]:
    defaults = leaves(RunConfig().model_dump(mode="json"))
    honoured = [
        Explanation(key, " ".join(sentence.split()), defaults.get(key), _source(key))
        for key, sentence in known_keys().items()
    ]
    moved = [Explanation(old, f"Read as {new}.", None, "verl's, moved", False) for old, new in MOVED.items()]
    ignored = [Explanation(key, reason, None, "verl's, no effect here", False) for key, reason in NO_EFFECT.items()]
    return [*honoured, *moved, *ignored]


def _source(key: str) -> str:
    if key in DEPLOYMENT:
        return "verl's; decides how main_ppo deploys the services"
    return "ours" if key.startswith("trackway.") else "verl's"
