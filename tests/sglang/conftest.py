"""One real SGLang for the session, and folders of weights it can load."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.sglang import sglang_runs
from tests.sglang.sglang_runs import ENVIRONMENT, ON_CPU, idle, settings_of
from tests.vllm.conftest import anyio_backend, base, first, patience, second, without_head
from tests.vllm.vllm_runs import Weights, started
from trackway.rollout.engines.remote.sglang import SglangEngine

__all__ = ["anyio_backend", "base", "first", "patience", "second", "without_head"]


@pytest.fixture(scope="session")
def server() -> ModuleType:
    """The functions by which the tests of `tests/servers` run an SGLang."""
    return sglang_runs


@pytest.fixture(scope="session")
def environment() -> Path:
    """Where SGLang is installed."""
    if not (ENVIRONMENT / ".ready").exists():
        pytest.skip(f"expected SGLang in {ENVIRONMENT}, found none: `make test-sglang` builds it")
    return ENVIRONMENT


@pytest.fixture(scope="session", autouse=True)
def on_cpu() -> Iterator[None]:
    """Servers that tests start find no GPU, and look for none."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ON_CPU.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
async def shared(
    environment: Path, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SglangEngine]:
    """The session's engine, with whatever weights the last test left; its server would take adapters, too."""
    settings = settings_of(base, tmp_path_factory.mktemp("server") / "sglang.log", engine_tokenizer=True)
    settings.engine_args.extend(["--enable-lora", "--lora-backend", "torch_native", "--lora-target-modules", "all"])
    settings.engine_args.extend(["--max-lora-rank", "8", "--max-loras-per-batch", "4"])
    async with started(SglangEngine(settings)) as engine:
        yield engine


@pytest.fixture
async def engine(shared: SglangEngine, first: Weights) -> SglangEngine:
    """The session's engine with the base's weights, as a version of its own, and nothing in flight."""
    await shared.resume()
    await idle(shared)
    await shared.load_weights(first.folder, shared.version + 1, first.proof)
    return shared
