"""Facts about a classifier in its `config.json`. Read without torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from trackway.rollout.engines.remote.model_info import ModelFacts
from trackway.wire.errors import ErrorCode, TrackwayError

_SUFFIX = "ForSequenceClassification"
_DEFAULT_LABELS = {"0": "LABEL_0", "1": "LABEL_1"}
"""transformers' labels of a configuration without any."""

_OF_ROBERTA = frozenset(
    {
        *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod", "camembert", "data2vec-text"),
        *("ibert", "longformer", "luke", "mpnet"),
    }
)
"""Model types whose first position is that after the padding token's id, so that they read fewer tokens."""


class _ConfigFile(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model_type: str = ""
    pad_token_id: int | None = None
    architectures: list[str] | None = None
    id2label: dict[str, str] | None = None
    problem_type: str | None = None


def is_classifier(folder: Path) -> bool:
    """Return whether the folder's model is a `*ForSequenceClassification`. False for a folder without `config.json`."""
    try:
        file = _ConfigFile.model_validate_json((folder / "config.json").read_text())
    except (OSError, ValidationError):
        return False
    return any(name.endswith(_SUFFIX) for name in file.architectures or [])


@dataclass(frozen=True)
class ClassifierInfo:
    """A classifier that scores by one number."""

    vocab_size: int
    max_positions: int
    """Longest input in tokens that the model reads."""
    label: str
    is_regression: bool
    """True if the score is the logit itself, without a sigmoid."""

    @classmethod
    def read(cls, folder: Path, max_positions: int | None = None) -> Self:
        """Reads `config.json`. Raises INVALID_REQUEST for a model with several labels, or an unreadable folder.

        `max_positions` replaces `max_position_embeddings`.
        """
        facts = ModelFacts.read(folder, max_positions)
        file = _ConfigFile.model_validate(json.loads((folder / "config.json").read_text()))
        labels = [*(_DEFAULT_LABELS if file.id2label is None else file.id2label).values()]
        if len(labels) != 1:
            message = f"expected a classifier with one label in {folder}, whose logit is the score, got {len(labels)}"
            remedy = "take a reward model (num_labels=1), or ask this one in a function of your own"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, f"{message}: {', '.join(labels)}; {remedy}")
        unread = 1 + (1 if file.pad_token_id is None else file.pad_token_id) if file.model_type in _OF_ROBERTA else 0
        return cls(facts.vocab_size, facts.max_positions - unread, labels[0], file.problem_type == "regression")
