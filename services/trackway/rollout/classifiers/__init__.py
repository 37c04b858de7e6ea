"""Classifiers (sequence classification), such as reward models. `open_classifier` creates the one of the settings."""

import importlib
from typing import cast

from trackway.rollout.classifiers.protocol import Classifier, ClassifierInfo, is_classifier
from trackway.rollout.engines import warn_of_experiments
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError

_CLASSIFIERS = {
    "torch": "trackway.rollout.classifiers.embedded:TorchClassifier",
    "vllm": "trackway.rollout.classifiers.servers:VllmClassifier",
    "sglang": "trackway.rollout.classifiers.servers:SglangClassifier",
}

__all__ = ["Classifier", "ClassifierInfo", "is_classifier", "open_classifier"]


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
