"""Sessions under the supervisor: started, woken, ended, and continued by the next service."""

import asyncio
from pathlib import Path

import pytest

from tests.services.trainer.calls.sessions import LORA, LR, body
from tests.services.trainer.real_runs import ended, pid_of, urls
from tests.waiting import async_until
from trackway.trainer.calls.log import Op, RequestLog, TrainingCall
from trackway.trainer.calls.results import Results
from trackway.trainer.supervisor.manager import RunManager
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import RunState

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


class Client:
    """The service's side of a session named `s`."""

    def __init__(self, outputs: Path) -> None:
        calls = outputs / "s" / "calls"
        self.log, self.results = RequestLog(calls), Results(calls)

    def call(self, seq_id: int, op: Op, body: bytes = b"") -> str:
        id = f"s:train:0:{seq_id}"
        arguments = {"create_model": {"lora_config": LORA}, "optim_step": LR}.get(op, {})
        call = TrainingCall(id=id, model_id="s:train:0", seq_id=seq_id, op=op, arguments=arguments)
        self.log.append(call, body)
        return id


async def test_a_session_is_a_run_that_the_next_service_continues_and_that_finishes(
    tmp_path: Path, tiny_model: Path
) -> None:
    outputs = tmp_path / "outputs"
    services = urls("http://127.0.0.1:9", tmp_path)
    runs, client = RunManager(outputs, services, 60.0), Client(outputs)
    values = {"actor_rollout_ref.model.path": str(tiny_model), "trackway.device": "cpu"}

    info = await runs.start_session("s", values)
    assert (info.state, info.policy) == (RunState.STARTING, "s")
    with pytest.raises(TrackwayError, match="max_runs") as raised:
        await runs.start_session("t", values)
    assert raised.value.code is ErrorCode.CONFLICT
    client.call(0, "create_model")
    client.call(1, "forward_backward", body(1))
    last = client.call(2, "optim_step")
    runs.wake("s")
    await async_until(lambda: client.results.read(last))
    first = pid_of(runs, "s")
    await runs.close()

    assert runs.registry.info("s").interrupted
    client.call(3, "forward_backward", body(2))
    last = client.call(4, "optim_step")
    runs = RunManager(outputs, services, 60.0)
    assert runs.interrupted(sessions_only=True) == ["s"]
    info = await runs.resume("s", by_itself=True)
    assert (info.policy, pid_of(runs, "s") == first) == ("s", False)
    await async_until(lambda: client.results.read(last))
    client.call(5, "optim_step")
    await runs.end_session("s")

    info = await ended(runs, "s")
    assert (info.state, info.step, info.interrupted) == (RunState.FINISHED, 3, False)
    await asyncio.wait_for(runs.close(), 60)
    assert runs.interrupted(sessions_only=True) == []


async def test_a_session_that_ends_while_its_service_is_lost_is_not_continued(tmp_path: Path, tiny_model: Path) -> None:
    runs = RunManager(tmp_path / "outputs", urls("http://127.0.0.1:9", tmp_path), 0.0)
    values = {"actor_rollout_ref.model.path": str(tiny_model), "trackway.device": "cpu"}
    await runs.start_session("s", values)
    await runs.close()
    assert runs.interrupted(sessions_only=True) == ["s"]

    await runs.end_session("s")

    assert runs.interrupted(sessions_only=True) == []
    await runs.end_session("unknown")
