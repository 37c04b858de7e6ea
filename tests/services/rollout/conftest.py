"""Folders of random tiny models, an engine that runs on its thread, and a weight store."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from tests.services.rollout.engine_runs import started
from tests.services.rollout.rollout_models import VOCAB, build
from trackway.clients.weights import WeightStore
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.settings import RolloutSettings


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Folder of a random model by family and seed, built once."""
    root = tmp_path_factory.mktemp("models")

    def folder(family: str, seed: int = 0) -> Path:
        path = root / f"{family}-{seed}"
        if not path.is_dir():
            build(path, family, seed)
        return path

    return folder


@pytest.fixture
def model_path(folders: Callable[[str, int], Path]) -> Path:
    """A GQA Qwen3."""
    return folders("qwen3-gqa", 0)


@pytest.fixture
def other_path(folders: Callable[[str, int], Path]) -> Path:
    """The same architecture with other weights."""
    return folders("qwen3-gqa", 1)


@pytest.fixture
async def engine(model_path: Path) -> AsyncIterator[TorchEngine]:
    """Of the random model, on its thread."""
    async with started(TorchEngine(RolloutSettings(model_path=model_path, device="cpu"))) as engine:
        yield engine


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    """An empty weight store on the disk."""
    return WeightStore(str(tmp_path / "weights"))


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer whose token n is the word `wn`."""
    folder = tmp_path_factory.mktemp("with-tokenizer")
    build(folder)
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder
