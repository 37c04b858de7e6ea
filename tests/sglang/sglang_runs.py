"""Engines on a real SGLang, for the models of `tests/vllm`, and waits for what it does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.vllm.vllm_runs import DEADLINE_S, CanBeMisled
from trackway.rollout.engines.remote.sglang import SglangEngine
from trackway.rollout.settings import RolloutSettings

MARKS = [pytest.mark.anyio, pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]
"""The time limit of each test. The first one of a session also waits for SGLang to start."""
ENVIRONMENT = Path(__file__).parents[2] / ".venv-sglang"
ON_CPU = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
"""Variables of a server on the CPU."""


class Misled(CanBeMisled, SglangEngine):
    """SGLang, misled."""

    async def swap(self, folder: Path, name: str) -> None:
        await super().swap(self.instead.get(folder, folder), name)


def settings_of(model_path: Path, log: Path, **more: Any) -> RolloutSettings:
    """Settings of a replica that starts its own SGLang."""
    return RolloutSettings(
        engine="sglang",
        engine_python=ENVIRONMENT / "bin" / "python",
        engine_log=log,
        engine_args=["--device", "cpu", "--max-total-tokens", "16384", "--sleep-on-idle"],
        engine_start_s=DEADLINE_S * 2,
        model_path=model_path,
        device="cpu",
        max_num_seqs=4,
        max_queue=2,
        weight_wait_s=DEADLINE_S,
        **more,
    )


@asynccontextmanager
async def slowed(engine: SglangEngine) -> AsyncIterator[None]:
    """In the block a step takes SGLang a tenth of a second: what a test does there comes before LONG's end."""
    await engine.http.post("/slow_down", {"forward_sleep_time": 0.1})
    try:
        yield
    finally:
        await engine.http.post("/slow_down", {"forward_sleep_time": None})


async def loads(engine: SglangEngine) -> tuple[int, int]:
    """How many requests SGLang runs, and how many wait for a place."""
    [load] = (await engine.http.get("/v1/loads"))["loads"]
    return load["num_running_reqs"], load["num_waiting_reqs"]


async def busy(engine: SglangEngine, running: int = 1, waiting: int = 0) -> None:
    """Return when SGLang works on so many requests, and so many wait for a place."""
    async with asyncio.timeout(DEADLINE_S):
        while await loads(engine) != (running, waiting):
            await asyncio.sleep(0.02)


async def idle(engine: SglangEngine) -> None:
    """Return when SGLang works on nothing: it then flushes its cache."""
    await engine._empty()


def server_of(engine: SglangEngine) -> list[psutil.Process]:
    """The server's processes, its own first."""
    port = engine.http.base_url.rpartition(":")[2]
    [server] = (
        p for p in psutil.Process().children(recursive=True) if p.cmdline()[1:2] == ["-m"] and port in p.cmdline()
    )
    return [server, *server.children(recursive=True)]
