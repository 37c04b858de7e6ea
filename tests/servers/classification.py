"""A real server classifies: its logits are transformers', and the score of the reward service."""

import asyncio
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.services.rollout.tiny_classifier import MARK, logit_of, write_classifier
from tests.vllm.vllm_runs import DEADLINE_S
from trackway.rollout.classifiers import open_classifier
from trackway.rollout.classifiers.embedded import load_classifier, logits_of
from trackway.wire.errors import ErrorCode, TrackwayError

INPUTS = [[MARK], [5, MARK], [9, 8, MARK, 4], [7] * 40, [MARK] * 3 + [6] * 60]


async def test_logits_are_those_of_transformers(server: ModuleType, environment: Path, tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "model")
    model = load_classifier(folder, torch.device("cpu"), torch.float32)
    settings = server.settings_of(folder, tmp_path / "log", max_model_len=128, dtype="float32")
    classifier = open_classifier(settings.model_copy(update={"engine_args": server.SERVER_ARGUMENTS}))
    try:
        await classifier.start()
        async with asyncio.timeout(DEADLINE_S):
            logits = await asyncio.gather(*map(classifier.classify, INPUTS))
            with pytest.raises(TrackwayError, match="expected 1 to 128 prompt tokens, got 129") as raised:
                await classifier.classify([5] * 129)
    finally:
        await classifier.stop()

    assert logits == pytest.approx([logits_of(model, [ids])[0] for ids in INPUTS], abs=1e-4)
    assert logits == pytest.approx([logit_of(ids) for ids in INPUTS], abs=1e-4)
    assert raised.value.code is ErrorCode.INVALID_REQUEST
