"""A real SGLang classifies."""

from pathlib import Path

import pytest

from tests.servers.classification import *  # noqa: F403
from tests.services.rollout.tiny_classifier import write_classifier
from tests.sglang.sglang_runs import MARKS
from trackway.rollout.classifiers import open_classifier
from trackway.rollout.engines.remote.sglang import SglangEngine
from trackway.wire.errors import TrackwayError

pytestmark = MARKS


async def test_a_server_without_classification_says_what_it_lacks(engine: SglangEngine, tmp_path: Path) -> None:
    attached = {"engine_url": engine.http.base_url, "model_path": write_classifier(tmp_path)}
    classifier = open_classifier(engine.settings.model_copy(update=attached))
    await classifier.start()
    with pytest.raises(TrackwayError, match="Please add `--is-embedding`"):
        await classifier.classify([5])
    await classifier.stop()
