"""The promise: a call across a link that breaks ends with an error after seconds, however patient the caller is."""

import asyncio
import subprocess
import sys
import time

import pytest

from tests.cluster.network import Network
from trackway.clients import CallPolicy, ServiceClient, close_shared_http
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = [pytest.mark.e2e, pytest.mark.cluster, pytest.mark.program("ip"), pytest.mark.anyio]

PATIENT = CallPolicy(read_s=120.0, total_s=300.0, attempts=1)


@pytest.mark.extended
async def test_a_call_whose_link_is_cut_is_given_up_long_before_a_slow_answer_would_be() -> None:
    network, asked, over = Network("caller", "service"), asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await over.wait()
        writer.transport.abort()

    with network.connected():
        with network.inside("service"):
            server = await asyncio.start_server(silent, network.address("service"), 8000)
        with network.inside("caller"):
            client = ServiceClient(f"http://{network.address('service')}:8000", policy=PATIENT)
            call = asyncio.create_task(client.send("GET", "/slow"))
            await asyncio.wait_for(asked.wait(), 60)
            network.cut("service")
            began = time.monotonic()
            with pytest.raises(TrackwayError) as error:
                await call
        assert error.value.code is ErrorCode.UNAVAILABLE
        assert 5.0 < time.monotonic() - began < 40.0
        over.set()
        server.close()
        await close_shared_http()


def test_a_drain_where_no_ray_runs_says_so() -> None:
    alone = ["unshare", "--pid", "--fork", "--mount-proc"]
    ended = subprocess.run([*alone, sys.executable, "-m", "trackway.deploy.drain"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "drain: expected one Ray node on this machine, got 0; run this on a machine with one node\n"
