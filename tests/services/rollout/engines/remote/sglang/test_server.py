"""The server behind the engine: started, attached to, late, stuck, dead."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.services.rollout.engines.remote.sglang.sglang_cases import PROMPT, answer, params
from tests.services.rollout.engines.remote.sglang.sglang_fake import Fake
from trackway.rollout.engines.remote.sglang import SglangEngine
from trackway.rollout.settings import RolloutSettings
from trackway.system import free_port
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import EngineLoad

pytestmark = [pytest.mark.slow, pytest.mark.anyio]
Folder = Callable[[int], Path]
Starts = Callable[..., AbstractAsyncContextManager[SglangEngine]]
ROOT = Path(__file__).parents[6]


async def test_a_call_with_a_deadline_is_not_held_by_a_server_that_hangs(engine: SglangEngine, fake: Fake) -> None:
    fake.hang.add("/generate")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await engine.generate(PROMPT, params(1), "r")
    assert engine.stats().running == 0


async def test_a_server_that_is_not_there_is_unavailable_after_the_bound(folder: Folder) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    engine = SglangEngine(RolloutSettings(model_path=folder(0), engine_url=url, engine_start_s=0.4))
    with pytest.raises(TrackwayError, match=rf"expected a server at {url}") as raised:
        await engine.start()
    assert raised.value.code is ErrorCode.UNAVAILABLE
    await engine.stop()


async def test_a_server_that_warms_up_is_waited_for(starts: Starts, fake: Fake) -> None:
    fake.healthy = False
    asyncio.get_running_loop().call_later(0.3, setattr, fake, "healthy", True)
    async with starts() as engine:
        assert (await engine.generate(PROMPT, params(1), "r")).token_ids == answer(0, 1)


@pytest.mark.parametrize(
    ("arguments", "meet_in_a_file"), [(["--pp-size", "2"], True), (["--dp-size=2"], False), (["--nnodes", "2"], False)]
)
def test_ranks_of_one_node_meet_in_a_file(
    folder: Folder, tmp_path: Path, arguments: list[str], meet_in_a_file: bool
) -> None:
    settings = RolloutSettings(model_path=folder(0), engine_python=Path("python"), engine_args=arguments)
    got = SglangEngine(settings)._environment(tmp_path).get("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE")
    assert got == (f"file://{tmp_path}/ranks" if meet_in_a_file else None)


@pytest.mark.parametrize(("sleeps", "graphs"), [(True, "true"), (False, None)])
def test_cuda_graphs_sleep_with_the_kv_cache(folder: Folder, tmp_path: Path, sleeps: bool, graphs: str | None) -> None:
    settings = RolloutSettings(model_path=folder(0), engine_python=Path("python"), enable_sleep=sleeps)
    assert SglangEngine(settings)._environment(tmp_path).get("SGLANG_MEMORY_SAVER_CUDA_GRAPH") == graphs


def test_neither_interpreter_nor_url_is_refused(folder: Folder) -> None:
    with pytest.raises(TrackwayError, match="expected engine_python or engine_url for engine=sglang"):
        SglangEngine(RolloutSettings(engine="sglang", model_path=folder(0)))


def test_the_server_is_started_with_the_settings(folder: Folder) -> None:
    settings = RolloutSettings(
        engine="sglang",
        model_path=folder(0),
        engine_python=Path("python"),
        tensor_parallel_size=2,
        gpu_memory_utilization=0.3,
        enforce_eager=True,
        enable_sleep=True,
        prefix_caching=False,
        max_num_seqs=8,
        max_model_len=100,
    )
    assert SglangEngine(settings)._command(1) == [
        *("python", "-m", "sglang.launch_server", "--model-path", str(folder(0)), "--served-model-name", "policy"),
        *("--host", "127.0.0.1", "--port", "1", "--dtype", "bfloat16", "--context-length", "106"),
        *("--max-running-requests", "8", "--tp-size", "2", "--mem-fraction-static", "0.3", "--stream-interval", "16"),
        *("--skip-tokenizer-init", "--incremental-streaming-output", "--disable-radix-cache", "--disable-cuda-graph"),
        *("--enable-memory-saver", "--disable-overlap-schedule"),
    ]


@pytest.mark.parametrize("more", [{"update_mode": "wait"}, {"update_mode": "abort"}, {"max_lora_rank": 8}])
def test_sglang_overlaps_steps_where_a_request_has_tokens_of_one_version(folder: Folder, more: dict[str, Any]) -> None:
    settings = RolloutSettings(engine="sglang", model_path=folder(0), engine_python=Path("python"), **more)

    assert "--disable-overlap-schedule" not in SglangEngine(settings)._command(1)


async def test_the_load_is_summed_over_groups_of_ranks(engine: SglangEngine, fake: Fake) -> None:
    fake.loads = [
        {"num_running_reqs": 3, "num_waiting_reqs": 1, "num_used_tokens": 600, "max_total_num_tokens": 1000},
        {"num_running_reqs": 2, "num_waiting_reqs": 0, "num_used_tokens": 100, "max_total_num_tokens": 1000},
    ]
    assert await engine.load() == EngineLoad(
        running=5, waiting=1, preemptions=0, kv_used=700, kv_tokens=2000, max_len=engine.max_len
    )
