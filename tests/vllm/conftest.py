"""One real vLLM for the session, and folders of weights it can load."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from tests.vllm import vllm_runs
from tests.vllm.vllm_runs import (
    DEADLINE_S,
    ENVIRONMENT,
    PROMPT,
    SHORT,
    Weights,
    build,
    idle,
    load,
    proof_of,
    published,
    settings_of,
    started,
)
from trackway.clients.rollout import RolloutClient
from trackway.rollout.engines.remote import control
from trackway.rollout.engines.remote.vllm import VllmEngine
from trackway.rollout.engines.weight_folder import adaptable_layers
from trackway.wire.rollout import GenerateReply, GenerateRequest

pytest.register_assert_rewrite("tests.servers")


@pytest.fixture(scope="session")
def server() -> ModuleType:
    """The functions by which the tests of `tests/servers` run a vLLM."""
    return vllm_runs


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
    return Weights(published(base, tmp_path_factory.mktemp("first") / "1"), model, proof_of(model))


@pytest.fixture(scope="session")
def second(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Other weights of the same shape, published."""
    folder = tmp_path_factory.mktemp("second")
    model = load(build(folder / "model", seed=1))
    return Weights(published(folder / "model", folder / "2"), model, proof_of(model))


@pytest.fixture(scope="session")
def environment() -> Path:
    """Where vLLM is installed."""
    if not (ENVIRONMENT / ".ready").exists():
        pytest.skip(f"expected vLLM in {ENVIRONMENT}, found none: `make test-vllm` builds it")
    return ENVIRONMENT


class Witness(VllmEngine):
    """Asks its server as a client does, before anybody gives its weights a version."""

    nameless: asyncio.Task[GenerateReply]

    async def _prepare(self) -> None:
        async with httpx.AsyncClient() as http:
            request = GenerateRequest(token_ids=PROMPT, sampling_params=SHORT)
            self.nameless = asyncio.create_task(RolloutClient(self.http.base_url, http).generate(request))
            await asyncio.wait([self.nameless])
        await super()._prepare()


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """Replicas wait longer for what a request that was cut has made: a busy machine takes its time to tell."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "CUT_GRACE_S", DEADLINE_S)
        yield


@pytest.fixture(scope="session")
async def shared(environment: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Witness]:
    """The session's engine, with whatever weights the last test left; its server would take adapters, too."""
    settings = settings_of(base, tmp_path_factory.mktemp("server") / "vllm.log")
    layers = ["--lora-target-modules", *adaptable_layers(base)]
    settings.engine_args.extend(["--enable-lora", "--max-lora-rank", "8", "--max-loras", "4", *layers])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        async with started(Witness(settings)) as engine:
            yield engine


@pytest.fixture
async def nameless(shared: Witness) -> GenerateReply:
    """What a plain vLLM answered whose weights never got a version."""
    return await shared.nameless


@pytest.fixture
async def engine(shared: VllmEngine, first: Weights) -> VllmEngine:
    """The session's engine with the base's weights, as a version of its own, and nothing in flight."""
    await shared.resume()
    await idle(shared)
    await shared.load_weights(first.folder, shared.version + 1, first.proof)
    return shared


@pytest.fixture
def without_head(second: Weights, tmp_path: Path) -> Path:
    """The second weights published without `lm_head.weight`, as `save_pretrained` of a tied model does it."""
    folder = tmp_path / "without-head"
    shutil.copytree(second.folder.parent / "model", folder)
    return folder
