"""The embedded classifier: exact scores in any batch, its bounds, and what it refuses to load."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.sim_engine import SIM
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

from tests.services.rollout.tiny_classifier import MARK, logit_of, write_classifier
from trackway.rollout.classifiers import embedded, is_classifier, open_classifier
from trackway.rollout.classifiers.embedded import TorchClassifier, WaitingInput, next_batch
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = pytest.mark.anyio

INPUTS = [[MARK], [5, MARK], [MARK, 5, 6, MARK], [7] * 9, [MARK] * 30 + [0], [9, 8, MARK, 4], [5, 0, 0]]
"""Inputs of several lengths, also ones that end with the padding token."""


@asynccontextmanager
async def started(folder: Path, **more: Any) -> AsyncIterator[TorchClassifier]:
    classifier = open_classifier(RolloutSettings(model_path=folder, device="cpu", **more))
    assert isinstance(classifier, TorchClassifier)
    try:
        await classifier.start()
        yield classifier
    finally:
        await classifier.stop()


def of_transformers(folder: Path, ids: list[int]) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits.item()


def write_encoder(folder: Path) -> None:
    """A BERT of 64 positions with random weights."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=480,
        hidden_size=16,
        intermediate_size=16,
        max_position_embeddings=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.5,
    )
    config.num_labels = 1
    BertForSequenceClassification(config).save_pretrained(folder)


@pytest.mark.parametrize("padding", [0, None])
async def test_a_score_is_that_of_the_input_alone_in_whatever_batch(tmp_path: Path, padding: int | None) -> None:
    folder = write_classifier(tmp_path, padding=padding)
    async with started(folder) as classifier:
        logits = await asyncio.gather(*map(classifier.classify, INPUTS))

    assert logits == pytest.approx([of_transformers(folder, ids) for ids in INPUTS], abs=1e-5)
    known = [(logit, ids) for logit, ids in zip(logits, INPUTS, strict=True) if ids[-1] != padding]
    assert [logit for logit, _ in known] == pytest.approx([logit_of(ids) for _, ids in known], abs=1e-4)


