"""A backend that is dead, broken or silent: rollouts neither raise nor wait, and their spans lie on disk."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from trackway.tracing import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op, verl_config

pytestmark = pytest.mark.slow

TRAJECTORIES = 60
CALLS = 10
PAUSE_S = 0.02


@contextlib.contextmanager
def nobody() -> Iterator[int]:
    """A port where nobody listens, kept so."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """Takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        yield listening.getsockname()[1]


@contextlib.contextmanager
def failing() -> Iterator[int]:
    """Answers everything with 500."""

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 500 Broken\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(60)


class Loop:
    @rollout_trace_op
    async def run(self, n: int) -> int:
        return sum([await self.generate(index, "x" * 1000) for index in range(n)])

    @rollout_trace_op
    async def generate(self, index: int, prompt: str) -> int:
        await asyncio.sleep(PAUSE_S)
        return index


async def trajectory(index: int) -> int:
    with rollout_trace_attr(sample_index=index, step=1, rollout_n=0):
        return await Loop().run(CALLS)


async def seconds() -> float:
    """How long all trajectories take together."""
    started = time.perf_counter()
    results = await asyncio.gather(*(trajectory(index) for index in range(TRAJECTORIES)))
    assert results == [sum(range(CALLS))] * TRAJECTORIES
    return time.perf_counter() - started


@pytest.mark.anyio
@pytest.mark.parametrize("backend", [nobody, silent, failing])
async def test_rollouts_go_on_at_their_speed_and_the_spans_wait(
    backend: Callable[[], AbstractContextManager[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    untraced = await seconds()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(verl_config, "EXIT_DEADLINE_S", 0.5)
    with backend() as port:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        started = time.perf_counter()
        RolloutTraceConfig.init("p", "e", "mlflow")
        assert time.perf_counter() - started < 10.0  # one request that waited for it would take its 30 s
        client = RolloutTraceConfig.get_client()
        assert client is not None
        try:
            traced = await seconds()
            assert not client.flush(0.5)
            assert client.stats().backends["mlflow"].waiting == client.stats().ended == TRAJECTORIES * (CALLS + 2)
        finally:
            RolloutTraceConfig.reset()
    assert client.stats().lost == 0
    on_disk = [int(path.stem.rpartition("-")[2]) for path in tmp_path.rglob("*.otlp")]
    assert sum(on_disk) == client.stats().ended
    assert traced < untraced + 10.0  # one call that waited for the silent backend would take its 30 s
