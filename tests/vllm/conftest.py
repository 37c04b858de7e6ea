"""One real vLLM for the session, and folders of weights it can load."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from vllm_runs import ENVIRONMENT, Weights, build, canary_of, load, published, settings_of, started

from trackway.rollout.engines.vllm import VllmEngine


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """One event loop for the session, since the engine lives on one."""
    return "asyncio"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder that a replica starts with; tied, so without `lm_head.weight`."""
    return build(tmp_path_factory.mktemp("base") / "model", seed=0)


@pytest.fixture(scope="session")
def first(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """The base's own weights, published."""
    model = load(base)
    return Weights(published(base, tmp_path_factory.mktemp("first") / "1"), model, canary_of(model))


@pytest.fixture(scope="session")
def second(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Other weights of the same shape, published."""
    folder = tmp_path_factory.mktemp("second")
    model = load(build(folder / "model", seed=1))
    return Weights(published(folder / "model", folder / "2"), model, canary_of(model))


@pytest.fixture(scope="session")
def environment() -> Path:
    """Where vLLM is installed."""
    if not (ENVIRONMENT / ".ready").exists():
        pytest.skip(f"expected vLLM in {ENVIRONMENT}, found none: `make test-vllm` builds it")
    return ENVIRONMENT


@pytest.fixture(scope="session")
async def shared(environment: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    """The session's engine, with whatever weights the last test left."""
    async with started(settings_of(base, tmp_path_factory.mktemp("server") / "vllm.log")) as engine:
        yield engine


@pytest.fixture
async def engine(shared: VllmEngine, first: Weights) -> VllmEngine:
    """The session's engine with the base's weights, as a version of its own."""
    await shared.resume()
    await shared.load_weights(first.folder, shared.version + 1, first.canary)
    return shared


@pytest.fixture
def without_head(second: Weights, tmp_path: Path) -> Path:
    """The second weights published without `lm_head.weight`, as `save_pretrained` of a tied model does it."""
    folder = tmp_path / "without-head"
    shutil.copytree(second.folder.parent / "model", folder)
    return folder
