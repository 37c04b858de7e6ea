"""Real servers for OpenAI's own client: one on the torch engine, and one whose engine says what a test wants."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI
from openai import OpenAI
from scripted_engine import ScriptedEngine
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trackway.rollout.app import create_app
from trackway.rollout.settings import RolloutSettings

TINY = Path(__file__).parents[4] / "examples" / "tiny" / "checkpoint"


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The root URL of the app on a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """The tiny model's tokenizer."""
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="session")
def torch_url() -> Iterator[str]:
    """The tiny model on the torch engine, served as `tiny`."""
    with serving(create_app(RolloutSettings(model_path=TINY, model_name="tiny", device="cpu"))) as url:
        yield url


@pytest.fixture
def client(torch_url: str) -> Iterator[OpenAI]:
    """OpenAI's client of the torch engine."""
    with OpenAI(base_url=f"{torch_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def engine() -> ScriptedEngine:
    """To be told what to say."""
    return ScriptedEngine()


@pytest.fixture
def scripted_url(engine: ScriptedEngine) -> Iterator[str]:
    """The scripted engine with the tiny model's tokenizer, served as `tiny`."""
    with serving(create_app(RolloutSettings(model_path=TINY, model_name="tiny"), engine)) as url:
        yield url


@pytest.fixture
def scripted(scripted_url: str) -> Iterator[OpenAI]:
    """OpenAI's client of the scripted engine, with the retries it comes with."""
    with OpenAI(base_url=f"{scripted_url}/v1", api_key="none") as client:
        yield client
