"""A real SGLang as a process beside the replica: where it listens."""

from tests.sglang.sglang_runs import MARKS
from tests.vllm.vllm_runs import server_of
from trackway.rollout.engines.remote.sglang import SglangEngine

pytestmark = MARKS


async def test_every_process_of_the_server_listens_on_loopback_only(engine: SglangEngine) -> None:
    sockets = [socket for process in server_of(engine) for socket in process.net_connections("inet")]
    assert {socket.laddr.ip for socket in sockets if not socket.raddr} == {"127.0.0.1"}
