"""Classifiers behind the HTTP APIs of vLLM, here a fake, and SGLang; `tests/servers` has real ones."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from tests.services.rollout.engines.remote import fake_server
from tests.services.rollout.engines.remote.sglang import sglang_fake
from tests.waiting import async_until
from trackway.rollout.classifiers import open_classifier
from trackway.rollout.classifiers.servers import ServerClassifier
from trackway.rollout.settings import RolloutSettings
from trackway.system import free_port
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[4]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder of which only the fake knows weights: their number, 3."""
    folder = sglang_fake.write_weights(tmp_path / "model", 3)
    sizes = {"vocab_size": sglang_fake.VOCAB, "max_position_embeddings": 256}
    config = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def classifier_of(folder: Path, engine: str, **more: Any) -> ServerClassifier:
    classifier = open_classifier(RolloutSettings.model_validate({"engine": engine, "model_path": folder, **more}))
    assert isinstance(classifier, ServerClassifier)
    return classifier


def test_sglang_is_started_for_embeddings(folder: Path) -> None:
    more = {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.3, "max_num_seqs": 8, "max_model_len": 100}
    classifier = classifier_of(folder, "sglang", engine_python="python", enforce_eager=True, **more)
    assert classifier._command(1) == [
        *("python", "-m", "sglang.launch_server", "--model-path", str(folder), "--served-model-name", "policy"),
        *("--host", "127.0.0.1", "--port", "1", "--dtype", "bfloat16", "--context-length", "107"),
        *("--max-running-requests", "8", "--tp-size", "2", "--mem-fraction-static", "0.3"),
        *("--is-embedding", "--disable-cuda-graph"),
    ]


async def test_a_classifier_that_has_not_started_is_unavailable(folder: Path) -> None:
    with pytest.raises(TrackwayError, match="starting or has stopped"):
        await classifier_of(folder, "sglang", engine_python="python").classify([5])


class FakeVllm:
    """vLLM's `/classify` for one list of token ids."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.probs = [0.25]
        self.answers = asyncio.Event()
        self.answers.set()
        self.app = FastAPI()
        self.app.get("/health")(self.health)
        self.app.post("/classify")(self.classify)

    async def health(self) -> Response:
        return Response()

    async def classify(self, body: dict[str, Any]) -> Response:
        self.asked.append(body)
        await self.answers.wait()
        data = [{"index": 0, "label": "LABEL_0", "probs": self.probs, "num_classes": len(self.probs)}]
        usage = {"prompt_tokens": 2, "total_tokens": 2, "completion_tokens": 0}
        reply = {"id": "classify-1", "object": "list", "created": 1, "model": "policy", "data": data, "usage": usage}
        return JSONResponse(reply)


async def test_a_running_vllm_is_asked_for_logits_of_token_ids(folder: Path) -> None:
    fake = FakeVllm()
    async with fake_server.serving(fake.app, free_port()) as url, asyncio.timeout(60):
        classifier = classifier_of(folder, "vllm", engine_url=url, max_num_seqs=1, max_queue=0)
        await classifier.start()
        assert await classifier.classify([5, 6]) == 0.25
        assert fake.asked == [{"model": "policy", "input": [5, 6], "use_activation": False}]

        fake.answers.clear()
        waiting = asyncio.create_task(classifier.classify([5]))
        await async_until(lambda: len(fake.asked) >= 2)
        assert (classifier.stats().running, classifier.stuck_for() > 0) == (1, True)
        with pytest.raises(TrackwayError) as full:
            await classifier.classify([5])
        assert full.value.code is ErrorCode.OVERLOADED
        fake.answers.set()
        assert await waiting == 0.25
        assert (classifier.stats().running, classifier.stuck_for()) == (0, 0.0)

        for probs, expected in (([0.5, 0.5], "/classify with one score"), ([], "/classify with one score")):
            fake.probs = probs
            with pytest.raises(TrackwayError, match=expected) as raised:
                await classifier.classify([5])
            assert raised.value.code is ErrorCode.ENGINE_FAILED
        asked = len(fake.asked)
        with pytest.raises(TrackwayError, match="expected 1 to 256 prompt tokens, got 257"):
            await classifier.classify([5] * 257)
        assert len(fake.asked) == asked
        await classifier.stop()


@pytest.mark.parametrize(("engine", "option"), [("vllm", "--hf-overrides"), ("sglang", "--json-model-override-args")])
def test_a_server_is_told_of_a_longest_input_that_the_models_folder_does_not_name(
    folder: Path, engine: str, option: str
) -> None:
    plain = classifier_of(folder, engine, engine_python="python")
    longer = classifier_of(folder, engine, engine_python="python", max_position_embeddings=900)

    unused = 7 if engine == "sglang" else 0
    assert (plain.max_len, longer.max_len) == (256 - unused, 900 - unused)
    assert option not in plain._command(1)
    command = longer._command(1)
    assert json.loads(command[command.index(option) + 1]) == {"max_position_embeddings": 900}


async def test_neither_interpreter_nor_url_is_refused(folder: Path) -> None:
    with pytest.raises(TrackwayError, match="expected engine_python or engine_url for engine=vllm"):
        classifier_of(folder, "vllm")
