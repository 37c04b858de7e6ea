"""The server behind the engine: started, attached to, late, stuck, dead."""

import asyncio
import math
import os
import signal
import stat
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.services.rollout.engine_runs import started
from tests.services.rollout.engines.remote.sglang import sglang_fake as fakes
from tests.services.rollout.engines.remote.sglang.sglang_cases import LONG, PROMPT, answer, in_flight, params
from tests.services.rollout.engines.remote.sglang.sglang_fake import Fake
from trackway.rollout.engines.remote.sglang import SglangEngine
from trackway.rollout.settings import RolloutSettings
from trackway.system import free_port
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = [pytest.mark.slow, pytest.mark.anyio]
Folder = Callable[[int], Path]
Starts = Callable[..., AbstractAsyncContextManager[SglangEngine]]
ROOT = Path(__file__).parents[6]


async def test_stuck_for_counts_from_the_last_token_and_only_while_there_is_work(
    engine: SglangEngine, fake: Fake
) -> None:
    assert engine.stuck_for() == 0.0
    task = await in_flight(engine, fake)
    fake.paused = True
    await asyncio.sleep(0.3)
    assert 0.2 < engine.stuck_for() < 5
    await engine.pause("keep")
    assert engine.stuck_for() == 0.0
    await engine.resume()
    await task
    assert engine.stuck_for() == 0.0


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


def test_neither_interpreter_nor_url_is_refused(folder: Folder) -> None:
    with pytest.raises(TrackwayError, match="expected engine_python or engine_url for engine=sglang"):
        SglangEngine(RolloutSettings(engine="sglang", model_path=folder(0)))


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """As an interpreter of an environment with SGLang: whatever module it is asked for, the fake runs."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\ncd {ROOT}\nexec {sys.executable} -m {fakes.__name__} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


async def test_the_side_process_is_started_with_the_settings_and_ends_with_the_engine(
    interpreter: Path, folder: Folder, tmp_path: Path
) -> None:
    settings = RolloutSettings(
        engine="sglang",
        model_path=folder(0),
        engine_python=interpreter,
        engine_args=["--log-level", "debug"],
        engine_log=tmp_path / "log",
        tensor_parallel_size=2,
        gpu_memory_utilization=0.3,
        enforce_eager=True,
        enable_sleep=True,
        prefix_caching=False,
        max_num_seqs=8,
        max_model_len=100,
    )
    async with started(SglangEngine(settings)) as engine:
        assert (await engine.generate(PROMPT, params(5), "r")).token_ids == answer(0, 5)
        process = engine._process
    line = next(line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("server_args="))
    got = eval(line.removeprefix("server_args="))
    assert (got.pop("host"), got.pop("module")) == ("127.0.0.1", "sglang.launch_server")
    assert 1024 < got.pop("port") < 65536
    assert got == {
        "model_path": str(folder(0)),
        "served_model_name": "policy",
        "dtype": "bfloat16",
        "context_length": 106,
        "max_running_requests": 8,
        "tp_size": 2,
        "mem_fraction_static": 0.3,
        "stream_interval": 16,
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "disable_radix_cache": True,
        "disable_cuda_graph": True,
        "enable_memory_saver": True,
        "enable_lora": False,
        "is_embedding": False,
        "max_lora_rank": None,
        "max_loras_per_batch": None,
        "lora_target_modules": None,
        "log_level": "debug",
    }
    assert not process.alive


async def test_a_side_process_that_is_killed_fails_requests_with_its_log_and_is_stuck_for_ever(
    interpreter: Path, folder: Folder, tmp_path: Path
) -> None:
    settings = RolloutSettings(model_path=folder(0), engine_python=interpreter, engine_log=tmp_path / "log")
    async with started(SglangEngine(settings)) as engine:
        stream = engine.stream(PROMPT, LONG, "r")
        await anext(stream)
        os.kill(_child_of(engine._process._guard.pid), signal.SIGKILL)  # pyright: ignore[reportOptionalMemberAccess]
        with pytest.raises(TrackwayError, match=r"with status -9(.|\n)*server_args=") as raised:
            async for _ in stream:
                pass
        assert raised.value.code is ErrorCode.UNAVAILABLE
        assert engine.stuck_for() == math.inf
        with pytest.raises(TrackwayError, match="with status -9") as raised:
            await engine.generate(PROMPT, params(1), "r")
        assert raised.value.code is ErrorCode.UNAVAILABLE


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
