"""Real servers for OpenAI's own client: one on the torch engine, and one whose engine says what a test wants."""

from collections.abc import Iterator

import pytest
from openai import OpenAI
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.services.rollout.model_routes.scripted_engine import ScriptedEngine
from tests.serving import served_in_thread
from trackway.deploy.bundled import TINY_MODEL
from trackway.rollout.app import create_app
from trackway.rollout.settings import RolloutSettings


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """The tiny model's tokenizer."""
    return AutoTokenizer.from_pretrained(TINY_MODEL)


@pytest.fixture(scope="session")
def torch_url() -> Iterator[str]:
    """The tiny model on the torch engine, served as `tiny`."""
    with served_in_thread(create_app(RolloutSettings(model_path=TINY_MODEL, model_name="tiny", device="cpu"))) as url:
        yield url


@pytest.fixture
def client(torch_url: str) -> Iterator[OpenAI]:
    """OpenAI's client of the torch engine."""
    with OpenAI(base_url=f"{torch_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def scripted_server() -> Iterator[tuple[str, ScriptedEngine]]:
    """A scripted engine with the tiny model's tokenizer, served as `tiny`."""
    engine = ScriptedEngine()
    with served_in_thread(create_app(RolloutSettings(model_path=TINY_MODEL, model_name="tiny"), engine)) as url:
        yield url, engine


@pytest.fixture
def engine(scripted_server: tuple[str, ScriptedEngine]) -> ScriptedEngine:
    """To be told what to say."""
    scripted_server[1].begin_again()
    return scripted_server[1]


@pytest.fixture
def scripted_url(scripted_server: tuple[str, ScriptedEngine], engine: ScriptedEngine) -> str:
    """Where the scripted engine is."""
    return scripted_server[0]


@pytest.fixture
def scripted(scripted_url: str) -> Iterator[OpenAI]:
    """OpenAI's client of the scripted engine, with the retries it comes with."""
    with OpenAI(base_url=f"{scripted_url}/v1", api_key="none", timeout=20) as client:
        yield client
