"""Classifiers (sequence classification), such as reward models, on torch, vLLM or SGLang: their protocol and admission.

`open_classifier` creates the one of the settings.
"""

import importlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from trackway.rollout.engines import warn_of_experiments
from trackway.rollout.engines.admission import ModelFacts, RetryAfterEstimator, check_prompt, overloaded
from trackway.rollout.engines.protocol import EngineStats
from trackway.rollout.settings import DEFAULT_MAX_LEN, RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError


class Classifier(Protocol):
    """One model on one replica. All methods are called on the same event loop."""

    @property
    def max_len(self) -> int:
        """Longest input in tokens."""
        ...

    async def start(self) -> None:
        """Load the weights and become ready."""
        ...

    async def stop(self) -> None:
        """Stop. Inputs that wait are answered UNAVAILABLE."""
        ...

    async def classify(self, token_ids: Sequence[int]) -> float:
        """Return the logit of an input. Cancelling the call frees its place in the queue.

        Raises INVALID_REQUEST for an input that is too long or has unknown ids, OVERLOADED when the queue is full,
        ENGINE_FAILED when the logit is not finite or the model failed, UNAVAILABLE for a server that has ended.
        """
        ...

    def stuck_for(self) -> float:
        """Seconds without progress although there is work. 0.0 when idle, infinite when a server is lost."""
        ...

    def stats(self) -> EngineStats:
        """Inputs in work and in the queue, and totals since the start. A batch is a step."""
        ...


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


_FIRST_GUESS_S = 1.0


class Admission:
    """Counts inputs in flight: up to `max_num_seqs` in work and `max_queue` that wait."""

    def __init__(self, settings: RolloutSettings, info: ClassifierInfo) -> None:
        self.max_len = settings.max_model_len or min(info.max_positions, DEFAULT_MAX_LEN)
        """Longest input in tokens."""
        self.in_flight = 0
        self.tokens = 0
        """Tokens of all inputs so far."""
        self._vocab_size = info.vocab_size
        self._slots, self._bound = settings.max_num_seqs, settings.max_num_seqs + settings.max_queue
        self._retry_after = RetryAfterEstimator(settings.max_num_seqs, _FIRST_GUESS_S)

    @contextmanager
    def admit(self, token_ids: Sequence[int]) -> Iterator[None]:
        """Hold a place for an input. Raises INVALID_REQUEST and OVERLOADED as `Classifier.classify`."""
        check_prompt(token_ids, self.max_len + 1, self._vocab_size)
        began = time.monotonic()
        if self.in_flight >= self._bound:
            raise overloaded(self._bound, self._retry_after.turn_away(self.in_flight - self._slots, began))
        self.in_flight += 1
        self.tokens += len(token_ids)
        try:
            yield
        finally:
            self._retry_after.left(time.monotonic() - began, self.in_flight)
            self.in_flight -= 1


_CLASSIFIERS = {
    "torch": "trackway.rollout.classifiers.embedded:TorchClassifier",
    "vllm": "trackway.rollout.classifiers.servers:VllmClassifier",
    "sglang": "trackway.rollout.classifiers.servers:SglangClassifier",
}


def open_classifier(settings: RolloutSettings) -> Classifier:
    """The classifier of these settings, not started. Imported lazily, as torch and transformers take seconds.

    Raises:
        TrackwayError: `invalid_request` for an engine without classification, or a model that does not score by one
            number.
    """
    warn_of_experiments(settings)
    if settings.engine not in _CLASSIFIERS:
        message = f"engine: expected {', '.join(_CLASSIFIERS)} for the classifier {settings.model_path}"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, f"{message}, got {settings.engine}; set one of them")
    info = ClassifierInfo.read(settings.model_path, settings.max_position_embeddings)
    module, name = _CLASSIFIERS[settings.engine].split(":")
    return cast(Classifier, getattr(importlib.import_module(module), name)(settings, info))