async def test_an_encoder_does_not_see_the_padding_of_a_batch(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    inputs = [[5, 9], [5, 9, 7, 11, 300], [8] * 20]
    async with started(tmp_path) as classifier:
        logits = await asyncio.gather(*map(classifier.classify, inputs))
        assert classifier.stats().steps == 1

    assert logits == pytest.approx([of_transformers(tmp_path, ids) for ids in inputs], abs=1e-5)


async def test_inputs_of_a_request_are_computed_together(tmp_path: Path) -> None:
    async with started(write_classifier(tmp_path)) as classifier:
        await asyncio.gather(*map(classifier.classify, INPUTS))
        stats = classifier.stats()

    assert (stats.steps, stats.prefilled_tokens, stats.waiting) == (1, sum(map(len, INPUTS)), 0)


async def test_a_batch_has_the_oldest_input_and_those_nearest_to_its_length() -> None:
    waiting = [WaitingInput([1] * length) for length in (10, 40, 12, 9, 11, 10)]

    def lengths(most: int, tokens: int, *, pads: bool = True) -> list[int]:
        batch = next_batch(waiting, most, tokens, pads=pads)
        assert batch[0] is waiting[0]
        return [len(chosen.token_ids) for chosen in batch]

    assert lengths(64, 1000) == [10, 10, 9, 11, 12, 40]
    assert lengths(3, 1000) == [10, 10, 9]
    assert lengths(64, 33) == [10, 10, 9]  # 4 of 11 would be 44
    assert lengths(64, 5) == [10]
    assert lengths(64, 1000, pads=False) == [10, 10]


async def test_a_full_queue_and_a_wrong_input_are_refused(tmp_path: Path) -> None:
    async with started(write_classifier(tmp_path), max_num_seqs=1, max_queue=1, max_model_len=8) as classifier:
        answers = await asyncio.gather(*map(classifier.classify, [[MARK]] * 3), return_exceptions=True)
        longest = await classifier.classify([MARK] * 8)
        for ids, expected in (([5] * 9, "1 to 8 prompt tokens, got 9"), ([480], "token ids in 0..479")):
            with pytest.raises(TrackwayError, match=expected) as raised:
                await classifier.classify(ids)
            assert raised.value.code is ErrorCode.INVALID_REQUEST

    assert answers[:2] == pytest.approx([logit_of([MARK])] * 2, abs=1e-4)
    assert longest == pytest.approx(logit_of([MARK] * 8), abs=1e-4)
    assert isinstance(answers[2], TrackwayError) and answers[2].code is ErrorCode.OVERLOADED


async def test_a_context_length_beyond_the_models_positions_is_refused(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "rotary")

    def length(**changes: Any) -> int:
        return open_classifier(RolloutSettings(model_path=folder, device="cpu", **changes)).max_len

    assert (length(), length(max_model_len=512), length(max_position_embeddings=5000)) == (512, 512, 4096)
    for refused in ({"max_model_len": 513}, {"max_model_len": 1000, "max_position_embeddings": 999}):
        with pytest.raises(TrackwayError) as raised:
            length(**refused)
        positions = refused.get("max_position_embeddings", 512)
        assert raised.value.code is ErrorCode.INVALID_REQUEST
        assert raised.value.message == (
            f"max_model_len: expected at most {positions}, the most that the model's max_position_embeddings allow, "
            f"got {refused['max_model_len']}; lower it (of a run: reward.reward_model.rollout.max_model_len), or set "
            "max_position_embeddings for a model that reads more"
        )

    async with started(folder, max_position_embeddings=600) as classifier:
        assert await classifier.classify([MARK] * 600) == pytest.approx(logit_of([MARK] * 600), abs=1e-4)


async def test_an_encoder_has_no_weights_for_more_positions_than_it_learned(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    with pytest.raises(
        TrackwayError, match=r"got none that fit for bert\.embeddings\.position_embeddings\.weight;"
    ) as raised:
        async with started(tmp_path, max_position_embeddings=65):
            pass
    assert raised.value.code is ErrorCode.WEIGHTS_CORRUPT


async def test_a_roberta_reads_fewer_tokens_than_it_has_positions(tmp_path: Path) -> None:
    config = XLMRobertaConfig(
        vocab_size=40,
        hidden_size=8,
        intermediate_size=8,
        max_position_embeddings=12,
        num_hidden_layers=1,
        num_attention_heads=1,
        pad_token_id=1,
    )
    config.num_labels = 1
    XLMRobertaForSequenceClassification(config).save_pretrained(tmp_path)

    async with started(tmp_path) as classifier:
        assert classifier.max_len == 10
        assert await classifier.classify([5] * 10) == pytest.approx(of_transformers(tmp_path, [5] * 10), abs=1e-5)
    with pytest.raises(
        TrackwayError, match="expected at most 10, the most that the model's max_position_embeddings allow, got 11"
    ):
        open_classifier(RolloutSettings(model_path=tmp_path, device="cpu", max_model_len=11))


async def test_a_caller_who_leaves_frees_his_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computing, go_on = asyncio.Event(), asyncio.Event()
    loop, computed = asyncio.get_running_loop(), list[int]()
    logits_of = embedded.logits_of

    def held(model: Any, ids: list[list[int]]) -> list[float]:
        loop.call_soon_threadsafe(computing.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(timeout=60)
        computed.append(len(ids))
        return logits_of(model, ids)

    monkeypatch.setattr(embedded, "logits_of", held)
    async with started(write_classifier(tmp_path), max_num_seqs=1, max_queue=1) as classifier, asyncio.timeout(60):
        first = asyncio.create_task(classifier.classify([MARK]))
        await computing.wait()
        second = asyncio.create_task(classifier.classify([MARK]))
        await asyncio.sleep(0)
        assert (classifier.stats().running, classifier.stats().waiting) == (1, 1)
        assert classifier.stuck_for() > 0
        second.cancel()
        await asyncio.wait([second])
        third = asyncio.create_task(classifier.classify([5, MARK]))
        go_on.set()
        assert [await first, await third] == pytest.approx([logit_of([MARK]), logit_of([5, MARK])], abs=1e-4)

    assert computed == [1, 1]
    assert classifier.stuck_for() == float("inf")


async def test_a_failed_batch_fails_its_inputs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Any] = [RuntimeError("out of memory"), [float("nan")]]

    def failing(model: Any, ids: list[list[int]]) -> list[float]:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    async with started(write_classifier(tmp_path)) as classifier:
        with monkeypatch.context() as patch:
            patch.setattr(embedded, "logits_of", failing)
            for expected in ("RuntimeError: out of memory", "a finite logit, got nan"):
                with pytest.raises(TrackwayError, match=expected) as raised:
                    await classifier.classify([MARK])
                assert raised.value.code is ErrorCode.ENGINE_FAILED
        assert await classifier.classify([MARK]) == pytest.approx(logit_of([MARK]), abs=1e-4)


async def test_a_stopped_classifier_answers_those_that_wait(tmp_path: Path) -> None:
    async with started(write_classifier(tmp_path)) as classifier:
        waiting = asyncio.create_task(classifier.classify([MARK]))
        await asyncio.sleep(0)

    with pytest.raises(TrackwayError) as raised:
        await waiting
    assert raised.value.code is ErrorCode.UNAVAILABLE
    with pytest.raises(TrackwayError, match="starting or has stopped"):
        await classifier.classify([MARK])


async def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=480, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    config.num_labels = 1
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    assert not is_classifier(tmp_path)
    file.write_text(file.read_text().replace("LlamaForCausalLM", "LlamaForSequenceClassification"))
    assert is_classifier(tmp_path)

    classifier = open_classifier(RolloutSettings(model_path=tmp_path, device="cpu"))
    with pytest.raises(TrackwayError, match=r"got none that fit for score\.weight") as raised:
        await classifier.start()
    assert raised.value.code is ErrorCode.WEIGHTS_CORRUPT


async def test_a_model_of_several_labels_and_an_engine_without_classification_are_refused(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path, labels=2)
    with pytest.raises(TrackwayError, match=r"one label in .*, whose logit is the score, got 2: LABEL_0, LABEL_1"):
        open_classifier(RolloutSettings(model_path=folder))
    with pytest.raises(TrackwayError, match=rf"engine: expected torch, vllm, sglang for the classifier .*, got {SIM}"):
        open_classifier(RolloutSettings(model_path=folder, engine=SIM))
    assert not is_classifier(tmp_path / "none")
