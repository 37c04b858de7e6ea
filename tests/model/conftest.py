"""The folder of SmolLM2-135M-Instruct, a batch that its own engine sampled, and engines that start once."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from make_model import MODEL, build

from tests.model.real_model import RANK, Published, engine_settings, made_by, sampled
from tests.services.rollout.engine_runs import started
from tests.vllm.vllm_runs import ENVIRONMENT, Misled
from trackway.rollout.engines.protocol import Engine
from trackway.rollout.engines.remote.vllm import VllmEngine
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.settings import RolloutSettings
from trackway.wire.trajectory import Trajectory


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """One event loop for the session, since the engines live on one."""
    return "asyncio"


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder that `examples/smollm2/make_model.py` makes, made now if it is not there."""
    if not MODEL.exists():
        build(MODEL)
    return MODEL


@pytest.fixture(scope="session")
async def torch_engine(model: Path) -> AsyncIterator[Engine]:
    """The embedded engine."""
    async with started(TorchEngine(engine_settings(model))) as engine:
        yield engine


def vllm_settings(model: Path, log: Path, **more: Any) -> RolloutSettings:
    """Of a real vLLM; skips where it is not installed."""
    if not (ENVIRONMENT / ".ready").exists():
        pytest.skip(f"expected vLLM in {ENVIRONMENT}, found none: `make test-vllm` builds it")
    python = ENVIRONMENT / "bin" / "python"
    return engine_settings(model, engine="vllm", engine_python=python, engine_log=log, enforce_eager=True, **more)


@pytest.fixture(scope="session")
async def vllm_engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    """A real vLLM that takes no adapters, as a rollout service starts it by default."""
    async with started(VllmEngine(vllm_settings(model, tmp_path_factory.mktemp("vllm") / "vllm.log"))) as engine:
        yield engine


@pytest.fixture(scope="session")
async def adapter_engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Misled]:
    """A real vLLM that loads adapters by its own routes."""
    log = tmp_path_factory.mktemp("adapters") / "vllm.log"
    async with started(Misled(vllm_settings(model, log, max_lora_rank=RANK))) as engine:
        yield engine


@pytest.fixture(scope="session")
async def batch(torch_engine: Engine, model: Path) -> list[Trajectory]:
    """What the engine samples with the base weights, with rewards that differ within each group."""
    return await sampled(torch_engine, model)


@pytest.fixture(scope="module", params=["full, 1 rank", "full, 2 ranks", "LoRA, 1 rank", "LoRA, 2 ranks"])
def published(
    request: pytest.FixtureRequest, model: Path, batch: list[Trajectory], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Published]:
    """Weights after an update, as a learner of this kind published them, and its logprobs of any trajectories."""
    with made_by(request.param, model, batch, tmp_path_factory.mktemp("published")) as made:
        yield made
