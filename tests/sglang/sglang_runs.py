"""Engines on a real SGLang, for the models of `tests/vllm`, and waits for what it does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.vllm_runs import DEADLINE_S, DEVICE, PLACED, CanBeMisled
from tests.waiting import async_until
from trackway.rollout.engines.remote.sglang import SglangEngine
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import TrackwayError
from trackway.wire.weights import Verdict

MARKS = [pytest.mark.anyio, pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]
"""The time limit of each test. The first one of a session also waits for SGLang to start."""
ENVIRONMENT = Path(__file__).parents[2] / (".venv-sglang" if DEVICE == "cpu" else ".venv-sglang-cuda")
ON_CPU = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"} if DEVICE == "cpu" else {}
"""Variables of a server on the CPU."""
SERVER_ARGUMENTS = ["--device", DEVICE, "--max-total-tokens", "16384", "--sleep-on-idle"]
if DEVICE == "cuda":  # the default kernels there take no float32
    SERVER_ARGUMENTS += ["--attention-backend", "triton"]
TOOL_ARGUMENTS = ["--tool-call-parser", "qwen25"]
"""Arguments of a server whose chat completions have tool calls."""
Replica = SglangEngine
OTHER_PREFIX = Verdict.ROUNDED
"""An adapter whose tensors have another prefix: SGLang reads the number and the kind of their layer alone."""


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
        engine_args=[*SERVER_ARGUMENTS],
        engine_start_s=DEADLINE_S * 2,
        model_path=model_path,
        max_num_seqs=4,
        max_queue=2,
        weight_wait_s=DEADLINE_S,
        **{**PLACED, **more},
    )


@asynccontextmanager
async def slowed(engine: SglangEngine) -> AsyncIterator[None]:
    """In the block a step takes SGLang a tenth of a second: what a test does there comes before LONG's end."""
    await engine.http.post("/slow_down", {"forward_sleep_time": 0.1})
    try:
        yield
    finally:
        with suppress(TrackwayError):  # the test has ended it
            await engine.http.post("/slow_down", {"forward_sleep_time": None})


async def loads(engine: SglangEngine) -> tuple[int, int]:
    """How many requests SGLang runs, and how many wait for a place."""
    [load] = (await engine.http.get("/v1/loads"))["loads"]
    return load["num_running_reqs"], load["num_waiting_reqs"]


async def busy(engine: SglangEngine, running: int = 1, waiting: int = 0) -> None:
    """Return when SGLang works on so many requests, and so many wait for a place."""

    async def so_busy() -> bool:
        return await loads(engine) == (running, waiting)

    await async_until(so_busy)


async def idle(engine: SglangEngine) -> None:
    """Return when SGLang works on nothing: it then flushes its cache."""
    await engine._empty()


async def stands_still(engine: SglangEngine) -> bool:
    """Whether SGLang takes at most the step that it began before a pause, in the time of ten under `slowed`."""
    before = _slow_steps(engine)
    await asyncio.sleep(1.0)
    return _slow_steps(engine) - before <= 1


async def next_step(engine: SglangEngine) -> None:
    """Return when SGLang begins a step, which takes it a tenth of a second under `slowed`."""
    before = _slow_steps(engine)
    await async_until(lambda: _slow_steps(engine) > before)


def _slow_steps(engine: SglangEngine) -> int:
    """How many steps its log has a line of."""
    assert engine.settings.engine_log is not None
    return engine.settings.engine_log.read_text().count("Scheduler.run_batch sleep")
