"""OpenAI's client, with the retries it comes with, gets its answer from a service that has a bad moment."""

import socket
import struct
import threading
import time
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from transformers import PreTrainedTokenizerBase

from tests.services.rollout.model_routes.openai_server import CHAT
from tests.services.rollout.model_routes.scripted_engine import ScriptedEngine
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _speaks(engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase) -> None:
    engine.says = tokenizer.encode("ok<|im_end|>", add_special_tokens=False)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_engine_is_asked_again_after_the_time_it_names(
    scripted: OpenAI, engine: ScriptedEngine, stream: bool
) -> None:
    engine.refusals = [TrackwayError(ErrorCode.OVERLOADED, "full", bound=1, retry_after_s=1.0)]
    began = time.monotonic()
    answer = scripted.chat.completions.create(model="tiny", messages=CHAT, stream=stream)
    if stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == "ok"  # pyright: ignore
    else:
        assert answer.choices[0].message.content == "ok"  # pyright: ignore[reportAttributeAccessIssue]
    # Without Retry-After the client waits half a second at most.
    assert time.monotonic() - began >= 1.0
    assert len(engine.calls) == 2


def test_an_engine_that_stays_full_is_a_rate_limit(scripted: OpenAI, engine: ScriptedEngine) -> None:
    engine.refusals = [TrackwayError(ErrorCode.OVERLOADED, "full", bound=1, retry_after_s=0.1)] * 3
    with pytest.raises(openai.RateLimitError) as raised:
        scripted.with_options(max_retries=1).chat.completions.create(model="tiny", messages=CHAT)
    assert (raised.value.code, raised.value.type, len(engine.calls)) == ("overloaded", "rate_limit_error", 2)


@pytest.mark.parametrize("code", [ErrorCode.PAUSED, ErrorCode.UNAVAILABLE, ErrorCode.WEIGHTS_BEHIND])
def test_what_passes_is_asked_again(scripted: OpenAI, engine: ScriptedEngine, code: ErrorCode) -> None:
    engine.refusals = [TrackwayError(code, "not now")]
    assert scripted.chat.completions.create(model="tiny", messages=CHAT).choices[0].message.content == "ok"


def test_what_does_not_pass_is_not_asked_again_although_it_is_a_500(scripted: OpenAI, engine: ScriptedEngine) -> None:
    engine.refusals = [TrackwayError(ErrorCode.ENGINE_FAILED, "not finite")]
    with pytest.raises(openai.InternalServerError, match="not finite"):
        scripted.chat.completions.create(model="tiny", messages=CHAT)
    assert len(engine.calls) == 1


@pytest.mark.parametrize("stop", [None, "never"])
def test_a_generation_that_was_cut_is_no_answer(scripted: OpenAI, engine: ScriptedEngine, stop: str | None) -> None:
    engine.ends = "abort"
    with pytest.raises(openai.InternalServerError, match="the generation was aborted") as raised:
        scripted.with_options(max_retries=0).chat.completions.create(model="tiny", messages=CHAT, stop=stop)
    assert (raised.value.status_code, raised.value.code) == (503, "unavailable")


@pytest.fixture
def resetting_url(scripted_url: str) -> Iterator[str]:
    """The scripted service behind a line whose first connection is reset once the request is on it."""
    host, port = scripted_url.removeprefix("http://").split(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def relay() -> None:
            first, _ = listener.accept()
            first.recv(65536)
            first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            first.close()
            second, _ = listener.accept()
            with second, socket.create_connection((host, int(port))) as service:
                back = threading.Thread(target=_copy, args=(service, second))
                back.start()
                _copy(second, service)
                back.join()

        thread = threading.Thread(target=relay)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


def test_a_reset_connection_is_made_anew(resetting_url: str, engine: ScriptedEngine) -> None:
    with OpenAI(base_url=f"{resetting_url}/v1", api_key="none") as client:
        answer = client.chat.completions.with_raw_response.create(model="tiny", messages=CHAT)
    assert answer.parse().choices[0].message.content == "ok"
    assert (answer.retries_taken, len(engine.calls)) == (1, 1)
